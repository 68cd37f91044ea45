"""Keys in pages: the kernels follow the block table themselves; nothing is gathered.

They know how many keys each sequence has and measure bands on it. So one call serves all sequences,
but where a mask is none of their programs: then there is one for each sequence, of booleans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.arguments import (
    DTYPES,
    Array,
    array,
    memory,
    rows,
    sinks_argument,
    terms_of,
)
from polyattn.backends.native_cpu.torch.calls import (
    Constants,
    as_it_counts,
    dense_rows,
    empty_like_rows,
    empty_lse,
)
from polyattn.backends.native_cpu.torch.levels import differentiates
from polyattn.errors import InvalidProblem, Unsupported
from polyattn.masks import Mask
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.native.program import dense_program, encode
from polyattn.problem import Problem
from polyattn.torch.kit.masking import Dims, materialise

__all__ = ["paged_kernel"]

_CPU = torch.device("cpu")


def paged_kernel(problem: Problem, constants: Constants) -> Callable[..., Any]:
    """Return ``kernel(q, key_pages, value_pages, mask, bias, sinks, (block_table, lengths))``."""
    call = _Paged(problem, constants)

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        bias: Any,
        sinks: Any,
        pages: tuple[Tensor, Tensor],
    ) -> Any:
        if differentiates((q, k, v, sinks)):
            raise Unsupported(
                "got paged keys on native_cpu under forward-mode differentiation or a function "
                "transform (torch.func), expected a plain call; ask for backend='reference', which "
                "gathers the keys."
            )
        table, lengths = (x.to(torch.int64).contiguous() for x in pages)
        out, lse = call(dense_rows(q), dense_rows(k), dense_rows(v), mask, sinks, table, lengths)
        return (out, lse) if problem.lse else out

    return kernel


class _Paged:
    """The calls of one problem; `__call__` holds on to every tensor that a pointer is taken of."""

    def __init__(self, problem: Problem, constants: Constants) -> None:
        self.problem, self.constants = problem, constants
        self.run = module.load().forward

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        sinks: Tensor | None,
        table: Tensor,
        lengths: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        p, layout = self.problem, self.constants.layout
        out = empty_like_rows(q, p.value_dim, layout)
        lse = empty_lse(q, layout) if p.lse else None
        sinks = None if sinks is None else as_it_counts(sinks.float()).contiguous()
        keys = array(k, layout), array(v, layout)
        queries: list[Array | None] = [array(q, layout), array(out, layout)]
        queries.append(None if lse is None else rows(lse, layout))
        extras = None if sinks is None else sinks_argument(sinks), (p.paged or 1, k.shape[0])
        program = None if mask is None else encode(mask)
        if mask is None or program is not None:
            terms, _, _ = terms_of(() if program is None else program.codes, [], layout)
            held = memory(table), memory(lengths)
            self._one(p.batch, p.kv_len, queries, keys, terms, extras, held)
            return out, lse
        sizes = (q.element_size(), out.element_size(), 4)
        for b, length in enumerate(lengths.tolist()):
            at = [_entry(x, b, size) for x, size in zip(queries, sizes, strict=True)]
            codes, arrays = self._dense(mask, length)
            terms, _, _ = terms_of(codes, arrays, layout)
            held = memory(table[b]), memory(lengths[b])
            self._one(1, length, at, keys, terms, extras, held)
        return out, lse

    def _dense(self, mask: Mask, kv_len: int) -> tuple[Sequence[int], list[Tensor]]:
        """Return the program of a mask that has none of its own, for one sequence."""
        p = self.problem
        seen = materialise(mask, Dims(1, p.heads, p.kv_heads, p.q_len, kv_len), _CPU)
        return dense_program(seen).codes, [seen.view(torch.uint8)]

    def _one(
        self,
        batch: int,
        kv_len: int,
        queries: Sequence[Array | None],
        keys: tuple[Array, Array],
        terms: Any,
        extras: tuple[Any, tuple[int, int]],
        held: tuple[tuple[int, int], tuple[int, int]],
    ) -> None:
        p, (_, scale, softcap) = self.problem, self.constants
        q, out, lse = queries
        (sinks, (page_size, count)), (table, lengths) = extras, held
        sizes = (batch, p.heads, p.kv_heads, p.q_len, kv_len, p.head_dim, p.value_dim)
        dtype = DTYPES[getattr(torch, p.dtype)]
        isa = isa_for(dtype, p.q_len, p.heads, p.kv_heads)
        try:
            self.run(
                isa, torch.get_num_threads(), dtype, sizes, scale, softcap, q, *keys, out, lse,
                terms, None, None, None, sinks,
                (*table, p.kv_len // page_size, page_size, count, *lengths), None,
            )  # fmt: skip
        except ValueError as error:
            raise InvalidProblem(
                f"got a block table that does not fit {count} pages of {page_size} keys: {error}."
            ) from error


def _entry(x: Array | None, b: int, size: int) -> Array | None:
    """Return an array that begins at batch entry `b`."""
    if x is None:
        return None
    pointer, there, batch, head, row = x
    skipped = b * batch * size
    return pointer + skipped, max(there - skipped, 0), batch, head, row

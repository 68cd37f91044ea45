"""FlexAttention's two implementations: unfused, and compiled once for a class of problems."""

from __future__ import annotations

import functools
import itertools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyattn.backends.flex.torch.terms import Spec, Terms, mods
from polyattn.problem import Problem
from polyattn.torch.internals import eager_flex_attention, mark_any_length, recompile_limit_hit

__all__ = ["Klass", "Result", "compiled", "eager"]

_EAGER_SCORES = 1 << 26  # scores held at once by the eager route where no gradient needs them all

Result = tuple[Tensor, Tensor | None]


def eager(spec: Spec, q: Tensor, k: Tensor, v: Tensor, terms: Terms, trains: bool) -> Result:
    """Run FlexAttention's unfused implementation in float32 at least, some rows at a time."""
    dtype, q_len = q.dtype, q.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if terms.sinks is not None:
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    held = q.shape[0] * q.shape[1] * k.shape[2]
    rows = q_len if trains else max(1, min(q_len, _EAGER_SCORES // max(held, 1)))
    parts = [
        _eager_rows(spec, q[:, :, start : start + rows], k, v, terms, (start, trains))
        for start in range(0, q_len, rows)
    ]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return out.to(dtype), lse if spec.lse else None


def _eager_rows(
    spec: Spec, q: Tensor, k: Tensor, v: Tensor, terms: Terms, how: tuple[int, bool]
) -> tuple[Tensor, Tensor]:
    """Run some query rows; the heads of a group become rows, so that no key is repeated."""
    from torch.nn.attention.flex_attention import noop_mask

    start, trains = how
    heads, rows, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    groups = heads // kv_heads

    def place(h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return h * groups + m // rows, start + m % rows

    def folded(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x[:, :, start : start + rows] if x.shape[2] > 1 else x
        if groups == 1 or (x.shape[1] == 1 and x.shape[2] == 1):
            return x
        return x.expand(-1, heads, rows, -1).unflatten(1, (kv_heads, groups)).flatten(2, 3)

    terms = terms._replace(bias=folded(terms.bias), sinks=folded(terms.sinks))
    score_mod, mask_mod = mods(spec, terms, place, trains)
    q = q.unflatten(1, (kv_heads, groups)).flatten(2, 3)
    out, lse, *_ = eager_flex_attention()(
        q, k, v, score_mod or (lambda score, *_: score), (mask_mod or noop_mask,), spec.scale, {}
    )
    out, lse = (x.unflatten(2, (groups, rows)).flatten(1, 2) for x in (out, lse))
    return out, lse * math.log(2)  # it counts in powers of two


def _native(
    spec: Spec, block: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, terms: Terms, blocks: Any
) -> Result:
    """Call FlexAttention where a compiler takes it in.

    The sink's key is in k and v already.
    """
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    score_mod, mask_mod = mods(spec, terms, lambda h, m: (h, m))
    block_mask: Any = None
    if mask_mod is not None:
        block_mask = BlockMask(  # type: ignore[misc]  # the tensors come first, in this order
            (q.shape[2], k.shape[2]), *blocks, BLOCK_SIZE=block, mask_mod=mask_mod
        )
    aux: Any = AuxRequest(lse=True) if spec.lse else None
    tiles: Any = _tiles(block) if q.is_cuda else None
    result: Any = flex_attention(
        q, k, v, score_mod, block_mask, spec.scale, enable_gqa=spec.gqa, return_aux=aux,
        kernel_options=tiles,
    )  # fmt: skip
    return (result[0], result[1].lse) if spec.lse else (result, None)


def _tiles(block: tuple[int, int]) -> dict[str, int] | None:
    """Return the tiles of blocks that are smaller than those which torch chooses on CUDA."""
    if min(block) >= 128:
        return None
    q, k = (min(size, 64) for size in block)
    return {
        "BLOCK_M": q, "BLOCK_N": k, "BLOCK_M1": q, "BLOCK_N1": k, "BLOCK_M2": q, "BLOCK_N2": k,
    }  # fmt: skip


@dataclass(frozen=True)
class Klass:
    """Problems that share code. `symbolic`: of any lengths, which `facts` then leaves out."""

    spec: Spec
    block: tuple[int, int]
    facts: Problem
    symbolic: bool


@functools.lru_cache(maxsize=128)
def compiled(klass: Klass) -> _Compiled:
    """Return the code of a class; it is compiled at its first call."""
    return _Compiled(klass)


class _Compiled:
    """FlexAttention compiled for one class of problems.

    The compiler keeps what it made by code object and stops after some (8) for one; a function
    with a code object of its own has them to itself, and when they are used up, a fresh one
    takes over instead of failing.
    """

    def __init__(self, klass: Klass) -> None:
        self._klass = klass
        self._run = self._fresh()

    def _fresh(self) -> Callable[..., Result]:
        spec, block = self._klass.spec, self._klass.block

        def attend(q: Tensor, k: Tensor, v: Tensor, terms: Terms, blocks: Any) -> Result:
            return _native(spec, block, q, k, v, terms, blocks)

        code = attend.__code__.replace(co_name=f"flex_{next(_numbers)}")
        own = types.FunctionType(code, attend.__globals__, code.co_name, None, attend.__closure__)
        return torch.compile(own, fullgraph=True, dynamic=False)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, blocks: Any) -> Result:
        if self._klass.symbolic:
            q, k, v = (_of_any_length(x, (2,)) for x in (q, k, v))
            if blocks is not None:
                blocks = tuple(_of_any_length(x, (2, 3)[: x.dim() - 2]) for x in blocks)
        try:
            return self._run(q, k, v, terms, blocks)
        except recompile_limit_hit():
            self._run = self._fresh()
            return self._run(q, k, v, terms, blocks)


_numbers = itertools.count()


def _of_any_length(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return a view of `x` whose dims the compiler may take for symbols."""
    x = x.view_as(x)  # the mark is an attribute, which the caller's tensor shall not get
    for dim in dims:
        if x.shape[dim] > 1:
            mark_any_length(x, dim)
    return x

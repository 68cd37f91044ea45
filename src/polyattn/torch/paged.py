"""``paged_attention``: keys and values in pages of a cache, as serving systems keep them.

Each sequence names its pages in a block table; nothing is gathered where a backend reads pages
itself (`native_cpu`). Masks are measured on each sequence's own length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.masks import Causal, Mask
from polyattn.masks.fits import ends
from polyattn.problem.admission import admit_pages, check_lengths
from polyattn.selection.prepare import Plan
from polyattn.torch import short_way
from polyattn.torch.admission import FRONT, Call
from polyattn.torch.call_types import Backends, PagedOptions
from polyattn.torch.keys import Key, key_for
from polyattn.torch.kit.empty import answer_empty
from polyattn.torch.kit.masking import known
from polyattn.torch.long_way import dispatch
from polyattn.torch.refusals import refuse

__all__ = ["paged_attention"]

_MISSED = short_way.MISSED
_CAUSAL = Causal()


@overload
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PagedOptions],
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[PagedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[PagedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    mask: Mask | None = _CAUSAL,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    backend: Backends | None = None,
) -> Any:
    """Attend to keys that lie in pages: key ``j`` of sequence ``b`` is row ``j % page_size`` of
    page ``block_table[b, j // page_size]``.

    `B` sequences, `T` queries each (1 when decoding), `N` query and `K` key/value heads, `P` pages:

    - `query` (B, T, N, H): the last T positions of each sequence, whose keys are in the cache
      already; (B, N, T, H) with ``layout="BNTH"``.
    - `key_pages` (P, page_size, K, H), `value_pages` (P, page_size, K, V); with ``layout="BNTH"``
      (P, K, page_size, H) and so on.
    - `block_table` (B, most pages) integers; entries past a sequence's length mean nothing.
    - `lengths` (B,) integers: how many keys each sequence has.
    - `mask`: causal unless told otherwise; None, or masks of positions (`Causal`, `Window`,
      `Chunked`, `Dilated`, `FirstKeys`) joined by &, | and ~, each measured on the sequence's own
      length.

    `scale`, `softcap`, `sinks`, `return_lse`, `backend`: see :func:`polyattn.torch.attention`.
    Returns out (B, T, N, V) in the layout of `query`, with `return_lse` also lse (B, N, T).

    Raises :class:`~polyattn.errors.InvalidProblem` for a wrong call and
    :class:`~polyattn.errors.Unsupported` when the request cannot be met.

    >>> import torch
    >>> pages = torch.randn(8, 16, 2, 32)  # eight pages of 16 keys
    >>> table = torch.tensor([[5, 0], [3, 7]])
    >>> query = torch.randn(2, 1, 4, 32)
    >>> paged_attention(query, pages, pages, table, torch.tensor([20, 3])).shape
    torch.Size([2, 1, 4, 32])
    """
    if is_dynamo_compiling():
        refuse(
            "got paged_attention inside torch.compile, expected an eager call; call it outside of "
            "the compiled function."
        )
    found = short_way.paged(query, key_pages, value_pages, block_table, lengths, mask, scale,
                            softcap, sinks, layout, return_lse, backend)  # fmt: skip
    if found is not _MISSED:
        return found
    options = {
        "mask": mask, "scale": scale, "softcap": softcap, "sinks": sinks, "layout": layout,
        "return_lse": return_lse,
    }  # fmt: skip
    way = _PagedWay(block_table, lengths, options)
    pages = block_table, lengths, *options.values(), backend
    held = key_for(query, key_pages, value_pages, Key.of_paged, *pages)
    arguments = mask, None, sinks, block_table, lengths
    return dispatch(way, held, query, key_pages, value_pages, arguments, backend)


@dataclass(frozen=True)
class _PagedWay:
    """Calls on pages; runners take the block table and the lengths last."""

    table: Any
    lengths: Any
    options: dict[str, Any]

    @property
    def mask(self) -> Any:
        return self.options["mask"]

    def admit(self, q: Any, k: Any, v: Any) -> Call:
        problem = admit_pages(q, k, v, self.table, self.lengths, front=FRONT, **self.options)
        return Call(problem, self.options["mask"], None, self.options["sinks"], None, True)

    def runner(self, plan: Plan, call: Call) -> Callable[..., Any]:
        problem, kernel, empty = call.problem, plan.kernel, call.problem.empty
        told = problem.device == "cpu" and bool(problem.batch)  # on others it would wait

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: Any,
            bias: None,
            sinks: Any,
            table: Tensor,
            lengths: Tensor,
        ) -> Any:
            if told and (read := known(lengths)) is not None:
                check_lengths(*ends(read), problem)
            if empty:
                return answer_empty(problem.layout, problem.lse, q, k, v, sinks)
            return kernel(q, k, v, mask, None, sinks, (table, lengths))

        return run

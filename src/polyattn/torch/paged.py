"""``paged_attention``: keys and values in pages of a cache, as serving systems keep them.

Each sequence names its pages in a block table; nothing is gathered where a backend reads pages
itself (`native_cpu`). Masks are measured on each sequence's own length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn import scopes, settings
from polyattn.choice import plan_for, wishes
from polyattn.errors import InvalidProblem
from polyattn.masks import Causal, Mask
from polyattn.problem import MaskFacts, Problem
from polyattn.selection import Selection
from polyattn.torch.dispatch import PLAIN, around
from polyattn.torch.door import admit
from polyattn.torch.fastpath import FastTable, tensor_check
from polyattn.torch.masking import is_static

__all__ = ["paged_attention"]

_table = FastTable()
_CAUSAL = Causal()


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
    backend: Any = None,
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
    - `mask`: causal unless told otherwise; None, or `Causal` and `Window` joined by & and |, each
      measured on the sequence's own length.

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
        raise InvalidProblem(
            "got paged_attention inside torch.compile, expected an eager call; call it outside of "
            "the compiled function."
        )
    key: tuple[Any, ...] = (
        layout, "paged", getattr(mask, "signature", mask), scale, softcap, return_lse, backend,
        tuple(getattr(block_table, "shape", ())), around(), settings.raw(settings.BACKEND),
        None if sinks is None else (sinks.shape, sinks.requires_grad and torch.is_grad_enabled()),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    try:
        found = _table.find(key, query, key_pages, value_pages)
    except (TypeError, AttributeError):  # no tensors, or options that are none: for the long way
        found = None
    if found is None:
        options = {
            "scale": scale, "softcap": softcap, "sinks": sinks, "layout": layout,
            "return_lse": return_lse,
        }  # fmt: skip
        epoch = scopes.state.epoch
        problem = _problem(query, key_pages, value_pages, block_table, mask, options)
        plan = plan_for(problem, wishes(backend, None, scopes.current_scope(), scopes.local.module))
        found = tensor_check(query, key_pages, value_pages), plan.kernel, plan
        if type(query) in PLAIN:
            _table.add(key, found, epoch)
    selection: Selection = found[2].selection
    assert selection.problem is not None  # it was made of one
    pages = _check_pages(block_table, lengths, selection.problem)
    for ran in scopes.recording.get(()):
        ran.append(selection)
    return found[1](query, key_pages, value_pages, mask, None, sinks, pages)


def _problem(
    q: Any, k: Any, v: Any, table: Any, mask: Mask | None, options: dict[str, Any]
) -> Problem:
    """Check all but the values of table and lengths, and make the call's facts."""
    layout = options["layout"]
    if layout not in ("BTNH", "BNTH"):
        raise InvalidProblem(
            f"got layout={layout!r} with paged keys, expected 'BTNH' or 'BNTH'; give each sequence "
            "its row of the block table instead of packing."
        )
    if mask is not None and not (isinstance(mask, Mask) and is_static(mask)):
        raise InvalidProblem(
            f"got mask={mask!r} with paged keys, expected None, or Causal and Window joined by & "
            "and |: what a sequence's length hides needs no mask."
        )
    if mask is not None and mask.align == "top_left":
        raise InvalidProblem(
            f"got mask={mask!r} with paged keys, expected bottom_right masks: the queries are the "
            "last positions of their sequences."
        )
    if not isinstance(table, Tensor) or table.dim() != 2 or not isinstance(q, Tensor):
        raise InvalidProblem(
            f"got a block table {_described(table)}, expected a tensor (B, most pages)."
        )
    # but for their number, pages are like keys: let each sequence have one
    first = [x[:1].expand(q.shape[0], *x.shape[1:]) if _is_like(x, q) else x for x in (k, v)]
    if _is_like(k, q) and _is_like(v, q) and k.shape[0] != v.shape[0]:
        raise InvalidProblem(f"got {k.shape[0]} pages of keys and {v.shape[0]} pages of values.")
    if torch.is_autocast_enabled(q.device.type) and q.device.type in ("cpu", "cuda"):
        cast = torch.get_autocast_dtype(q.device.type)
        if q.dtype not in (cast, torch.float64):
            raise InvalidProblem(
                f"got {q.dtype} pages under autocast to {cast}, expected pages in {cast}: a cache "
                "is not cast at every call."
            )
    problem = admit(q, *first, **options).problem
    return problem.with_(
        kv_len=table.shape[1] * problem.kv_len, paged=problem.kv_len, mask=MaskFacts.of(mask)
    )


def _is_like(x: Any, q: Tensor) -> bool:
    return isinstance(x, Tensor) and x.dim() == q.dim() and x.shape[0] > 0


def _check_pages(table: Any, lengths: Any, problem: Problem) -> tuple[Tensor, Tensor]:
    """Return table and lengths, checked but for the table's entries, which backends check."""
    b, page = problem.batch, problem.paged or 1
    for name, x, shape in (
        ("block_table", table, (b, problem.kv_len // page)),
        ("lengths", lengths, (b,)),
    ):
        if (
            not isinstance(x, Tensor)
            or x.shape != shape
            or x.is_floating_point()
            or x.dtype is torch.bool
            or x.device.type != problem.device
        ):
            raise InvalidProblem(
                f"got {name} {_described(x)}, expected integers {shape} on {problem.device}."
            )
    if problem.device == "cpu" and b:
        known = lengths.tolist()
        if min(known) < 0 or max(known) > problem.kv_len:
            raise InvalidProblem(
                f"got lengths from {min(known)} to {max(known)}, expected 0 to {problem.kv_len}: "
                f"{problem.kv_len // page} pages of {page} keys a sequence."
            )
    return table, lengths


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.dtype} on {x.device}"
    return f"of type {type(x).__name__}"

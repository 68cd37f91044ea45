"""FlashAttention 2 for CUDA on padded batches: no key is read that padding hides, and no query.

Padding and left padding leave each batch entry one range of queries and one of keys. The kernel
takes sequences that lie one behind the other, given by where they begin; so a batch entry becomes a
few of them: the ranges that see each other, and what lies beside them as sequences of queries
without keys (output 0) and of keys without queries (gradient 0). Nothing is copied or zeroed for
it, and no length is read by the host. A causal mask is the kernel's own on the square in front of
the last key; queries behind it see every key, in a second run that skips the first one's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.backends.sdpa.torch.cuda_ways import FINE, lies
from polyattn.backends.sdpa.torch.operators import Call, Result
from polyattn.backends.sdpa.torch.sequence_marks import Point, Side, begins, marks
from polyattn.masks import Causal, LeftPadding, Mask, Padding
from polyattn.problem import Problem
from polyattn.torch.internals import are_transforms_active, flash_forward, is_exported
from polyattn.torch.kit.masking import Dims, visible

__all__ = ["by_ranges", "short_reading"]

_MOST = (1 << 31) - 1
_WIDE = (torch.int32, torch.int64)
Bound = Tensor | None


class _Ranges(NamedTuple):
    """The queries and keys of each batch entry that see each other, (B,) int32; None is no bound.

    `is_causal`: query i sees key j only where j <= i. `alike`: queries end where keys end.
    """

    q_first: Bound
    q_end: Bound
    k_first: Bound
    k_end: Bound
    is_causal: bool
    alike: bool


def by_ranges(problem: Problem) -> Call:
    """Return the call of the kernel for a mask of ranges, which it is handed as it is."""

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        causal: bool,
        scale: Any,
        dropout: float,
        lse: bool,
    ) -> Result:
        found = _ranges_of(mask, q.shape[2], k.shape[2])
        reads = found.q_first is None and found.q_end is None and not found.is_causal
        if reads and not problem.grad:
            out, sums = _reading(q, k, v, found, scale, problem.compiled)
        else:
            out, sums = _in_sequences(q, k, v, found, scale, problem.grad or problem.compiled)
        if not lse:
            return out, None
        empty = _hidden_rows(mask, q, k).squeeze(-1)
        return out, sums.masked_fill(empty, float("-inf"))

    return call


def short_reading(problem: Problem, careful: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of a padded cache that is read, and no more: what decoding asks for.

    The same call as by the careful way, without all that it looks at; the host is what such calls
    wait for.
    """
    if not _is_short(problem):
        return careful
    turned, scale = problem.layout == "BTNH", problem.scale
    fine = FINE[getattr(torch, problem.dtype)]

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        ends = mask.kv_lengths if type(mask) is Padding else None
        if type(ends) is not Tensor or not (lies(q, fine) and lies(k, fine) and lies(v, fine)):
            return careful(q, k, v, mask, bias, sinks)
        keys, values = (k.transpose(1, 2), v.transpose(1, 2)) if turned else (k, v)
        step = _step(keys)
        if not step or step != _step(values) or is_exported() or are_transforms_active():
            return careful(q, k, v, mask, bias, sinks)
        rows = q if turned else q.transpose(1, 2)
        b, t, n, h = rows.shape
        s = keys.shape[2]
        marks_q, marks_k = begins(b, t, q.device), begins(b, step, q.device)
        arrays = rows.reshape(b * t, n, h), _strided(keys, step), _strided(values, step)
        numbers = t, s, 0.0, False, False
        out = flash_forward(
            *arrays, marks_q, marks_k, *numbers, scale=scale, seqused_k=_within(ends, s)
        )[0].view(b, t, n, h)
        return out if turned else out.transpose(1, 2)

    return kernel


def _is_short(p: Problem) -> bool:
    mask = p.mask.structure if p.mask is not None else None
    plain = not (p.grad or p.lse or p.compiled) and p.contiguous
    return plain and mask is not None and mask.kind == "Padding" and mask.named["q"] is None


def _hidden_rows(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Return which queries see no key, (B|1, N|1, T|1, 1) bool."""
    return visible(mask, Dims.of(q, k), q.device).empty


def _ranges_of(mask: Mask, q_len: int, k_len: int) -> _Ranges:
    leaves = mask.leaves()
    paddings = [leaf for leaf in leaves if isinstance(leaf, Padding)]
    lefts = [leaf for leaf in leaves if isinstance(leaf, LeftPadding)]
    return _Ranges(
        _largest([leaf.q_starts for leaf in lefts], q_len),
        _smallest([leaf.q_lengths for leaf in paddings], q_len),
        _largest([leaf.kv_starts for leaf in lefts], k_len),
        _smallest([leaf.kv_lengths for leaf in paddings], k_len),
        any(isinstance(leaf, Causal) for leaf in leaves),
        all(leaf.q_lengths is leaf.kv_lengths for leaf in paddings),
    )


def _within(bound: Tensor, most: int) -> Tensor:
    """Return lengths of 0 to `most`, int32: on a device nobody has read them."""
    if bound.dtype not in _WIDE:  # of a byte: `most` may be more than it counts
        bound = bound.to(torch.int32)
    bound = bound.clamp(0, most)
    return bound if bound.dtype is torch.int32 else bound.int()


def _largest(bounds: Sequence[Bound], most: int) -> Bound:
    found = [_within(x, most) for x in bounds if x is not None]
    return functools.reduce(torch.maximum, found) if found else None


def _smallest(bounds: Sequence[Bound], most: int) -> Bound:
    found = [_within(x, most) for x in bounds if x is not None]
    return functools.reduce(torch.minimum, found) if found else None


def _reading(
    q: Tensor, k: Tensor, v: Tensor, found: _Ranges, scale: Any, compiled: bool
) -> tuple[Tensor, Tensor]:
    """Attend to the first keys of each batch entry; few queries share the work on many keys.

    The kernel's own way for caches: lengths beside where rows begin. It has no gradients.
    """
    b, _, t, _ = q.shape
    keys, values, step = _rows(k, v, compiled)
    begin = begins(b, step, k.device)
    s = k.shape[2]
    lengths = found.k_end  # none: of a mask without arrays, or one of starts
    if lengths is None:
        lengths = torch.full((b,), s, dtype=torch.int32, device=k.device)
    if found.k_first is not None:
        lengths = (lengths - found.k_first).clamp(min=0)
        begin = begin + torch.nn.functional.pad(found.k_first, (0, 1))
    rows = q.transpose(1, 2).reshape(b * t, *q.shape[1::2])
    marks_q, numbers = begins(b, t, q.device), (t, s, 0.0, False, False)
    out, sums, *_ = flash_forward(
        rows, keys, values, marks_q, begin, *numbers, scale=scale, seqused_k=lengths
    )
    return _bnth(out, sums, b)


def _in_sequences(
    q: Tensor, k: Tensor, v: Tensor, found: _Ranges, scale: Any, copies: bool
) -> tuple[Tensor, Tensor]:
    """Attend by sequences one behind the other: what sees each other, and what is beside."""
    b, _, t, _ = q.shape
    s = k.shape[2]
    if found.is_causal and t != s:  # refused; sequences would end behind the last key
        raise ValueError(f"got a causal mask with padding on T={t}, S={s}, expected equal lengths.")
    keys, values, step = _rows(k, v, copies)
    rows = q.transpose(1, 2).flatten(0, 1)
    longest = max(t, 2)  # of one query the kernel would make rows of the heads of a group

    def sides(q_first: Bound, q_end: Bound, k_end: Bound) -> list[Side]:
        points = _points(q_first, q_end, found.k_first, k_end, t, s, step)
        return [Side(side, n) for side, n in zip(points, (t, step), strict=True)]

    def run(ends: Sequence[Tensor], causal: bool) -> tuple[Tensor, Tensor]:
        out, sums, *_ = flash_forward(
            rows, keys, values, *ends, longest, s, 0.0, causal, False, scale=scale
        )
        return _bnth(out, sums, b)

    if not found.is_causal:
        return run(marks(sides(found.q_first, found.q_end, found.k_end), b, q.device), False)
    # query i stands at key i: the last of both ranges have to be one, and no row before its keys
    first = _both(torch.maximum, found.q_first, found.k_first)
    last = found.q_end if found.alike else _both(torch.minimum, found.q_end, found.k_end)
    if first is not None and last is not None:
        first = torch.minimum(first, last)
    square = sides(first, last, last)
    if found.alike or found.k_end is None:
        return run(marks(square, b, q.device), True)
    behind = _both(torch.maximum, found.q_first, found.k_end)
    rest = sides(behind, found.q_end, found.k_end)
    ends = marks([*square, *rest], b, q.device)
    (near, near_sums), (far, far_sums) = run(ends[:2], True), run(ends[2:], False)
    # each row is 0 in one of the two, and its sum of no keys +inf
    return near + far, torch.minimum(near_sums, far_sums)


def _both(choose: Any, a: Bound, b: Bound) -> Bound:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)  # type: ignore[no-any-return]


def _points(
    q_first: Bound, q_end: Bound, k_first: Bound, k_end: Bound, t: int, s: int, step: int
) -> tuple[list[Point], list[Point]]:
    """Return where the sequences of a batch entry end, of queries and of keys, in turn.

    Queries before the range, keys before it, both ranges, queries behind, keys behind (or none).
    """
    if k_first is not None and k_end is not None:
        k_end = torch.maximum(k_first, k_end)
    if q_first is not None and q_end is not None:
        q_end = torch.maximum(q_first, q_end)
    start, stop = (0 if k_first is None else k_first), (s if k_end is None else k_end)
    points: list[tuple[Point, Point]] = []
    if q_first is not None:
        points.append((q_first, 0))
    if k_first is not None:
        points.append((0 if q_first is None else q_first, start))
    points.append((t if q_end is None else q_end, stop))
    if q_end is not None:
        points.append((t, stop))
    if k_end is not None or step != s:
        points.append((t, step))
    return [q for q, _ in points], [k for _, k in points]


def _rows(k: Tensor, v: Tensor, copies: bool) -> tuple[Tensor, Tensor, int]:
    """Return keys and values as rows (., K, H), and how many rows after each other entries begin.

    As they lie, where that can be said of both; else, and where gradients go through, in order.
    """
    step = 0 if copies else _step(k)
    if not step or step != _step(v):
        return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1), k.shape[2]
    return _strided(k, step), _strided(v, step), step


def _step(x: Tensor) -> int:
    """Return how many rows after each other the entries of (B, K, S, H) begin; 0 where none say."""
    batch, _, length, _ = x.shape
    apart, _, row, _ = x.stride()
    if length == 1 or row <= 0 or (batch > 1 and apart % row):
        return 0
    step = apart // row if batch > 1 else length
    return step if step >= length and batch * step <= _MOST else 0


def _strided(x: Tensor, step: int) -> Tensor:
    batch, heads, length, size = x.shape
    _, head, row, _ = x.stride()
    return x.as_strided(((batch - 1) * step + length, heads, size), (row, head, 1))


def _bnth(out: Tensor, sums: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    out = out.view(batch, -1, *out.shape[1:])
    return out.transpose(1, 2), sums.view(sums.shape[0], batch, -1).transpose(0, 1)

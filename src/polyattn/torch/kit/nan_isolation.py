"""What is masked never leaks: NaN, infinities and huge numbers in masked keys stay there.

Fused kernels multiply masked probabilities (0) with masked values, and 0 * NaN is NaN; and they
mask by adding -inf to scores, and a score that overflowed to inf becomes NaN by it. Two remedies,
both exact and bitwise neutral for calls that need none:

- *hide*: rows and keys that the mask hides from everyone are zeroed before the kernel.
- *mend*: where reading the output costs no synchronisation (eager CPU calls), a NaN in it makes
  the call run again without its causes, and only rows that really attend to a non-finite entry
  keep what they got. Gradients go the same ways, each row's through the run that gave it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.torch.internals import are_transforms_active, tracing_state
from polyattn.torch.kit.masking import Visible, is_traced_by_proxies

__all__ = ["hide", "holds_nan", "is_readable", "mend", "zero_empty"]

_SMALL = 1 << 19  # entries, below which one whole sum costs less than two of parts
Result = tuple[Tensor, Tensor | None]
Run = Callable[[Tensor, Tensor, Tensor], Result]


def hide(
    q: Tensor, k: Tensor, v: Tensor, view: Visible, rows: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero the queries that see no key and the keys that no query sees; (B, N, T, H) arrays.

    `rows`: the queries, too; where there are no gradients it is enough to zero what comes out.
    """
    zero = _zero_for(k)
    if rows:
        q = torch.where(view.empty, zero, q)
    return q, torch.where(view.seen, k, zero), torch.where(view.seen, v, zero)


def _zero_for(x: Tensor) -> Any:
    """Return what stands for 0 in a choice: on a device a number of its own is copied there."""
    return x.new_zeros(()) if x.is_cuda else 0


def is_readable(out: Tensor) -> bool:
    """Say whether the values of `out` can be read, and at no cost in waiting."""
    return (
        out.device.type == "cpu"
        and type(out) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not are_transforms_active()
        and tracing_state() is None
        and not is_traced_by_proxies()
    )


def mend(
    run: Run,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    view: Callable[[], Visible],
    whole_rows: bool = False,
    adds_at: float | None = None,
) -> Result:
    """Run, and if the output holds a NaN keep it from rows that do not attend to its cause.

    `whole_rows`: the kernel multiplies every key with every query up to a causal diagonal, so
    that what leaks at all leaks into the last row, too. `adds_at`: the scale of a kernel that adds
    -inf to the scores it masks; None for one that overwrites them.
    """
    out, lse = run(q, k, v)
    if not is_readable(out) or not holds_nan(out.detach(), whole_rows):
        return out, lse
    with torch.no_grad():
        allowed = view().mask
        struck = _struck(q, k, v, allowed)
        scores_struck = _struck(q, k, torch.zeros_like(v), allowed).any(-1)
    if struck.all():
        return out, lse
    clean = [_finite(x) for x in (q, k, v)]
    leaking = None if adds_at is None else _overflowing(clean[0], clean[1], allowed, adds_at)
    if leaking is not None:
        wanted = ~struck.all(-1)
        mended, mended_lse = _run_apart(run, clean, allowed, leaking, wanted, out.requires_grad)
    elif all(x is y for x, y in zip((q, k, v), clean, strict=True)):
        return out, lse  # the NaN is nobody's leak
    else:
        mended, mended_lse = run(clean[0], clean[1], clean[2])
    if not struck.any():
        return mended, mended_lse
    if out.requires_grad:
        out, lse = run(*_of_rows(q, k, v, allowed, struck.any(-1)))
    out = _chosen(struck, out, mended)
    if lse is not None and mended_lse is not None:
        lse = torch.where(scores_struck, lse, mended_lse)
    return out, lse


def holds_nan(out: Tensor, whole_rows: bool) -> bool:
    """Say whether (B, N, T, H) `out` holds a NaN, reading no more of it than it takes.

    Of a kernel with `whole_rows`, a NaN query or key strikes all columns of a row, and a NaN
    value the last row: one column and one row tell. Infinities may raise a false alarm.
    """
    if whole_rows and out.numel() > _SMALL:
        total = (out[..., 0].sum() + out[:, :, -1].sum()).item()
    else:
        total = out.sum().item()
    return total != total


def _finite(x: Tensor) -> Tensor:
    """Return `x` with 0 for what is not finite, or `x` itself."""
    fine = x.isfinite()
    return x if fine.all() else _only(x, fine)


def _only(x: Tensor, kept: Tensor) -> Tensor:
    """Return `x` with 0 where not `kept`, at the same strides and the same alignment.

    Matrix products may round otherwise where rows lie otherwise in memory.
    """
    values = torch.where(kept, x, 0)
    if 0 in x.stride() or (x.stride() == values.stride() and _lead(x) == 0):
        return values
    span = 1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
    there = x.new_zeros(span + _lead(x))
    return there.as_strided(x.shape, x.stride(), _lead(x)).copy_(values)


def _lead(x: Tensor) -> int:
    """Count the elements between the last boundary of 64 bytes and the first element."""
    return x.data_ptr() % 64 // x.element_size()


def _struck(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """Return (B, N, T, Hv): which outputs a non-finite query, key or value really reaches."""
    groups = q.shape[1] // max(k.shape[1], 1)
    bad_key = (~k.isfinite().all(-1)).repeat_interleave(groups, 1).unsqueeze(-2)
    row = (allowed & bad_key).any(-1) | ((~q.isfinite().all(-1)) & allowed.any(-1))
    bad_value = (~v.isfinite()).repeat_interleave(groups, 1).to(torch.float32)
    shape = (*q.shape[:3], k.shape[2])
    return ((allowed.expand(shape).to(torch.float32) @ bad_value) > 0) | row.unsqueeze(-1)


def _of_rows(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Zero all queries but some, (B, N, T), and the keys that none of these sees.

    So that what is wrong with them comes into no other gradient.
    """
    seen = _of_kv_heads(allowed & rows.unsqueeze(-1), k)
    return _only(q, rows.unsqueeze(-1)), _only(k, seen), _only(v, seen)


def _of_kv_heads(pairs: Tensor, k: Tensor) -> Tensor:
    """(B, N, T, S) pairs -> (B, K, S, 1): the keys that are in some pair."""
    return pairs.any(-2).unflatten(1, (k.shape[1], -1)).any(2).unsqueeze(-1)


def _overflowing(q: Tensor, k: Tensor, allowed: Tensor, scale: float) -> Tensor | None:
    """Return the masked pairs, (B, N, T, S), whose score may be infinite, or None without any.

    Judged by the sum of magnitudes, since partial sums overflow as well; kernels scale before,
    after, or half before the product.
    """
    limit = torch.finfo(torch.promote_types(q.dtype, torch.float32)).max / 4
    q, k, factor = q.detach().abs().double(), k.detach().abs().double(), max(1.0, abs(scale))
    groups = q.shape[1] // k.shape[1]
    scores = (q.unflatten(1, (-1, groups)) @ k.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    alone = k.amax(-1).repeat_interleave(groups, 1).unsqueeze(-2)
    leaking = ((scores * factor > limit) | (alone * factor > limit)) & ~allowed
    return leaking if leaking.any() else None


def _run_apart(
    run: Run, clean: list[Tensor], allowed: Tensor, leaking: Tensor, wanted: Tensor, trains: bool
) -> Result:
    """Run on groups of rows, each without the keys that leak into one of it and none of it sees.

    Mostly one or two groups: a row alone can always be served.
    """
    q, k, v = clean
    empty, own_rows = ~allowed.any(-1, keepdim=True), 0 not in q.stride()
    if own_rows and (leaking & empty).any():  # rows without keys need nothing of themselves
        q, leaking = _only(q, ~(leaking & empty).any(-1, keepdim=True)), leaking & ~empty
    result: Result | None = None
    asked = wanted
    while result is None or wanted.any():
        dropped = _of_kv_heads(leaking & asked.unsqueeze(-1), k)
        there = dropped.squeeze(-1).repeat_interleave(q.shape[1] // k.shape[1], 1).unsqueeze(-2)
        served = asked & ~(allowed & there).any(-1)
        if not served.any() and wanted.any():
            asked = _first_of_kv_heads(wanted, k)
            continue
        # other rows may be NaN, which must come into no gradient
        rows = _only(q, served.unsqueeze(-1)) if trains and own_rows else q
        got = run(rows, _only(k, ~dropped) if dropped.any() else k, v)
        result = got if result is None else _joined(served, got, result)
        wanted = wanted & ~served
        asked = wanted
    return result


def _first_of_kv_heads(rows: Tensor, k: Tensor) -> Tensor:
    """Keep one of the rows, (B, N, T), for each key head."""
    each = rows.unflatten(1, (k.shape[1], -1)).flatten(2)
    first = each & (each.cumsum(-1) == 1)
    return first.unflatten(2, (-1, rows.shape[2])).flatten(1, 2)


def _joined(rows: Tensor, a: Result, b: Result) -> Result:
    """Take some rows, (B, N, T), of `a`, the others of `b`."""
    out = _chosen(rows.unsqueeze(-1), a[0], b[0])
    return out, None if a[1] is None or b[1] is None else torch.where(rows, a[1], b[1])


def _chosen(flags: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Take entries of `a` where flagged, others of `b`; the result lies in memory as `b` does."""
    chosen = torch.where(flags, a, b)
    return chosen if chosen.stride() == b.stride() else torch.empty_like(b).copy_(chosen)


def zero_empty(out: Tensor, lse: Tensor | None, empty: Tensor) -> Result:
    """Write the result of rows that see no key: output 0, lse -inf; their gradient is 0."""
    out = torch.where(empty, _zero_for(out), out)
    if lse is not None:
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf"))
    return out, lse

"""What is masked never leaks: NaN and Inf in masked keys, values and queries stay there.

Fused kernels multiply masked probabilities (0) with masked values, and 0 * NaN is NaN. Two
remedies, both exact and bitwise neutral for finite inputs:

- *hide*: rows and keys that the mask hides from everyone are zeroed before the kernel.
- *mend*: where reading the output costs no synchronisation (eager CPU calls), a NaN in it makes
  the call run again on inputs whose non-finite entries are zeroed, and only rows that really
  attend to a non-finite entry keep the first result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyattn.torch.internals import are_transforms_active
from polyattn.torch.masking import Visible

__all__ = ["hide", "is_readable", "mend"]

_SMALL = 1 << 19  # entries, below which one whole sum costs less than two of parts
Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


def hide(q: Tensor, k: Tensor, v: Tensor, view: Visible) -> tuple[Tensor, Tensor, Tensor]:
    """Zero the queries that see no key and the keys that no query sees; (B, N, T, H) arrays."""
    q = torch.where(view.empty, 0, q)
    return q, torch.where(view.seen, k, 0), torch.where(view.seen, v, 0)


def is_readable(out: Tensor) -> bool:
    """Say whether the values of `out` can be read at no cost in waiting."""
    return (
        out.device.type == "cpu"
        and type(out) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not are_transforms_active()
    )


def mend(
    run: Run, q: Tensor, k: Tensor, v: Tensor, view: Callable[[], Visible], whole_rows: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Run, and if the output holds a NaN keep it from rows that do not attend to its cause.

    `whole_rows`: the kernel multiplies every key with every query up to a causal diagonal, so
    that what leaks at all leaks into the last row, too.
    """
    out, lse = run(q, k, v)
    if not is_readable(out) or not holds_nan(out.detach(), whole_rows):
        return out, lse
    allowed = view().mask
    clean = [_finite(x) for x in (q, k, v)]
    mended, mended_lse = run(*clean)
    with torch.no_grad():
        struck = _struck(q, k, v, allowed)
    out = torch.where(struck, out, mended)
    if lse is not None and mended_lse is not None:
        bad_scores = _struck(q, k, torch.zeros_like(v), allowed).any(-1)
        lse = torch.where(bad_scores, lse, mended_lse)
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
    """Return `x` with 0 for what is not finite, at the same strides and the same alignment.

    Matrix products may round otherwise where rows lie otherwise in memory.
    """
    fine = x.isfinite()
    if fine.all():
        return x
    values = torch.where(fine, x, 0)
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


def zero_empty(out: Tensor, lse: Tensor | None, empty: Tensor) -> tuple[Tensor, Tensor | None]:
    """Write the result of rows that see no key: output 0, lse -inf; their gradient is 0."""
    out = torch.where(empty, 0, out)
    if lse is not None:
        lse = torch.where(empty.squeeze(-1), float("-inf"), lse)
    return out, lse

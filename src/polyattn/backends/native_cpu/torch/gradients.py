"""The backward pass: by the kernel, or by the definition where the kernel lacks what it needs.

The kernel makes probabilities again from scores and their lse, max + log(sum). In a row whose
every score is as good as infinite, as under a mask of ``finfo.min`` alone, the log of the sum is
nothing beside the maximum and is rounded away: each of the tied keys would get the whole.
"""

from __future__ import annotations

from torch import Tensor

from polyattn.backends.native_cpu.torch.calls import (
    Constants,
    Extras,
    Gradients,
    Needs,
    backward,
    dense_rows,
)
from polyattn.backends.native_cpu.torch.definition import defined_gradients

__all__ = ["gradients"]

_LOST = 2.0**17
"""From here on an lse is known to 1/64 and worse, and so are the probabilities made from it."""


def gradients(
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: Extras,
    constants: Constants,
    needs: Needs,
) -> Gradients:
    """Return what :func:`~polyattn.backends.native_cpu.torch.calls.backward` does, or should.

    The definition holds all scores of the call at once, as eager attention does.
    """
    if extras.bias is not None and _meets_lost_sums(dout, dlse, lse, constants.layout):
        q, k, v = dense_rows(q), dense_rows(k), dense_rows(v)
        return defined_gradients(dout, dlse, q, k, v, extras, constants, needs)
    return backward(dout, dlse, q, k, v, out, lse, extras, constants, needs)


def _meets_lost_sums(dout: Tensor | None, dlse: Tensor | None, lse: Tensor, layout: str) -> bool:
    """Say whether a gradient comes in to a row whose lse has lost its sum."""
    lost = (lse.abs() > _LOST) & lse.isfinite()
    if not bool(lost.any()):
        return False
    if dlse is not None and bool((dlse[lost] != 0).any()):
        return True
    if dout is None:
        return False
    return bool((dout[lost if layout == "BNTH" else lost.transpose(-1, -2)] != 0).any())

"""From the call's layout to (B, N, T, H) and back, as views."""

from __future__ import annotations

from torch import Tensor

__all__ = ["from_bnth", "lse_from_bnt", "to_bnth"]


def to_bnth(x: Tensor, layout: str) -> Tensor:
    """View an array of the call as (B, N, T, H); packed rows become one batch entry."""
    if layout == "BNTH":
        return x
    return x.transpose(1, 2) if layout == "BTNH" else x.unsqueeze(0).transpose(1, 2)


def from_bnth(x: Tensor, layout: str) -> Tensor:
    """Undo :func:`to_bnth`."""
    if layout == "BNTH":
        return x
    return x.transpose(1, 2) if layout == "BTNH" else x.transpose(1, 2).squeeze(0)


def lse_from_bnt(lse: Tensor, layout: str) -> Tensor:
    """Return the log-sum-exp as the call gives it: (B, N, T), or (N, total) when packed."""
    return lse.squeeze(0) if layout == "packed" else lse

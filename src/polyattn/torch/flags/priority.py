"""SDPA's order as a scope that leaves nothing behind."""

from __future__ import annotations

from typing import Any, overload

from polyattn.torch.flags.scope import FlagScope, OnConflict
from polyattn.torch.flags.sdpa_order import order

__all__ = ["sdpa_priority"]


@overload
def sdpa_priority() -> list[str]: ...
@overload
def sdpa_priority(*kernels: Any, on_conflict: OnConflict = ...) -> FlagScope: ...
def sdpa_priority(*kernels: Any, on_conflict: OnConflict = "warn") -> list[str] | FlagScope:
    """Return the order in which torch's SDPA tries its kernels or, given kernels, a scope of it.

    Without arguments: the order in force, by name. With some: a scope in which these come first, in
    this order, the others after them as they were. It ends exactly; torch's
    ``sdpa_kernel(..., set_priority=True)`` inside a narrower ``sdpa_kernel`` does not. Kernels are
    named ``flash``, ``efficient``, ``math``, ``cudnn``, ``overrideable``, by our backends' names
    (``sdpa_flash``) or by torch's ``SDPBackend``.

    It is for programs that call torch's SDPA themselves, and only for CUDA: torch ignores it on
    CPUs. To run one kernel, on any device and seen by compiled code: ``polyattn.use_backend(...)``.

    >>> sdpa_priority()
    ['flash', 'efficient', 'math', 'cudnn', 'overrideable']
    >>> with sdpa_priority("math", "cudnn"):
    ...     sdpa_priority()
    ['math', 'cudnn', 'flash', 'efficient', 'overrideable']
    """
    if not kernels:
        return order()
    first = kernels[0] if len(kernels) == 1 and isinstance(kernels[0], list | tuple) else kernels
    return FlagScope({"cuda.sdp_priority": list(first)}, on_conflict)

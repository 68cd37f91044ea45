"""Torch's attention operators: the kernels behind scaled_dot_product_attention, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.torch.internals.private_names import MISSING, ROWS, private

__all__ = [
    "OPERATORS_MODULE",
    "can_use",
    "cudnn_attention",
    "cudnn_binding",
    "efficient_attention",
    "efficient_binding",
    "flash_attention",
    "flash_attention_for_cpu",
    "flash_binding",
    "flash_forward",
    "flash_operator_for_cpu",
    "is_allowed",
    "math_attention",
    "missing_operator",
    "present_operator",
    "replace_operator",
    "torch_sdpa",
]

OPERATORS_MODULE = "torch._C._nn"
"""The namespace in which compilers look up torch's operators by name."""

torch_sdpa: Callable[..., Any] = private(
    f"{OPERATORS_MODULE}.scaled_dot_product_attention",
    "torch.nn.functional's function is taken, as it is when polyattn is imported",
    torch.nn.functional.scaled_dot_product_attention,
)
"""torch's own function, whatever it has been replaced by since."""


def present_operator() -> Callable[..., Any]:
    """Return what stands where compilers look torch's operator up at present."""
    place: Any = getattr(torch._C, "_nn", None)
    return getattr(place, "scaled_dot_product_attention", torch_sdpa)


def replace_operator(old: Any, new: Any) -> None:
    """Put `new` where compilers look torch's operator up, if `old` is there."""
    place: Any = getattr(torch._C, "_nn", None)
    if getattr(place, "scaled_dot_product_attention", None) is old:
        place.scaled_dot_product_attention = new


def _operator(name: str, backend: str) -> Callable[..., Any]:
    """Return an overload of an ATen operator; a backend without its own is said to be absent."""
    otherwise = f"the backend {backend} is not available"
    return private(f"torch.ops.aten.{name}.default", otherwise)  # type: ignore[no-any-return]


flash_attention = _operator("_scaled_dot_product_flash_attention", "sdpa_flash")
flash_forward = _operator("_flash_attention_forward", "sdpa_flash")
efficient_attention = _operator("_scaled_dot_product_efficient_attention", "sdpa_efficient")
cudnn_attention = _operator("_scaled_dot_product_cudnn_attention", "sdpa_cudnn")
math_attention = _operator("_scaled_dot_product_attention_math", "sdpa_math")
flash_operator_for_cpu = _operator("_scaled_dot_product_flash_attention_for_cpu", "sdpa_flash")
_OF_BACKEND = {
    "sdpa_flash": "_scaled_dot_product_flash_attention",
    "sdpa_efficient": "_scaled_dot_product_efficient_attention",
    "sdpa_cudnn": "_scaled_dot_product_cudnn_attention",
    "sdpa_math": "_scaled_dot_product_attention_math",
}


def missing_operator(backend: str) -> str | None:
    """Return the operator that a backend needs and torch lacks, None where it is there."""
    name = _OF_BACKEND[backend]
    there = ROWS[f"torch.ops.aten.{name}.default"].find() is not MISSING
    return None if there else f"aten::{name}"


flash_attention_for_cpu: Callable[..., Any] = private(
    "torch._scaled_dot_product_flash_attention_for_cpu",
    "the operator itself is called, 1.7 us more a call",
    flash_operator_for_cpu,
)
"""The kernel of CPUs by torch's own binding, which costs less than the operator's handle."""


def _binding(name: str, handle: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's own binding of an operator, which costs less than its handle."""
    return private(f"torch.{name}", "the operator itself is called, some us more a call", handle)  # type: ignore[no-any-return]


flash_binding = _binding("_scaled_dot_product_flash_attention", flash_attention)
efficient_binding = _binding("_scaled_dot_product_efficient_attention", efficient_attention)
cudnn_binding = _binding("_scaled_dot_product_cudnn_attention", cudnn_attention)

_cuda = torch.backends.cuda
is_allowed: dict[str, Callable[[], bool]] = {
    "sdpa_flash": private(
        "torch._C._get_flash_sdp_enabled",
        "torch.backends.cuda.flash_sdp_enabled() is called",
        _cuda.flash_sdp_enabled,
    ),
    "sdpa_efficient": private(
        "torch._C._get_mem_efficient_sdp_enabled",
        "torch.backends.cuda.mem_efficient_sdp_enabled() is called",
        _cuda.mem_efficient_sdp_enabled,
    ),
    "sdpa_cudnn": private(
        "torch._C._get_cudnn_sdp_enabled",
        "torch.backends.cuda.cudnn_sdp_enabled() is called",
        _cuda.cudnn_sdp_enabled,
    ),
    "sdpa_math": private(
        "torch._C._get_math_sdp_enabled",
        "torch.backends.cuda.math_sdp_enabled() is called",
        _cuda.math_sdp_enabled,
    ),
}
"""By backend: whether the program allows torch's SDPA the kernel."""

can_use: dict[str, Callable[[Any, bool], bool]] = {
    "sdpa_flash": private(
        "torch._C._can_use_flash_attention",
        "torch.backends.cuda.can_use_flash_attention() is called",
        _cuda.can_use_flash_attention,
    ),
    "sdpa_efficient": private(
        "torch._C._can_use_mem_efficient_attention",
        "torch.backends.cuda.can_use_efficient_attention() is called",
        _cuda.can_use_efficient_attention,
    ),
    "sdpa_cudnn": private(
        "torch._C._can_use_cudnn_attention",
        "torch.backends.cuda.can_use_cudnn_attention() is called",
        _cuda.can_use_cudnn_attention,
    ),
}
"""By backend: torch's own check of a call, ``(SDPAParams, debug)``."""

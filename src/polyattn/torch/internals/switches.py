"""Getters and setters of torch's own switches, for the knobs of `polyattn.torch.flags`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from polyattn.torch.internals.private_names import MISSING, noted, private

__all__ = [
    "ABSENT",
    "Switch",
    "cublas_tf32",
    "cudnn_tf32",
    "deterministic_warn_only",
    "fact",
    "filter_state",
    "has_xpu",
    "fp32_precision",
    "library",
    "matmul_precision",
    "plan_cache",
    "preferred_library",
    "reductions",
    "sdp_priority",
    "set_cudnn_tf32",
    "set_deterministic",
    "set_fp32_precision",
    "set_grad_enabled",
    "set_matmul_precision",
    "set_sdp_priority",
    "set_sparse_checks",
    "setter_of",
    "switch",
]

ABSENT = ""
"""What stands for a function that this torch lacks."""
_KNOB = "the knob says that this torch does not have it"
_CUDA = "a CUDA or ROCm build"


class Switch(NamedTuple):
    """A getter and a setter; ABSENT where this torch lacks one."""

    get: Callable[[], Any] | str
    put: Callable[[Any], Any] | str


_NEW = ("2.13", "2.15")

_SWITCHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cuda.flash_sdp_enabled": ("_get_flash_sdp_enabled", "_set_sdp_use_flash", {}),
    "cuda.mem_efficient_sdp_enabled": (
        "_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient", {},
    ),
    "cuda.math_sdp_enabled": ("_get_math_sdp_enabled", "_set_sdp_use_math", {}),
    "cuda.cudnn_sdp_enabled": ("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn", {}),
    "cuda.overrideable_sdp_enabled": (
        "_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable", {},
    ),
    "cuda.fa3_sdp_enabled": ("_get_fa3_sdp_enabled", "_set_sdp_use_fa3", {"seen": _NEW}),
    "cuda.fp16_bf16_reduction_math_sdp_allowed": (
        "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction", {},
    ),
    "cudnn.enabled": ("_get_cudnn_enabled", "_set_cudnn_enabled", {}),
    "cudnn.benchmark": ("_get_cudnn_benchmark", "_set_cudnn_benchmark", {}),
    "cudnn.benchmark_limit": (
        "_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit", {"build": _CUDA},
    ),
    "cudnn.deterministic": ("_get_cudnn_deterministic", "_set_cudnn_deterministic", {}),
    "cudnn.depthwise_kernel": (
        "_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel", {"seen": _NEW},
    ),
    "miopen.immediate": ("_get_miopen_immediate", "_set_miopen_immediate", {}),
    "mkldnn.enabled": ("_get_mkldnn_enabled", "_set_mkldnn_enabled", {}),
    "mkldnn.deterministic": ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic", {}),
    "mkldnn.allow_tf32": ("_get_onednn_allow_tf32", "_set_onednn_allow_tf32", {}),
    "nnpack.enabled": ("_get_nnpack_enabled", "_set_nnpack_enabled", {}),
    "cuda.cublas_workspace_size": (
        "_cuda_getCublasWorkspaceSize", "_cuda_setCublasWorkspaceSize",
        {"seen": _NEW, "build": _CUDA},
    ),
    "cuda.cublaslt_workspace_size": (
        "_cuda_getCublasLtWorkspaceSize", "_cuda_setCublasLtWorkspaceSize",
        {"seen": _NEW, "build": _CUDA},
    ),
    "cuda.sync_debug_mode": (
        "_cuda_get_sync_debug_mode", "_cuda_set_sync_debug_mode", {"build": _CUDA},
    ),
    "cuda.matmul.allow_tf32": ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32", {}),
    "cuda.matmul.allow_fp16_accumulation": (
        "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation", {},
    ),
    "cuda.matmul.prefer_cublaslt_grouped_gemm": (
        "_get_cublaslt_prefer_grouped_gemm", "_set_cublaslt_prefer_grouped_gemm",
        {"seen": ("2.15",)},
    ),
    "cpu.allow_fp16_reduced_precision_reduction": (
        "_get_cpu_allow_fp16_reduced_precision_reduction",
        "_set_cpu_allow_fp16_reduced_precision_reduction", {},
    ),
    "utils.deterministic.fill_uninitialized_memory": (
        "_get_deterministic_fill_uninitialized_memory",
        "_set_deterministic_fill_uninitialized_memory", {},
    ),
    "autograd.multithreading_enabled": (
        "_is_multithreading_enabled", "_set_multithreading_enabled", {},
    ),
}  # fmt: skip


def _found(path: str, **facts: Any) -> Any:
    return private(path, _KNOB, ABSENT, **facts)


_PAIRS = {
    knob: Switch(_found(f"torch._C.{get}", **facts), _found(f"torch._C.{put}", **facts))
    for knob, (get, put, facts) in _SWITCHES.items()
}


def switch(knob: str) -> Switch:
    """Return the getter and the setter behind a knob."""
    return _PAIRS[knob]


def setter_of(knob: str) -> str:
    """Return the place of the setter behind a knob, for people."""
    return f"torch._C.{_SWITCHES[knob][1]}"


# --- what can be read only ---

_FACTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mkldnn.is_available": ("_has_mkldnn", {}),
    "mkldnn.is_acl_available": ("_has_mkldnn_acl", {"seen": _NEW}),
    "kleidiai.is_available": ("_has_kleidiai", {}),
    "xnnpack.enabled": ("_is_xnnpack_enabled", {}),
    "cudnn.is_available": ("_has_cudnn", {}),
    "cusparselt.is_available": ("_has_cusparselt", {}),
    "cuda.is_flash_attention_available": ("_is_flash_attention_available", {}),
    "cuda.is_ck_sdpa_available": ("_is_ck_sdpa_available", {"seen": _NEW}),
    "xpu": ("_has_xpu", {}),
}
_READ = {knob: _found(f"torch._C.{name}", **facts) for knob, (name, facts) in _FACTS.items()}


def fact(knob: str) -> Callable[[], Any] | str:
    """Return what reads a fact of the build; torch keeps some as plain values."""
    found = _READ[knob]
    return (lambda: found) if isinstance(found, bool) else found


def has_xpu() -> bool:
    """Say whether torch was built for Intel's GPUs."""
    found = _READ["xpu"]
    return getattr(torch.version, "xpu", None) is not None if found == ABSENT else bool(found)


_CUDNN = noted("torch._C._cudnn", "the version of cuDNN is not told", build=_CUDA)


def library(name: str) -> Any:
    """Return the part of torch that speaks to cuDNN; None where a build has none."""
    found = {"cudnn": _CUDNN}[name].find()
    return None if found is MISSING else found


_filter_state = _found("torch.backends.python_native._get_filter_state", seen=_NEW)
_FILTERED = {"disabled_operations": "_op_symbols", "disabled_dispatch_keys": "_dispatch_keys"}
for _name in _FILTERED.values():
    noted(
        f"torch.backends.python_native._get_filter_state.{_name}",
        _KNOB,
        seen=_NEW,
        sample=lambda: None if _filter_state == ABSENT else _filter_state(),
    )


def filter_state(name: str) -> Callable[[], list[str]] | str:
    """Return what reads which of torch's operators in Triton and CuTe are switched off."""
    if _filter_state == ABSENT:
        return ABSENT
    return lambda: sorted(map(str, getattr(_filter_state(), _FILTERED[name])))


_PLANS = {
    what: _found(f"torch._cufft_{what}", build=_CUDA)
    for what in ("get_plan_cache_max_size", "set_plan_cache_max_size", "get_plan_cache_size")
}


def plan_cache(what: str, device: int) -> Any:
    """Return a getter or setter of a device's cache of FFT plans."""
    function = _PLANS[what]
    return ABSENT if function == ABSENT else functools.partial(function, device)


# --- what several knobs share ---

fp32_precision: Callable[[str, str], str] = private(
    "torch._C._get_fp32_precision_getter", "the knobs of float32 precision refuse"
)
set_fp32_precision: Callable[[str, str, str], None] = private(
    "torch._C._set_fp32_precision_setter", "the knobs of float32 precision refuse"
)
matmul_precision: Callable[[], str] = private(
    "torch._C._get_float32_matmul_precision",
    "torch.get_float32_matmul_precision() is called",
    torch.get_float32_matmul_precision,
)
set_matmul_precision: Callable[[str], None] = private(
    "torch._C._set_float32_matmul_precision",
    "torch.set_float32_matmul_precision() is called",
    torch.set_float32_matmul_precision,
)
cublas_tf32: Callable[[], bool] = private(
    "torch._C._get_cublas_allow_tf32",
    "torch.backends.cuda.matmul.allow_tf32 is read",
    lambda: bool(torch.backends.cuda.matmul.allow_tf32),
)
cudnn_tf32: Callable[[], bool] = private(
    "torch._C._get_cudnn_allow_tf32",
    "torch.backends.cudnn.allow_tf32 is read",
    lambda: bool(torch.backends.cudnn.allow_tf32),
)
set_cudnn_tf32: Callable[[bool], None] = private(
    "torch._C._set_cudnn_allow_tf32",
    "torch.backends.cudnn.allow_tf32 is set",
    lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
)
deterministic_warn_only: Callable[[], bool] = private(
    "torch._C._get_deterministic_algorithms_warn_only",
    "torch.is_deterministic_algorithms_warn_only_enabled() is called",
    torch.is_deterministic_algorithms_warn_only_enabled,
)
set_deterministic: Callable[..., None] = private(
    "torch._C._set_deterministic_algorithms",
    "torch.use_deterministic_algorithms() is called, which sets Inductor's switch too",
    torch.use_deterministic_algorithms,
)
set_grad_enabled: Callable[[bool], None] = private(
    "torch._C._set_grad_enabled",
    "torch.set_grad_enabled() is called",
    lambda value: torch.set_grad_enabled(value) and None,
)
set_sparse_checks: Callable[[bool], None] = private(
    "torch._C._set_check_sparse_tensor_invariants",
    "torch.sparse.check_sparse_tensor_invariants.enable() or disable() is called",
    lambda value: (
        torch.sparse.check_sparse_tensor_invariants.enable()
        if value
        else torch.sparse.check_sparse_tensor_invariants.disable()
    ),
)
sdp_priority: Callable[[], list[int]] = private(
    "torch._C._get_sdp_priority_order", "the knob cuda.sdp_priority refuses"
)
set_sdp_priority: Callable[[list[int]], None] = private(
    "torch._C._set_sdp_priority_order", "the knob cuda.sdp_priority refuses"
)

_REDUCTIONS = {
    dtype: (
        private(f"torch._C._get_cublas_allow_{dtype}_reduced_precision_reduction", _KNOB),
        private(f"torch._C._set_cublas_allow_{dtype}_reduced_precision_reduction", _KNOB),
    )
    for dtype in ("fp16", "bf16")
}


def reductions(dtype: str) -> tuple[Callable[[], Any], Callable[..., Any]]:
    """Return the getter and the setter of sums in ``fp16`` or ``bf16``.

    Torch 2.9 keeps one value, later ones a pair: whether, and whether products may be split.
    """
    return _REDUCTIONS[dtype]


_LIBRARIES = {
    name: (
        private(f"torch._C.{kind}", "the knob of the preferred library refuses"),
        *(
            private(
                f"torch._C._{verb}_{name}_preferred_backend",
                "the knob of the preferred library refuses",
            )
            for verb in ("get", "set")
        ),
    )
    for name, kind in (
        ("linalg", "_LinalgBackend"),
        ("blas", "_BlasBackend"),
        ("rocm_fa", "_ROCmFABackend"),
    )
}


def preferred_library(name: str) -> tuple[Any, Callable[[], Any], Callable[[Any], None]]:
    """Return the enumeration, the getter and the setter of a preferred library."""
    return _LIBRARIES[name]

"""The table's part on kernels and libraries: SDPA's switches, cuDNN, oneDNN, BLAS and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from polyattn.flags.cells import Access
from polyattn.torch.flags.declare import CUDA_BUILD, ROCM_BUILD, enum_name, knob, query, version
from polyattn.torch.flags.sdpa_order import order, put_order, take_order
from polyattn.torch.flags.state import OPT_EINSUM
from polyattn.torch.internals.switches import (
    ABSENT,
    plan_cache,
    preferred_library,
    setter_of,
    switch,
)

__all__ = ["kernels"]

_BEFORE_COMPILED = "graphs that torch.compile made before do not notice."
_POSITIVE = "polyattn.use_backend(...) to run one kernel"


def kernels() -> Iterator[Access]:
    """Yield the knobs of kernels and libraries."""
    yield from _sdpa()
    yield from _cudnn()
    yield from _miopen()
    yield from _cpu_libraries()
    yield from _einsum_and_quantized()
    yield from _cuda_libraries()
    yield from _cuda_calls()
    yield from _plan_caches()
    yield from _python_native()


_SWITCHES = {
    "flash": "FlashAttention on CUDA, and the tiled kernel on CPUs",
    "mem_efficient": "the memory-efficient kernel (CUTLASS), CUDA",
    "math": "the unfused path: matmul, softmax, matmul",
    "cudnn": "cuDNN's kernel, CUDA",
}


def _sdpa() -> Iterator[Access]:
    for name, what in _SWITCHES.items():
        yield knob(
            f"cuda.{name}_sdp_enabled",
            *switch(f"cuda.{name}_sdp_enabled"),
            f"Whether scaled_dot_product_attention may use {what}.",
            where=f"torch.backends.cuda.enable_{name}_sdp",
            replaced_by=_POSITIVE,
            trap=f"For the whole process, also under sdpa_kernel(); {_BEFORE_COMPILED}",
            aliases=(f"cuda.enable_{name}_sdp", f"cuda.{name}_sdp"),
        )
    yield knob(
        "cuda.overrideable_sdp_enabled",
        *switch("cuda.overrideable_sdp_enabled"),
        "Whether scaled_dot_product_attention may use an out-of-tree device's kernel.",
        where=setter_of("cuda.overrideable_sdp_enabled"),
        trap="The deprecated cuda.sdp_kernel() switches it off unasked.",
    )
    yield knob(
        "cuda.fa3_sdp_enabled",
        *switch("cuda.fa3_sdp_enabled"),
        "Whether FlashAttention 3 stands in for torch's flash kernel (see "
        "torch.nn.attention.activate_flash_attention_impl).",
        where=setter_of("cuda.fa3_sdp_enabled"),
        since="2.11",
    )
    yield from _sdpa_order_and_sums()


def _sdpa_order_and_sums() -> Iterator[Access]:
    yield knob(
        "cuda.sdp_priority", order, put_order,
        "The order in which scaled_dot_product_attention tries its kernels on CUDA.",
        type="list", convert=take_order, where="torch.nn.attention.sdpa_kernel(set_priority=True)",
        allowed="math, flash, efficient, cudnn, overrideable in some order; others keep theirs",
        trap="CPUs ignore it. Torch's first call on a GPU may put cuDNN first. "
        "sdpa_kernel() inside a narrower sdpa_kernel() leaves it changed; scopes here do not.",
        aliases=("sdpa_priority", "sdp_priority"),
    )  # fmt: skip
    yield knob(
        "cuda.fp16_bf16_reduction_math_sdp_allowed",
        *switch("cuda.fp16_bf16_reduction_math_sdp_allowed"),
        "Whether the unfused attention may sum in 16 bits instead of float32.",
        where="torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        aliases=("cuda.allow_fp16_bf16_reduction_math_sdp",),
    )
    yield knob(
        "mha.fastpath_enabled",
        torch.backends.mha.get_fastpath_enabled,
        torch.backends.mha.set_fastpath_enabled,
        "Whether nn.MultiheadAttention and nn.TransformerEncoder may take their fused path.",
        where="torch.backends.mha.set_fastpath_enabled",
        trap="Under jit scripting it reads as True whatever was set.",
        aliases=("mha.get_fastpath_enabled", "mha.set_fastpath_enabled"),
    )


def _cudnn() -> Iterator[Access]:
    yield knob(
        "cudnn.enabled",
        *switch("cudnn.enabled"),
        "Whether cuDNN is used.",
        freezes=True,
        trap="cudnn.flags() without arguments switches it off; scopes here set what they name.",
    )
    yield knob(
        "cudnn.benchmark",
        *switch("cudnn.benchmark"),
        "Whether cuDNN times its convolution algorithms for each new shape and keeps the fastest.",
        freezes=True,
        trap="The winner may differ from run to run, and so may the last bits.",
    )
    yield knob(
        "cudnn.benchmark_limit",
        *switch("cudnn.benchmark_limit"),
        "How many algorithms cudnn.benchmark tries; 0: all.",
        type="int",
        low=0,
        freezes=True,
        builds=CUDA_BUILD,
    )
    yield knob(
        "cudnn.deterministic",
        *switch("cudnn.deterministic"),
        "Whether cuDNN may use only algorithms that give the same bits every time.",
        freezes=True,
    )
    yield knob(
        "cudnn.depthwise_kernel",
        *switch("cudnn.depthwise_kernel"),
        "Who runs depthwise convolutions on CUDA.",
        type="str",
        allowed=("auto", "cudnn", "native"),
        since="2.13",
        freezes=True,
    )


def _miopen() -> Iterator[Access]:
    yield knob(
        "miopen.immediate",
        *switch("miopen.immediate"),
        "Whether MIOpen takes an algorithm at once instead of searching; has effect on ROCm.",
        freezes=True,
    )


def _cpu_libraries() -> Iterator[Access]:
    yield knob(
        "mkldnn.enabled",
        *switch("mkldnn.enabled"),
        "Whether oneDNN is used.",
        freezes=True,
        trap="mkldnn.flags() without arguments switches it off.",
    )
    yield knob(
        "mkldnn.deterministic",
        *switch("mkldnn.deterministic"),
        "Whether oneDNN may use only deterministic algorithms.",
        freezes=True,
    )
    yield knob(
        "nnpack.enabled",
        *switch("nnpack.enabled"),
        "Whether NNPACK may run convolutions on CPUs.",
        where="torch.backends.nnpack.set_flags",
    )


def _einsum_and_quantized() -> Iterator[Access]:
    yield knob(
        "opt_einsum.enabled",
        lambda: torch.backends.opt_einsum.enabled,
        lambda value: OPT_EINSUM.put("enabled", value),
        "Whether einsum asks opt_einsum for the order of contraction.",
        freezes=True,
        touches=(OPT_EINSUM.cell("enabled"),),
        rank=5,
        lacks=lambda value=None: _no_opt_einsum() if value is not False else "",
        trap="Assigning torch's attribute hides the value from its own flags() and set_flags().",
    )
    yield knob(
        "opt_einsum.strategy", lambda: torch.backends.opt_einsum.strategy,
        lambda value: OPT_EINSUM.put("strategy", value),
        "How opt_einsum looks for the order; optimal takes factorial time.", type="str",
        allowed=("auto", "greedy", "optimal"), freezes=True, rank=6,
        touches=(OPT_EINSUM.cell("strategy"),), lacks=lambda value=None: _no_opt_einsum(),
    )  # fmt: skip
    yield knob(
        "quantized.engine",
        lambda: torch.backends.quantized.engine,
        lambda value: setattr(torch.backends.quantized, "engine", value),
        "The library of quantized operators.",
        type="str",
        lacks=_no_engine,
        allowed=("none", "fbgemm", "qnnpack", "onednn", "x86"),
    )


def _no_opt_einsum() -> str:
    return (
        ""
        if torch.backends.opt_einsum.is_available()
        else "the package opt_einsum is not installed (pip install opt_einsum)"
    )


def _no_engine(value: str | None = None) -> str:
    supported = torch.backends.quantized.supported_engines
    if value is None or value in supported:
        return ""
    return f"{version()} has only the engines {', '.join(supported)}"


def _needs(**builds: str) -> Callable[..., str]:
    """Return what lacks for a value that needs some build."""

    def lacks(value: Any = None) -> str:
        needed = builds.get(str(value))
        have = {
            CUDA_BUILD: torch.backends.cuda.is_built(),
            ROCM_BUILD: torch.version.hip is not None,
        }
        if needed is None or have[needed]:
            return ""
        return f"{value!r} needs {needed}, and this is {version()}"

    return lacks


def _library(
    name: str, choices: str, about: str, lacks: Callable[..., str], **facts: Any
) -> Access:
    """A preferred library: torch keeps a member of an enumeration, here it goes by its name."""
    kind, get, put = preferred_library(name)
    members = {enum_name(member): member for member in kind.__members__.values()}

    def convert(value: Any) -> Any:
        return enum_name(value) if isinstance(value, kind) else _ALIASES.get(value, value)

    def read() -> str:
        return enum_name(get())

    return knob(
        f"cuda.preferred_{name}_library", read, lambda value: put(members[value]), about,
        type="str", allowed=tuple(choices.split()), convert=convert, lacks=lacks,
        verify=lambda value: value == "default" or read() == value, **facts,
    )  # fmt: skip


_ALIASES = {"hipblas": "cublas", "hipblaslt": "cublaslt"}


def _cuda_libraries() -> Iterator[Access]:
    yield _library(
        "linalg",
        "default cusolver magma",
        "Which library linear algebra on CUDA prefers.",
        _needs(cusolver=CUDA_BUILD, magma=CUDA_BUILD),
        deprecated="2.13 (magma)",
        trap="In a build without the library torch stores the value and then raises; here nothing "
        "is set.",
    )
    yield _library(
        "blas",
        "default cublas cublaslt ck",
        "Which library matrix products on CUDA prefer.",
        _needs(cublaslt=CUDA_BUILD, ck=ROCM_BUILD),
        trap="default reads as the library that it stands for.",
    )
    yield _library(
        "rocm_fa",
        "default aotriton ck",
        "Which FlashAttention ROCm uses.",
        _needs(aotriton=ROCM_BUILD, ck=ROCM_BUILD),
        trap="default may read as what it stands for.",
    )


def _cuda_calls() -> Iterator[Access]:
    for library in ("cublas", "cublaslt"):
        yield knob(
            f"cuda.{library}_workspace_size",
            *switch(f"cuda.{library}_workspace_size"),
            f"Bytes of work space for {library}.",
            type="int",
            low=0,
            since="2.13",
            builds=CUDA_BUILD,
            lacks=lambda value=None: _no_device(),
        )
    yield knob(
        "cuda.sync_debug_mode",
        *switch("cuda.sync_debug_mode"),
        "What a synchronising CUDA operation does: 0 nothing, 1 warns, 2 raises.",
        type="int",
        allowed=(0, 1, 2),
        where="torch.cuda.set_sync_debug_mode",
        builds=CUDA_BUILD,
        lacks=lambda value=None: _no_device(),
    )


def _no_device() -> str:
    return "" if torch.cuda.is_available() else "torch sees no CUDA device"


def _plan_caches() -> Iterator[Access]:
    """One knob a device; asking torch for them before CUDA is initialised would initialise it."""
    there = torch.cuda.is_initialized()
    current = torch.cuda.current_device() if there else 0
    for index in range(torch.cuda.device_count()) if there else (0,):
        yield knob(
            f"cuda.cufft_plan_cache[{index}].max_size",
            plan_cache("get_plan_cache_max_size", index) if there else ABSENT,
            plan_cache("set_plan_cache_max_size", index) if there else ABSENT,
            f"How many FFT plans are kept for CUDA device {index}.",
            type="int",
            low=0,
            builds=f"{CUDA_BUILD}, with CUDA initialised",
            aliases=("cuda.cufft_plan_cache.max_size",) if index == current else (),
        )
        yield query(
            f"cuda.cufft_plan_cache[{index}].size",
            plan_cache("get_plan_cache_size", index) if there else ABSENT,
            f"How many FFT plans are kept for CUDA device {index} now.",
            type="int",
            builds=f"{CUDA_BUILD}, with CUDA initialised",
            volatile=True,
            aliases=("cuda.cufft_plan_cache.size",) if index == current else (),
            why_fixed="it counts the plans; cuda.cufft_plan_cache[...].max_size bounds them",
        )


def _python_native() -> Iterator[Access]:
    module = getattr(torch.backends, "python_native", None)
    known = {"triton": "Triton", "cutedsl": "CuTe DSL"}
    for name in dict.fromkeys([*known, *(module.all_dsls if module else ())]):
        yield knob(
            f"python_native.{name}.enabled",
            partial(_switched_on, module, name) if module else ABSENT,
            partial(_switch, module, name) if module else ABSENT,
            f"Whether torch's own operators written in {known.get(name, name)} take part.",
            freezes=True,
            since="2.12",
        )


def _switched_on(module: Any, name: str) -> bool:
    return bool(getattr(module, name).enabled)


def _switch(module: Any, name: str, on: bool) -> None:
    controller = getattr(module, name)
    if controller.enabled != on:  # enabling anew would register the operators a second time
        controller.enable() if on else controller.disable()

"""The table's part on what can only be asked: build, libraries, functions, environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.backends.xnnpack
import torch.nn.attention

from polyattn import settings
from polyattn.flags.cells import Access
from polyattn.torch.flags.declare import build, function, query
from polyattn.torch.internals.switches import ABSENT, fact, filter_state, library

__all__ = ["ENVIRONMENT", "queries"]


def queries() -> Iterator[Access]:
    """Yield what can only be asked."""
    yield from _build()
    yield from _libraries()
    yield from _gpu_libraries()
    yield from _gpu_attention()
    yield from _attention_functions()
    yield from _functions_of_parts()
    yield from _functions_of_python_native()
    yield from _other_functions()
    yield from _native_filters()
    yield from _native_languages()
    yield from _environment()


def _build() -> Iterator[Access]:
    yield query(
        "version",
        lambda: str(torch.__version__),
        "Torch's version.",
        type="str",
        where="torch.__version__",
    )
    yield query("build", build, "What torch was built for.", type="str", where="torch.version")
    yield query(
        "cpu.get_cpu_capability",
        torch.backends.cpu.get_cpu_capability,
        "The widest instruction set that torch's own CPU kernels use here.",
        type="str",
        aliases=("cpu.cpu_capability", "cpu.capability"),
    )
    yield query(
        "cuda.is_built",
        torch.backends.cuda.is_built,
        "Whether torch was built for CUDA (or ROCm); a device is another matter.",
    )


def _libraries() -> Iterator[Access]:
    backends = torch.backends
    yield query("mkl.is_available", backends.mkl.is_available, "Whether torch was built with MKL.")
    yield query(
        "mkldnn.is_available",
        fact("mkldnn.is_available"),
        "Whether torch was built with oneDNN.",
        where="torch.backends.mkldnn.is_available",
    )
    yield query(
        "mkldnn.is_acl_available",
        fact("mkldnn.is_acl_available"),
        "Whether torch was built with oneDNN on Arm's compute library.",
        since="2.10",
    )
    yield query(
        "openmp.is_available", backends.openmp.is_available, "Whether torch was built with OpenMP."
    )
    yield query(
        "nnpack.is_available",
        backends.nnpack.is_available,
        "Whether NNPACK was built in and runs here.",
    )
    yield query(
        "kleidiai.is_available",
        fact("kleidiai.is_available"),
        "Whether torch was built with KleidiAI.",
    )
    yield query(
        "xnnpack.enabled",
        fact("xnnpack.enabled"),
        "Whether torch was built with XNNPACK.",
        why_fixed="torch allows no assignment",
    )
    yield from _package_and_engines()


def _package_and_engines() -> Iterator[Access]:
    backends = torch.backends
    yield query(
        "opt_einsum.is_available",
        backends.opt_einsum.is_available,
        "Whether the package opt_einsum is installed.",
    )
    yield query(
        "opt_einsum.get_opt_einsum",
        _opt_einsum,
        "The package opt_einsum, by its version.",
        type="str",
    )
    yield query(
        "quantized.supported_engines",
        lambda: sorted(backends.quantized.supported_engines),
        "The engines of quantized operators in this build.",
        type="list",
        why_fixed="torch allows no assignment",
    )
    yield query("mps.is_built", backends.mps.is_built, "Whether torch was built for Apple's Metal.")
    yield query("mps.is_available", backends.mps.is_available, "Whether a Metal device is there.")


def _opt_einsum() -> str | None:
    package = torch.backends.opt_einsum.get_opt_einsum()
    return None if package is None else str(getattr(package, "__version__", "unknown"))


def _gpu_libraries() -> Iterator[Access]:
    backends = torch.backends
    yield query(
        "cudnn.is_available",
        fact("cudnn.is_available"),
        "Whether torch was built with cuDNN (or MIOpen).",
        where="torch.backends.cudnn.is_available",
    )
    yield query(
        "cudnn.version",
        _cudnn_version,
        "The version of cuDNN.",
        type="int",
        where="torch.backends.cudnn.version",
    )
    yield query(
        "cusparselt.is_available",
        fact("cusparselt.is_available"),
        "Whether torch was built with cuSPARSELt.",
    )
    yield query(
        "cusparselt.version", backends.cusparselt.version, "The version of cuSPARSELt.", type="int"
    )
    yield query(
        "cusparselt.get_max_alg_id",
        backends.cusparselt.get_max_alg_id,
        "The highest algorithm number of cuSPARSELt.",
        type="int",
    )


def _gpu_attention() -> Iterator[Access]:
    yield query(
        "cuda.is_flash_attention_available",
        fact("cuda.is_flash_attention_available"),
        "Whether torch was built with FlashAttention for CUDA.",
    )
    yield query(
        "cuda.is_ck_sdpa_available",
        fact("cuda.is_ck_sdpa_available"),
        "Whether torch was built with composable kernels for attention (ROCm).",
        since="2.12",
    )
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    yield query(
        "nn.attention.current_flash_attention_impl",
        current or ABSENT,
        "Which registered FlashAttention replaces torch's own; None: none.",
        type="str",
        where="torch.nn.attention.current_flash_attention_impl",
        since="2.11",
        why_fixed="torch.nn.attention.activate_flash_attention_impl changes it, for the process",
    )


def _cudnn_version() -> int | None:
    """Ask the library itself: ``torch.backends.cudnn.version()`` looks at the devices too."""
    cudnn = library("cudnn")
    return None if cudnn is None else int(cudnn.getVersionInt())


def _attention_functions() -> Iterator[Access]:
    explain = "polyattn.torch.explain(...), with every reason, on any machine"
    for name in ("flash", "efficient", "cudnn"):
        yield function(
            f"cuda.can_use_{name}_attention",
            f"Whether SDPA's {name} kernel can run a call; a CPU build says False, never why.",
            f"polyattn.torch.flags.can_use_{name}_attention, or {explain}",
        )
    yield function("cuda.SDPAParams", "The call that can_use_* are asked about.", explain)
    yield function(
        "cuda.sdp_kernel",
        "A scope that switches kernels off; switches others off unasked.",
        "polyattn.use_backend(...), or cuda.*_sdp_enabled in a scope of flags",
        deprecated="2.3",
    )
    yield function(
        "nn.attention.sdpa_kernel",
        "A scope over SDPA's switches and order, process-wide.",
        "polyattn.use_backend(...), or cuda.*_sdp_enabled and cuda.sdp_priority in flags(...)",
        where="torch.nn.attention.sdpa_kernel",
    )


_SCOPES = {
    "": ("fp32_precision",),
    "cudnn.": ("cudnn.*",),
    "mkldnn.": ("mkldnn.*",),
    "nnpack.": ("nnpack.enabled",),
    "opt_einsum.": ("opt_einsum.*",),
    "miopen.": ("miopen.immediate",),
}


def _functions_of_parts() -> Iterator[Access]:
    for part, knobs in _SCOPES.items():
        for name in ("flags", "set_flags"):
            yield function(
                f"{part}{name}",
                "Sets all of its knobs, those not named to defaults of its own.",
                f"polyattn.torch.flags.flags(**{{...}}) over {', '.join(knobs)}",
            )


def _functions_of_python_native() -> Iterator[Access]:
    for name in (
        "disable_operations",
        "enable_operations",
        "disable_dispatch_keys",
        "enable_dispatch_keys",
        "operations_disabled",
    ):
        yield function(
            f"python_native.{name}",
            "Which of torch's own Triton and CuTe operators take part.",
            "itself; python_native.disabled_operations shows how it stands",
            since="2.12",
        )
    for name, shown in (
        ("get_dsl_operations", "python_native.triton.operations and its fellows"),
        ("is_dsl_disabled", "python_native.triton.enabled and its fellows"),
        ("is_operation_disabled", "python_native.disabled_operations"),
    ):
        yield function(
            f"python_native.{name}",
            "Answers about the operator, or the language, it is given.",
            shown,
            since="2.12",
        )


def _other_functions() -> Iterator[Access]:
    yield function("cuda.cufft_plan_cache.clear", "Forgets a device's FFT plans.", "itself")
    yield function(
        "cuda.blas_workspace_size",
        "The work space of the preferred BLAS.",
        "cuda.cublas_workspace_size and cuda.cublaslt_workspace_size",
        since="2.13",
    )
    for package in ("mkl", "mkldnn"):
        yield function(
            f"{package}.verbose",
            "A scope in which the library prints what it runs; its end "
            "always switches that off, and nothing can read it, so scopes here cannot hold it.",
            "itself",
        )
    yield function(
        "xeon.run_cpu",
        "A program that starts others with cores and memory bound to them.",
        "python -m torch.backends.xeon.run_cpu",
    )
    yield function(
        "xeon.run_cpu.create_args",
        "Gives a parser the options of that program.",
        "python -m torch.backends.xeon.run_cpu --help",
    )
    yield function(
        "disable_global_flags",
        "Freezes the attributes of cudnn, mkldnn, opt_einsum and miopen for good.",
        "itself",
    )
    for name in ("is_macos_or_newer", "is_macos13_or_newer", "get_name", "get_core_count"):
        yield function(f"mps.{name}", "Asks the Mac that it runs on.", "itself")


ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": "cuBLAS's work space; :4096:8 or :16:8: products repeat.",
    "CUBLASLT_WORKSPACE_SIZE": "cuBLASLt's work space, in KiB.",
    "NVIDIA_TF32_OVERRIDE": "0 forbids TF32 to all NVIDIA libraries, whatever torch says.",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1 starts with float32_matmul_precision high.",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1 keeps cuDNN from the front of SDPA's order.",
    "TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED": "1 lets cuDNN attention take nested tensors.",
    "TORCH_BLAS_PREFER_CUBLASLT": "1 starts with cuda.preferred_blas_library cublaslt.",
    "TORCH_LINALG_PREFER_CUSOLVER": "1 starts with cuda.preferred_linalg_library cusolver.",
    "TORCH_ROCM_FA_PREFER_CK": "1 starts with cuda.preferred_rocm_fa_library ck.",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1 lets ROCm use AOTriton where it is experimental.",
    "PYTORCH_CUDA_ALLOC_CONF": "The CUDA allocator's settings.",
    "CUDA_LAUNCH_BLOCKING": "1 makes every CUDA launch wait.",
    "OMP_NUM_THREADS": "How many threads OpenMP begins with.",
    "MKL_NUM_THREADS": "How many threads MKL begins with.",
    "KMP_AFFINITY": "Where Intel's OpenMP puts its threads.",
    "GOMP_CPU_AFFINITY": "Where GNU's OpenMP puts its threads.",
    "ATEN_CPU_CAPABILITY": "The widest instruction set that torch's CPU kernels may use.",
    "ONEDNN_MAX_CPU_ISA": "The widest instruction set that oneDNN may use.",
    "ONEDNN_DEFAULT_FPMATH_MODE": "What oneDNN may compute float32 in.",
}


def _native_filters() -> Iterator[Access]:
    """What python_native's functions have switched off, by operator and by dispatch key."""
    for name in ("disabled_operations", "disabled_dispatch_keys"):
        yield query(
            f"python_native.{name}",
            filter_state(name),
            "What is switched off of torch's own Triton and CuTe operators.",
            type="list",
            where=f"torch.backends.python_native.{name.replace('disabled', 'disable')}",
            since="2.12",
            why_fixed="torch.backends.python_native's functions change it",
        )


def _native_languages() -> Iterator[Access]:
    """Which languages python_native's operators are written in, which run here, and what with."""
    module = getattr(torch.backends, "python_native", None)
    for name, about in (
        ("all_dsls", "The languages that torch's own operators are written in."),
        ("available_dsls", "Those of them whose compilers are here."),
    ):
        yield query(
            f"python_native.{name}",
            partial(_listed, module, name) if module else "",
            about,
            type="list",
            since="2.12",
        )
    for name in dict.fromkeys(["triton", "cutedsl", *(module.all_dsls if module else ())]):
        part = f"python_native.{name}"
        yield query(
            f"{part}.available",
            partial(_of_language, module, name, "available") if module else "",
            f"Whether the compiler of {name} is here.",
            since="2.12",
        )
        yield query(
            f"{part}.version",
            partial(_of_language, module, name, "version") if module else "",
            f"The version of {name}; null without it.",
            type="str",
            since="2.12",
        )
        yield query(
            f"{part}.operations",
            partial(_operations, module, name) if module else "",
            f"Torch's operators that are written in {name}.",
            type="list",
            since="2.12",
            where=f"torch.backends.python_native.get_dsl_operations({name!r})",
        )


def _listed(module: Any, name: str) -> list[str]:
    return sorted(getattr(module, name))


def _of_language(module: Any, name: str, fact: str) -> Any:
    found = getattr(getattr(module, name), fact)
    return found if found is None or isinstance(found, bool) else str(found)


def _operations(module: Any, name: str) -> list[str]:
    return sorted(map(str, module.get_dsl_operations(name)))


def _environment() -> Iterator[Access]:
    for name, about in ENVIRONMENT.items():
        yield query(
            f"env.{name}",
            _variable(name),
            about,
            type="str",
            where=f"environment variable {name}",
            why_fixed="its library reads it when it starts; set it before the program starts",
        )


def _variable(name: str) -> Callable[[], Any]:
    return lambda: settings.variable(name)

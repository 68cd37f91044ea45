"""The names under torch.backends: those of its documentation, and those that a walk finds."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.backends

DOCUMENTED = (
    "cpu.get_cpu_capability", "cuda.is_built", "cuda.matmul.allow_tf32",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.cufft_plan_cache.size",
    "cuda.cufft_plan_cache.max_size", "cuda.cufft_plan_cache.clear",
    "cuda.preferred_linalg_library", "cuda.SDPAParams", "cuda.flash_sdp_enabled",
    "cuda.enable_mem_efficient_sdp", "cuda.mem_efficient_sdp_enabled", "cuda.enable_flash_sdp",
    "cuda.math_sdp_enabled", "cuda.enable_math_sdp", "cuda.can_use_flash_attention",
    "cuda.can_use_efficient_attention", "cuda.sdp_kernel", "cudnn.version", "cudnn.is_available",
    "cudnn.enabled", "cudnn.allow_tf32", "cudnn.deterministic", "cudnn.benchmark",
    "cudnn.benchmark_limit", "mha.get_fastpath_enabled", "mha.set_fastpath_enabled",
    "mps.is_available", "mps.is_built", "mkl.is_available", "mkl.verbose", "mkldnn.is_available",
    "mkldnn.verbose", "nnpack.is_available", "nnpack.flags", "nnpack.set_flags",
    "openmp.is_available", "opt_einsum.is_available", "opt_einsum.get_opt_einsum",
    "opt_einsum.enabled", "opt_einsum.strategy", "quantized.engine",
    "quantized.supported_engines", "xnnpack.enabled", "xeon.run_cpu",
    "xeon.run_cpu.create_args",
)  # fmt: skip
"""Every name of torch's page on torch.backends, without that prefix; the last three sections of it
name modules only, and are listed with what these hold."""


def found() -> set[str]:
    """Every public name below torch.backends of the installed torch, without that prefix."""
    for module in pkgutil.walk_packages(torch.backends.__path__, "torch.backends."):
        if "._" not in module.name:
            importlib.import_module(module.name)
    seen: set[int] = set()
    names = set(_members(torch.backends, "", seen))
    for name in sorted(sys.modules):
        if name.startswith("torch.backends.") and "._" not in name:
            short = name.removeprefix("torch.backends.")
            names |= set(_members(sys.modules[name], f"{short}.", seen))
    return {name for name in names if not any(part.startswith("_") for part in name.split("."))}


def _members(thing: Any, prefix: str, seen: set[int]) -> Iterator[str]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    for name in sorted(_names(thing)):
        value = getattr(thing, name, None)
        if isinstance(value, type):  # a class is what its objects are
            continue
        yield f"{prefix}{name}"
        home = getattr(value, "__name__", "") if isinstance(value, types.ModuleType) else ""
        if (home or type(value).__module__).startswith("torch.backends"):
            yield from _members(value, f"{prefix}{name}.", seen)


def _names(thing: Any) -> set[str]:
    """Attributes, properties of the class, and the names that its __getattr__ compares with."""
    names: set[str] = set()
    if isinstance(thing, types.ModuleType):
        names |= set(_own(thing))
        if isinstance(
            inner := vars(thing).get("m"), types.ModuleType
        ):  # what torch's stand-in wraps
            names |= set(_own(inner))
    for base in type(thing).__mro__:
        if base.__module__.startswith("torch.backends"):
            names |= vars(base).keys()
            for hook in ("__getattr__", "__setattr__"):
                if hook in vars(base):
                    text = inspect.getsource(vars(base)[hook])
                    names |= set(re.findall(r'name == "(\w+)"', text))
    return {name for name in names - {"m"} if not name.startswith("_")}


def _own(module: types.ModuleType) -> Iterator[str]:
    """What the module defines itself; what it imported from elsewhere is not its."""
    for name, value in vars(module).items():
        outside = isinstance(value, types.ModuleType) and not value.__name__.startswith(
            "torch.backends"
        )
        home = getattr(value, "__module__", module.__name__)
        elsewhere = isinstance(home, str) and home != module.__name__
        if not outside and not (elsewhere and inspect.isroutine(value)):
            yield name

"""What the choice of a backend has to know of torch: its versions, its devices, its tensors."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from polyattn.problem.processor import identity, processor, processors_quota, processors_usable
from polyattn.selection.platforms import Described
from polyattn.torch.calibration_problems import TorchProber

__all__ = ["described", "device_description", "library_versions", "present_device", "prober"]

prober = TorchProber()
"""What tries the CPU kernels on this machine."""


@functools.lru_cache(maxsize=1)
def library_versions() -> str:
    """Return the versions that measured times depend on, canonically."""
    here = sys.modules["polyattn"].__version__
    cuda = f" cuda={torch.version.cuda}" if torch.version.cuda else ""
    return f"polyattn={here} torch={torch.__version__}{cuda}"


def present_device() -> tuple[str, str | None]:
    """Return the device that a layer would be put on here, and its compute capability."""
    if not torch.cuda.is_available():
        return "cpu", None
    return "cuda", "sm_{}{}".format(*torch.cuda.get_device_capability())


def device_description(kind: str) -> str:
    """Describe the device that measured times belong to."""
    if kind == "cuda" and torch.cuda.is_available():
        return f"cuda:{torch.cuda.get_device_name()}"
    threads, usable = torch.get_num_threads(), processors_usable()
    return f"{_processor_described()} threads={threads} processors={usable}"


@functools.lru_cache(maxsize=1)
def _processor_described() -> str:
    """Describe the processor: its name alone, as virtual machines give it, would fit others too."""
    quota = processors_quota()
    limit = "" if quota is None else f" quota={quota:g}"
    return f"cpu:{processor()[0]} ({identity()}) {torch.backends.cpu.get_cpu_capability()}{limit}"


def described(x: Any) -> Described | None:
    """Return shape, dtype and device of a tensor; None for anything else.

    >>> print(described(torch.zeros(2, 3)))
    (2, 3) float32 on cpu
    """
    if not isinstance(x, torch.Tensor):
        return None
    return Described(tuple(x.shape), str(x.dtype).removeprefix("torch."), str(x.device))

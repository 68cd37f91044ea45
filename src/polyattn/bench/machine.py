"""What a record says of the machine it was made on, and of how the frameworks were set."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from typing import Any

from polyattn.problem.processor import identity, processor

__all__ = [
    "accelerator", "command_line", "describe", "flags", "machine_class", "processor_name",
    "versions",
]  # fmt: skip

_FLAGS = re.compile(r"avx|amx|sve|neon|asimd|bf16|f16c|fma|vnni")
_GENERATIONS: dict[tuple[Any, Any], str] = {("AuthenticAMD", 26): "Zen 5"}
"""Processors whose name and instruction sets are also another's, by vendor and family."""
_PACKAGES = ("polyattn", "torch", "diffusers", "transformers", "numpy", "jax")


def describe() -> dict[str, Any]:
    """Return processor and who made it, cores, the instruction sets that matter, and the system."""
    model, flags = processor()
    return {
        "cpu": model,
        **identity()._asdict(),
        "cores": os.cpu_count() or 1,
        "flags": sorted(flag for flag in flags if _FLAGS.search(flag)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def accelerator() -> dict[str, Any]:
    """Return the CUDA device that torch sees, to add to what `describe` says."""
    import torch

    facts = torch.cuda.get_device_properties(0)
    return {
        "accelerator": facts.name, "arch": f"sm_{facts.major}{facts.minor}",
        "multiprocessors": facts.multi_processor_count,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def machine_class(machine: Mapping[str, Any]) -> str:
    """Return the name of the folder that the records of such machines go to.

    >>> machine_class({"cpu": "AMD EPYC", "cores": 2, "flags": ["avx2", "avx512f", "avx512_bf16"]})
    'amd-epyc-avx512-bf16-2-cores'
    >>> machine_class({"cpu": "AMD EPYC", "vendor": "AuthenticAMD", "family": 26, "cores": 2,
    ...                "flags": ["avx2", "avx512f", "avx512_bf16"]})
    'amd-epyc-zen-5-avx512-bf16-2-cores'
    >>> machine_class({"cpu": "Intel Xeon", "cores": 16, "flags": [], "accelerator": "NVIDIA H100"})
    'nvidia-h100'
    """
    if "accelerator" in machine:
        return _slug(machine["accelerator"])
    flags = set(machine["flags"])
    best = next((name for name in ("avx512f", "avx2", "sve", "asimd") if name in flags), "")
    parts = [processor_name(machine), best.removesuffix("f")]
    parts += ["bf16"] if flags & {"avx512_bf16", "bf16"} else []
    parts += ["amx"] if "amx_bf16" in flags else []
    parts.append(f"{machine['cores']}-cores")
    return _slug(" ".join(filter(None, parts)))


def processor_name(machine: Mapping[str, Any]) -> str:
    """Return the processor's name, with its generation where the name leaves that open.

    >>> processor_name({"cpu": "AMD EPYC", "vendor": "AuthenticAMD", "family": 26})
    'AMD EPYC Zen 5'
    """
    generation = _GENERATIONS.get((machine.get("vendor"), machine.get("family")), "")
    return f"{machine['cpu']} {generation}".strip()


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def versions() -> dict[str, str | None]:
    """Return the versions of the packages that take part; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["polyattn"] is None:  # run from a checkout
        from polyattn import __version__

        found["polyattn"] = __version__
    return found


def flags() -> dict[str, dict[str, Any]]:
    """Return how the flags of every framework that is loaded stand now; loads none itself."""
    found: dict[str, dict[str, Any]] = {}
    if "torch" in sys.modules:
        from polyattn.torch.flags import snapshot as of_torch

        found["torch"] = of_torch()
    if "jax" in sys.modules:
        from polyattn.jax.flags import snapshot as of_jax

        found["jax"] = of_jax()
    return found


def command_line(default: str) -> str:
    """Return the command that is running; the plain one for `default` when called from Python."""
    given = sys.argv[1:]
    arguments = given[given.index("bench") + 1 :] if "bench" in given else [default]
    return " ".join(["polyattn", "bench", *arguments])

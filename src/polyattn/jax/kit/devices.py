"""What JAX's devices are called here."""

from __future__ import annotations

from typing import Any

__all__ = ["kind_of"]


def kind_of(device: Any) -> str:
    """Return the kind of a JAX device, as problems name it: cpu, cuda, rocm or tpu."""
    platform = str(device.platform)
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in str(device.client.platform_version).lower() else "cuda"

"""The environment of a program that sees several devices where there is one processor."""

from __future__ import annotations

import os

__all__ = ["seeing"]


def seeing(devices: int) -> dict[str, str]:
    """Return the environment of such a program, whose subject is where arrays lie.

    Compiling takes most of its time, so that is kept short; other tests compile as users do.
    """
    return {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }

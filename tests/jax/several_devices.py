"""The environment of a program that sees several devices where there is one processor."""

from __future__ import annotations

import os

from tests.xla_flags import short_compilation

__all__ = ["seeing"]


def seeing(devices: int) -> dict[str, str]:
    """Return the environment of such a program, whose subject is where arrays lie.

    Compiling takes most of its time, so that is kept short: few optimisations, and no threads.
    """
    flags = [f"--xla_force_host_platform_device_count={devices}"]
    if short := short_compilation():
        flags += [short, "--xla_cpu_parallel_codegen_split_count=1"]
    return {**os.environ, "XLA_FLAGS": " ".join(flags), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

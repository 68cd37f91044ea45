"""What stands around ``jax.config``: environment variables, versions, the platforms that run.

The variables are shown as the environment holds them now. XLA reads them once, when it starts, so
a change after that shows here and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jaxlib

from polyattn import settings
from polyattn.jax.flags.declare import query, variable

__all__ = ["NOT_STARTED", "QUERIES", "VARIABLES", "Unreadable", "ask", "started"]

VARIABLES = (
    variable(
        "XLA_FLAGS", "XLA's own switches, such as --xla_gpu_deterministic_ops=true.",
        trap="A switch that this XLA does not know ends the process when the first backend starts.",
    ),
    variable("LIBTPU_INIT_ARGS", "The same for the compiler of TPUs."),
    variable("XLA_PYTHON_CLIENT_PREALLOCATE", "Whether most of a GPU's memory is taken at once."),
    variable("XLA_CLIENT_MEM_FRACTION", "How much of a GPU's memory is taken."),
    variable(
        "XLA_PYTHON_CLIENT_MEM_FRACTION", "How much of a GPU's memory is taken.",
        deprecated="before 0.7", replaced_by="env.XLA_CLIENT_MEM_FRACTION",
    ),
    variable(
        "XLA_PYTHON_CLIENT_ALLOCATOR", "How a GPU's memory is taken.",
        trap="'platform' gives memory back after each use: small, and slow.",
    ),
    variable("NPROC", "How many threads XLA uses on a CPU."),
    variable(
        "NVIDIA_TF32_OVERRIDE", "'0' forbids TF32 in NVIDIA's libraries, whatever a program asks.",
    ),
)  # fmt: skip

QUERIES = (
    query("version", "str", "The version of jax.", "jax.__version__"),
    query("jaxlib.version", "str", "The version of jaxlib.", "jaxlib.__version__"),
    query(
        "backends.initialized", "bool",
        "Whether a platform has been started; options marked as freezing are fixed from then on.",
        "jax._src.xla_bridge.backends_are_initialized()",
    ),
    query(
        "backends.default", "str", "The platform that is used when none is named.",
        "jax.default_backend()",
    ),
    query(
        "backends.devices", "list", "This process's devices, by platform and kind.",
        "jax.local_devices()",
    ),
)  # fmt: skip

NOT_STARTED = "no backend is initialized yet, and reading this would initialize it"
_UNKNOWN = "this jax does not say whether a backend is initialized, and reading this may do it"


class Unreadable(Exception):
    """Why a row has no value."""


def started() -> bool | None:
    """Say whether a backend is initialized, without initializing one; None if jax does not tell.

    jax has no public name for this (0.7 to 0.10), and every public one that depends on it starts
    the backends; a jax that moves the private one only costs this answer.
    """
    try:
        from jax._src.xla_bridge import backends_are_initialized
    except ImportError:
        return None
    return bool(backends_are_initialized())


def ask(name: str) -> Any:
    """Return the answer to a query; raise Unreadable where asking would change something."""
    return _ANSWERS[name]()


def _initialized() -> bool:
    answer = started()
    if answer is None:
        raise Unreadable("this jax does not say whether a backend is initialized")
    return answer


def _default_platform() -> str:
    _need_started()
    return jax.default_backend()


def _devices() -> list[str]:
    _need_started()
    from jax.extend.backend import backends

    counts: dict[str, int] = {}
    for platform in sorted(backends()):
        for device in jax.local_devices(backend=platform):
            kind = f"{device.platform}: {device.device_kind}"
            counts[kind] = counts.get(kind, 0) + 1
    return [f"{kind} x {count}" for kind, count in counts.items()]


def _need_started() -> None:
    answer = started()
    if not answer:
        raise Unreadable(_UNKNOWN if answer is None else NOT_STARTED)


_ANSWERS: dict[str, Callable[[], Any]] = {
    "version": lambda: jax.__version__,
    "jaxlib.version": lambda: jaxlib.__version__,
    "backends.initialized": _initialized,
    "backends.default": _default_platform,
    "backends.devices": _devices,
} | {row.name: lambda name=row.name: settings.variable(name[4:]) for row in VARIABLES}

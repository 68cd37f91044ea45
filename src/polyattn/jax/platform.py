"""What JAX brings to the choice of a backend: its devices, its versions, how arrays are told."""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jaxlib
import numpy as np

from polyattn.jax.kit.devices import kind_of
from polyattn.problem.processor import identity, processor, processors_quota, processors_usable
from polyattn.selection.platforms import Described

__all__ = [
    "arch_of", "described", "device_description", "device_of", "library_versions",
    "present_device",
]  # fmt: skip


def device_of(x: Any) -> str:
    """Return the kind of device that an array lies on; where it is traced, where JAX would put it.

    JAX itself sees to it that the arrays of a call lie together.
    """
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
        return kind_of(next(iter(x.devices())))
    return kind_of(_default_device())


def _default_device() -> Any:
    named = jax.config.jax_default_device
    if named is None:
        return _first(jax.default_backend())
    return _first(named) if isinstance(named, str) else named


@functools.cache
def _first(backend: str) -> Any:
    return jax.local_devices(backend=backend)[0]


@functools.cache
def arch_of(kind: str) -> str | None:
    """Return what an accelerator is, as ``sm_90`` or ``v5e``; None for processors."""
    if kind == "cpu":
        return None
    device = _first("gpu" if kind in ("cuda", "rocm") else kind)
    if kind == "cuda":
        return "sm_" + str(device.compute_capability).replace(".", "")
    if kind == "rocm":
        return str(device.compute_capability)
    return str(device.device_kind).lower().replace("tpu ", "").replace(" lite", "e")


@functools.cache
def library_versions() -> str:
    """Return the versions that measured times depend on, canonically."""
    here = sys.modules["polyattn"].__version__
    return f"polyattn={here} jax={jax.__version__} jaxlib={jaxlib.__version__}"


def device_description(kind: str) -> str:
    """Describe the device that measured times belong to."""
    if kind != "cpu":
        try:
            found = _first("gpu" if kind in ("cuda", "rocm") else kind).device_kind
        except RuntimeError:  # a machine that one does not have, which somebody asks about
            found = "absent"
        return f"{kind}:{found}"
    quota = processors_quota()
    limit = "" if quota is None else f" quota={quota:g}"
    return f"cpu:{processor()[0]} ({identity()}) xla processors={processors_usable()}{limit}"


def present_device() -> tuple[str, str | None]:
    """Return the device that JAX puts arrays on here, and its architecture."""
    kind = kind_of(_default_device())
    return kind, arch_of(kind)


def described(x: Any) -> Described | None:
    """Return what an array of JAX is; None for what is none."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        return None
    return Described(tuple(x.shape), x.dtype.name, device_of(x))

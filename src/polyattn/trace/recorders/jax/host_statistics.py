"""A tensor's statistics on the CPU: the native kernel reads it where XLA has it, once.

XLA calls `_handle` through its foreign function interface, whose C structures (of version 0.3, in
jaxlib's ``xla/ffi/api/c_api.h``) are written down here. XLA refuses what is of a version that it
does not know, and :func:`ready` tries it once; where it does not work, the statistics are computed
by XLA itself (``device_statistics``).
"""

from __future__ import annotations

import ctypes as c
import functools
import logging
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.backend import backends

from polyattn.jax.kit.varying import struct_like
from polyattn.trace.statistics.schema import ELEMENTS, PLACES, WIDTH

__all__ = ["ELEMENT_CODES", "WORDS", "host_vector", "ready", "threads_for"]

logger = logging.getLogger("polyattn.trace")

WORDS = 2 * WIDTH
"""The integers of the vector, which is a row of float64 numbers."""

_TARGET = "polyattn_trace_statistics"
_VERSION = 0, 3
_EXECUTE, _METADATA = 3, 1
_MANY = 1 << 20
ELEMENT_CODES = {name: code for code, name in enumerate(ELEMENTS)}
ELEMENT_CODES["bool"] = ELEMENT_CODES["uint8"]
"""The native kernel's codes of the dtypes that it reads."""
_OF_XLA = {
    11: "float32", 16: "bfloat16", 10: "float16", 12: "float64", 2: "int8", 6: "uint8", 1: "bool",
    3: "int16", 4: "int32", 5: "int64",
}  # fmt: skip
"""Dtypes by XLA's codes."""

_Number = c.c_int64
_Size, _Pointer = c.c_size_t, c.c_void_p


class _Buffer(c.Structure):
    _fields_ = (("size", _Size), ("extension", _Pointer), ("dtype", c.c_int), ("data", _Pointer),
                ("rank", _Number), ("dims", c.POINTER(_Number)))  # fmt: skip


class _Several(c.Structure):
    """Arguments, results or attributes."""

    _fields_ = (("size", _Size), ("extension", _Pointer), ("count", _Number), ("types", _Pointer),
                ("items", c.POINTER(c.POINTER(_Buffer))))  # fmt: skip


class _Version(c.Structure):
    _fields_ = (("size", _Size), ("extension", _Pointer), ("major", c.c_int), ("minor", c.c_int))


class _Metadata(c.Structure):
    _fields_ = (("size", _Size), ("version", _Version), ("traits", c.c_uint32))


class _Extension(c.Structure):
    _fields_ = (
        ("size", _Size),
        ("type", c.c_int),
        ("next", _Pointer),
        ("metadata", c.POINTER(_Metadata)),
    )


class _Frame(c.Structure):
    _fields_ = (("size", _Size), ("extension", c.POINTER(_Extension)), ("api", _Pointer),
                ("context", _Pointer), ("stage", c.c_int), ("arguments", _Several),
                ("results", _Several))  # fmt: skip


def _handle(pointer: Any) -> None:
    """Fill the result with the statistics of the argument; NaN where that fails, never raising."""
    frame = pointer.contents
    if frame.extension and frame.extension.contents.type == _METADATA:
        version = frame.extension.contents.metadata.contents.version
        version.major, version.minor = _VERSION
        return
    if frame.stage != _EXECUTE or frame.results.count != 1 or frame.arguments.count != 1:
        return
    argument = frame.arguments.items[0].contents
    out = frame.results.items[0].contents.data
    try:
        _measure(argument, out)
    except Exception as error:
        logger.error("the statistics of a tensor were lost: %s", error)
        c.memset(out, 0xFF, 4 * WORDS)  # NaN


def _measure(argument: Any, out: int) -> None:
    sizes = tuple(argument.dims[: argument.rank])
    strides, step = [0] * len(sizes), 1
    for dim in reversed(range(len(sizes))):
        strides[dim], step = step, step * sizes[dim]
    threads = threads_for(step)
    kernel, isa = _kernel()
    element = ELEMENT_CODES[_OF_XLA[argument.dtype]]
    kernel(isa, threads, element, argument.data, sizes, tuple(strides), out)


@functools.cache
def _kernel() -> tuple[Any, int]:
    from polyattn.native import module
    from polyattn.trace.statistics import extension

    return extension.load().statistics, module.isa_index()


def threads_for(elements: int) -> int:
    """Return how many threads are to read so many elements."""
    return _threads() if elements >= _MANY else 1


@functools.cache
def _threads() -> int:
    here = getattr(os, "sched_getaffinity", None)
    return min(len(here(0)) if here else os.cpu_count() or 1, 64)


_handler = c.CFUNCTYPE(_Pointer, c.POINTER(_Frame))(_handle)
"""It has to live as long as XLA may call it. What it returns, a null pointer, is "no error"."""


def ready(dtype: Any) -> bool:
    """Whether :func:`host_vector` takes arrays of this dtype here: every device is a CPU."""
    return np.dtype(dtype).name in ELEMENT_CODES and _works()


@functools.cache
def _works() -> bool:
    try:
        if set(backends()) != {"cpu"}:
            return False
        _kernel()
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_handler), platform="cpu")
        with jax.ensure_compile_time_eval():
            found = np.asarray(host_vector(jnp.asarray([3.0, -4.0, 0.0], jnp.float32)))
        at = [PLACES[name] for name in ("n", "zero", "l2")]
        return found.view(np.float64)[at].tolist() == [3.0, 1.0, 5.0]
    except Exception as error:
        logger.debug("XLA computes the statistics itself: %s", error)
        return False


@jax.custom_jvp
def host_vector(x: Array) -> Array:
    """Return what the kernel says of `x`, as one vector of int32; for :func:`ready` dtypes."""
    call: Any = jax.ffi.ffi_call(_TARGET, struct_like(x, (WORDS,), jnp.int32))
    return call(x)


@host_vector.defjvp
def _nothing_to_differentiate(primals: Any, tangents: Any) -> Any:
    del tangents
    return host_vector(*primals), np.zeros(WORDS, jax.dtypes.float0)

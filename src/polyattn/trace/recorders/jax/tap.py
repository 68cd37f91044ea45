"""`tap`: a value passes through unchanged, and is recorded while a trace is active."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from polyattn.errors import TraceError
from polyattn.trace.format.field_checks import LONGEST_TEXT
from polyattn.trace.recorders.jax.active_trace import Active, Tapped, active, deliver, deliver_part
from polyattn.trace.recorders.jax.device_statistics import supported, vector
from polyattn.trace.recorders.jax.host_statistics import host_vector, ready
from polyattn.trace.recorders.jax.native_taps import told_by_native_code

__all__ = ["path_text", "tap"]

_DEFAULTS = {"in": "args[0]", "out": "out", "param": "param"}
_GRADIENTS = {"in": "grad_in", "out": "grad_out"}
_MOST = 2**32
_positions = itertools.count()


def tap(
    x: Any, module: str, phase: str = "out", *, tensor: str | None = None, cls: str = ""
) -> Any:
    """Return `x` as it is; record it as `module`'s input or output while a trace is active.

    `x`: an array or a pytree of them (``out[0]``, ``out.logits``). `phase`: "in", "out" or "param".
    `tensor`: which tensor of these, ``args[0]`` and ``out`` by default. `cls`: the module's class.
    Anywhere in JAX: eager, under ``jit``, ``grad``, ``scan``, ``cond``, ``while_loop``,
    ``checkpoint``; under ``vmap`` the batch is recorded as the first dimension. Inside
    ``shard_map`` each device records its part, in the file of its rank. Without a trace nothing of
    it is in the compiled program. Raises TraceError, under a trace, for what cannot be recorded, as
    inside ``pmap`` without a name.
    """
    run = active()
    if run is None:
        return x
    if phase not in _DEFAULTS or not isinstance(module, str):
        raise TraceError(
            f"got tap({module!r}, {phase!r}), expected a module's name and a phase of "
            f"{', '.join(_DEFAULTS)}; gradients are recorded by trace(..., gradients=True)."
        )
    if not run.wants(module):
        return x
    _check_parts(module)
    name = _DEFAULTS[phase] if tensor is None else tensor
    leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    taken = [
        _leaf(run, leaf, (module, phase, name + path_text(path), cls)) for path, leaf in leaves
    ]
    return jax.tree_util.tree_unflatten(tree, taken)


def path_text(path: Any) -> str:
    """Return the path of a leaf as records write it: ``[0].logits``."""
    return "".join(map(_step, path))


def _step(key: Any) -> str:
    """One step of the path to a leaf as records write it: ``[0]`` or ``.name``."""
    index = getattr(key, "idx", None)
    if index is not None:
        return f"[{index}]"
    return f".{getattr(key, 'name', None) or getattr(key, 'key', key)}"


def _check_parts(module: str) -> None:
    """Raise where a tap sees a device's part, and nobody can say of which device."""
    mesh = jax.sharding.get_abstract_mesh()
    parts = mesh.manual_axes
    if any(str(axis).startswith("_") for axis in parts):
        raise TraceError(
            f"got the tap {module!r} inside pmap without an axis's name, where it sees one "
            "device's part; give pmap an axis_name, or tap the whole value outside of it."
        )
    whole = [axis for axis in mesh.axis_names if axis not in parts and mesh.shape[axis] > 1]
    if parts and whole:
        raise TraceError(
            f"got the tap {module!r} inside shard_map over {tuple(parts)}, where {tuple(whole)} "
            "of the mesh stay with the compiler, expected all axes of the mesh; tap the whole "
            "value outside of it."
        )


def _leaf(run: Active, x: Any, place: tuple[str, str, str, str]) -> Any:
    if not isinstance(x, jax.Array) and not hasattr(x, "__array__"):
        return x
    if not supported(x.dtype):
        raise TraceError(f"got the tap {place[0]!r} of dtype {x.dtype}, expected numbers.")
    if len(max(place, key=len)) > LONGEST_TEXT:
        raise TraceError(
            f"got a tap of {place[0][:60]!r} with a name of {len(max(place, key=len))} characters, "
            f"expected at most {LONGEST_TEXT} of the module, the tensor's path and the class."
        )
    _record(run, lax.stop_gradient(x), place)
    module, phase, name, cls = place
    if run.gradients and phase in _GRADIENTS and jnp.issubdtype(x.dtype, jnp.inexact):
        return _with_gradient(run, (module, _GRADIENTS[phase], name, cls))(x)
    return x


def _record(run: Active, x: Any, place: tuple[str, str, str, str]) -> None:
    position = next(_positions)

    @custom_vmap
    def record(value: jax.Array) -> tuple[()]:
        _send(run, value, Tapped(*place, tuple(value.shape), value.dtype, position))
        return ()

    @record.def_vmap
    def batched(size: int, is_batched: Any, value: jax.Array) -> tuple[Any, Any]:
        return record(value), ()

    record(x)


def _send(run: Active, value: jax.Array, tapped: Tapped) -> None:
    size = math.prod(tapped.shape)
    if 2 * size >= _MOST:
        raise TraceError(
            f"got the tap {tapped.module!r} of {size} elements, expected less than 2**31: tap "
            "slices of it by names of their own."
        )
    mesh = jax.typeof(value).sharding.mesh
    if mesh.are_all_axes_explicit:  # where every reshape would have to say how it is sharded
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        value = jax.sharding.reshard(value, whole)
    parts = jax.sharding.get_abstract_mesh().manual_axes
    if not parts:
        send = partial(_send_by_callback, run.slot, tapped, run.ordered)
        if not size or not told_by_native_code(value, run.slot, tapped, run.ordered, send):
            send(value)
        return
    rank, world = lax.axis_index(tuple(parts)), math.prod(map(lax.axis_size, parts))
    send_part = partial(deliver_part, run.slot, tapped, world)
    jax.debug.callback(send_part, rank, _vector(value), ordered=False)  # no order over devices


def _send_by_callback(slot: int, tapped: Tapped, ordered: bool, value: jax.Array) -> None:
    jax.debug.callback(partial(deliver, slot, tapped), _vector(value), ordered=ordered)


def _vector(value: jax.Array) -> jax.Array:
    if not value.size:
        return jnp.zeros(0, jnp.int32)
    return host_vector(value) if ready(value.dtype) else vector(value)


def _with_gradient(run: Active, place: tuple[str, str, str, str]) -> Callable[[Any], Any]:
    """The identity, whose gradient is recorded on its way back."""

    @jax.custom_vjp
    def same(x: Any) -> Any:
        return x

    def backward(_: None, gradient: Any) -> tuple[Any]:
        _record(run, lax.stop_gradient(gradient), place)
        return (gradient,)

    same.defvjp(lambda x: (x, None), backward)
    return same

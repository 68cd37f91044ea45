"""Taps of compiled programs that run no Python: native code reads a tensor and queues its numbers.

In a program on one CPU device a tap is a primitive of its own, lowered to a handler of XLA's
foreign function interface (``native/src/taps.h``). It has the effects of `jax.debug.callback`, the
ordered one where the trace has an order: so JAX keeps it where it keeps a callback, hands a token
from one to the next, and `jax.effects_barrier` waits for both. Everywhere else (several devices,
other platforms, what native code does not read) it is that callback.

This is the one place of the recorder that names something private of JAX: these two effects, and
the type of tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import secrets
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir

from polyattn.trace.recorders.jax.active_trace import Rank, Tapped
from polyattn.trace.recorders.jax.host_statistics import ELEMENT_CODES, ready, threads_for
from polyattn.trace.statistics import extension

__all__ = ["place_of", "tapped_at", "told_by_native_code", "works"]

logger = logging.getLogger("polyattn.trace")

_TARGET = "polyattn_trace_tap"
_lock = threading.Lock()
_places: list[tuple[Tapped, int]] = []


@functools.cache
def place_of(tapped: Tapped, world: int = 0) -> int:
    """Return a number that stands for the place, in compiled programs of this process too.

    `world`: how many devices have a part each, 0 where there are no parts.
    """
    with _lock:
        _places.append((tapped, world))
        return len(_places) - 1


def tapped_at(place: int, rank: int) -> tuple[Tapped, Rank | None]:
    """Return the place, and of which device a part is; `rank` is negative where it is no part."""
    tapped, world = _places[place]
    return tapped, None if rank < 0 else Rank(rank, world)


def told_by_native_code(
    value: jax.Array, slot: int, tapped: Tapped, ordered: bool, by_callback: Callable[[Any], None]
) -> bool:
    """Record `value` for the trace in `slot`, and return whether that could be said.

    `by_callback` records it where the program is not for one CPU device.
    """
    if not (isinstance(value, jax.core.Tracer) and ready(value.dtype) and works()):
        return False
    effect = _effects()[ordered]
    place = place_of(tapped)
    _tap().bind(value, slot=slot, place=place, effect=effect, by_callback=by_callback)
    return True


@functools.cache
def _effects() -> tuple[Any, Any]:
    from jax._src import debugging

    return debugging.debug_effect, debugging.ordered_debug_effect


@functools.cache
def _type_of_tokens() -> Any:
    from jax._src import core

    return core.abstract_token


@functools.cache
def _session() -> int:
    return secrets.randbits(62)


@functools.cache
def _tap() -> Any:
    """Return the primitive."""
    primitive = Primitive("polyattn_tap")
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(lambda x, *, effect, **_: ([], {effect}))
    primitive.def_impl(lambda x, *, by_callback, **_: by_callback(x) or [])

    def pushed_forward(primals: Any, tangents: Any, **options: Any) -> Any:
        return primitive.bind(*primals, **options), []

    ad.primitive_jvps[primitive] = pushed_forward
    mlir.register_lowering(primitive, _lowered_to_callback)
    mlir.register_lowering(primitive, _lowered, platform="cpu")
    return primitive


def _lowered_to_callback(ctx: Any, x: Any, *, by_callback: Any, **_: Any) -> Any:
    def call(value: Any) -> tuple[()]:
        by_callback(value)
        return ()

    return mlir.lower_fun(call, multiple_results=True)(ctx, x)


def _lowered(ctx: Any, x: Any, **options: Any) -> Any:
    if not _is_of_one_device(ctx.module_context.axis_context):
        return _lowered_to_callback(ctx, x, **options)
    effect, (aval,) = options["effect"], ctx.avals_in
    element = ELEMENT_CODES[np.dtype(aval.dtype).name]
    numbers = np.array(
        [options["slot"], options["place"], _isa(), threads_for(aval.size), element, _session()],
        np.int64,
    )
    lower: Any = jax.ffi.build_ffi_lowering_function(_TARGET, has_side_effect=True)
    if effect is not _effects()[True]:
        lower(ctx, x, tap=numbers)
        return []
    token = _type_of_tokens()
    inner = dataclasses.replace(ctx, avals_in=[token, aval], avals_out=[token])
    made = lower(inner, ctx.tokens_in.get(effect), x, tap=numbers)
    tokens = mlir.TokenSet({effect: made.results[0]})
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(tokens))
    return []


def _is_of_one_device(context: Any) -> bool:
    devices = getattr(context, "num_devices", None)
    if isinstance(context, mlir.ShardingContext):
        return devices == 1
    return not isinstance(context, mlir.SPMDAxisContext)


def _isa() -> int:
    from polyattn.native import module

    return module.isa_index()


@functools.cache
def works() -> bool:
    """Whether a program tells what it is to, here; tried once."""
    try:
        native = extension.load()
        handler = native.tap_handler(_session())
        jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")
        taps = native.TraceTaps(-1, 4)
        never: Any = functools.partial(_refuse)

        def program(x: Any) -> Any:
            for place in (0, 1):
                options = {"slot": -1, "place": place, "effect": _effects()[True]}
                _tap().bind(x + place, by_callback=never, **options)
            return x

        with jax.ensure_compile_time_eval():
            x = jnp.asarray([3.0, -4.0, 0.0], jnp.float32)
        jax.block_until_ready(jax.jit(program)(x))
        jax.effects_barrier()
        found = taps.take(0.0)
        taps.end()
        return [place for place, _, _ in found] == [0, 1]
    except Exception as error:
        logger.debug("taps are callbacks: %s", error)
        return False


def _refuse(_: Any) -> None:
    raise RuntimeError("got a program for several devices, expected one")

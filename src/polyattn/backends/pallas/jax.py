"""The kernel as a backend: layouts, padding to whole tiles, the rule for reverse mode.

Where something is not finite, both passes run a variant of the kernel that lets it reach the rows
that see it; the other one is what is fast. Reverse mode only: for more ask for `jax_reference`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.backends.pallas.backward import Incoming, gradients_of_keys, gradients_of_rows
from polyattn.backends.pallas.forward import attend
from polyattn.backends.pallas.lowering import Machine, head_size, tiling
from polyattn.backends.pallas.tiles import LOG2E, Call
from polyattn.backends.pallas.visits import Shown, lists_of, padded_to
from polyattn.jax.kit.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.jax.kit.masking import Dims
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.kit.reverse_only import reverse_only
from polyattn.jax.kit.seen_ranges import block_maps, ranges_of
from polyattn.masks import Mask
from polyattn.problem import Problem

__all__ = ["load"]

Array: TypeAlias = jax.Array


class _Static(NamedTuple):
    """What a call is beside its arrays; hashable."""

    device: str
    scale: float
    softcap: float | None
    config: tuple[tuple[str, Any], ...]


class _Extras(NamedTuple):
    """What is beside q, k and v: a pytree."""

    mask: Mask | None
    sinks: Any


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale
    static = _Static(problem.device, scale, problem.softcap, tuple(sorted(config.items())))

    def kernel(
        q: Array, k: Array, v: Array, mask: Any = None, bias: Any = None, sinks: Any = None,
        dropout_key: Any = None,
    ) -> Any:  # fmt: skip
        q, k, v = (to_bnth(x, problem.layout) for x in (q, k, v))
        given = q, k, v, _Extras(mask, sinks)
        out, lse = _attention(static, *reverse_only("pallas", given))
        out = from_bnth(out, problem.layout)
        return (out, lse_from_bnt(lse, problem.layout)) if problem.lse else out

    return kernel


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(static: _Static, q: Array, k: Array, v: Array, extras: _Extras) -> Any:
    """Return out (B, N, T, V) in the dtype of q, and lse (B, N, T) float32."""
    out, lse, _ = _run(static, q, k, v, extras)
    return out, lse


def _forward(static: _Static, q: Array, k: Array, v: Array, extras: _Extras) -> Any:
    out, lse, finite = _run(static, q, k, v, extras)
    return (out, lse), (q, k, v, extras, out, lse, finite)


def _run(static: _Static, q: Array, k: Array, v: Array, extras: _Extras) -> Any:
    dims = Dims.of(q, k)
    call, shown, arrays = _laid_out(static, q, k, v, extras.mask, backward=False)
    sinks = _one_sink(extras.sinks)
    finite = jnp.isfinite(q).all() & jnp.isfinite(k).all() & jnp.isfinite(v).all()

    run, careful = _both(attend, call)
    out, lse = jax.lax.cond(finite, run, careful, *arrays, sinks, shown)
    return out[:, :, : dims.q_len, : v.shape[-1]], lse[:, :, : dims.q_len], finite


def _backward(static: _Static, kept: Any, given: tuple[Array, Array]) -> Any:
    q, k, v, extras, out, lse, finite = kept
    dout, dlse = given
    wide = jnp.float32
    delta = (dout.astype(wide) * out.astype(wide)).sum(-1) - dlse.astype(wide)
    found = []
    for gradients, by_keys in ((gradients_of_rows, False), (gradients_of_keys, True)):
        call, shown, arrays = _laid_out(
            static, q, k, v, extras.mask, backward=True, by_keys=by_keys
        )
        come = Incoming(
            _whole_tiles(call, dout, call.tiling.q),
            *(padded_to(x, call.tiling.q, 2) for x in (lse, delta)),
        )
        run, careful = _both(gradients, call)
        found.append(jax.lax.cond(finite, run, careful, *arrays, come, shown))
    (dq, sums), (dk, dv) = found
    dq, dk, dv = (
        new[:, :, : x.shape[2], : x.shape[3]]
        for new, x in zip((dq, dk, dv), (q, k, v), strict=True)
    )
    delta = sums[:, :, : lse.shape[2]] - dlse.astype(wide)
    return dq, dk, dv, _Extras(None, _of_sinks(extras.sinks, lse, delta))


def _both(function: Callable[..., Any], call: Call) -> tuple[Callable[..., Any], ...]:
    """Return the fast variant of a pass, and the one for what is not finite."""
    return tuple(functools.partial(function, call._replace(careful=one)) for one in (False, True))


_attention.defvjp(own_promotion(_forward), own_promotion(_backward))


def _laid_out(
    static: _Static, q: Array, k: Array, v: Array, mask: Mask | None, *, backward: bool,
    by_keys: bool = False,
) -> tuple[Call, Shown | None, tuple[Array, Array, Array]]:  # fmt: skip
    """Return the call, its mask and its arrays for one pass, in whole tiles."""
    machine, dims = Machine(static.device), Dims.of(q, k)
    tile = tiling(
        machine, dict(static.config), (dims.q_len, dims.kv_len), q.shape[-1], block_maps(mask),
        backward,
    )  # fmt: skip
    shown = None
    if mask is not None or dims.kv_len % tile.k:
        ranges = ranges_of(mask, dims)
        shown = lists_of(ranges, tile.q, tile.k, dims.kv_len, by_keys=by_keys)
    call = Call(
        machine, dims.heads, dims.kv_heads, static.scale, static.softcap, tile,
        shown is not None, 0 if shown is None else len(shown.ids),
    )  # fmt: skip
    sizes = (tile.q, tile.k, tile.k)
    q, k, v = (_whole_tiles(call, x, size) for x, size in zip((q, k, v), sizes, strict=True))
    return call, shown, (q, k, v)


def _whole_tiles(call: Call, x: Array, rows: int) -> Array:
    return padded_to(padded_to(x, rows, 2), head_size(call.machine, x.shape[-1]), 3)


def _one_sink(sinks: Any) -> Any:
    """Return the sinks of each head as one logit, (N,) float32."""
    if sinks is None:
        return None
    return jax.nn.logsumexp(sinks.astype(jnp.float32).reshape(sinks.shape[0], -1), -1)


def _of_sinks(sinks: Any, lse: Array, delta: Array) -> Any:
    """Return -sum over rows of exp(sink - lse) * delta, in the shape and dtype of the sinks."""
    if sinks is None:
        return None
    logits = sinks.astype(jnp.float32).reshape(sinks.shape[0], -1)

    def one(logit: Array) -> Array:  # a sink at a time: no array larger than the lse
        shares = jnp.where(lse == -jnp.inf, 0, jnp.exp2((logit[None, :, None] - lse) * LOG2E))
        return -(shares * delta).sum((0, 2))

    total = jnp.stack([one(logits[:, m]) for m in range(logits.shape[-1])], -1)
    return total.reshape(sinks.shape).astype(sinks.dtype)

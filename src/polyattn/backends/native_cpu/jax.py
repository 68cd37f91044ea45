"""The C++ kernels for JAX, through XLA's foreign function interface: no Python and no copies.

The kernels are handlers that compiled code calls, so this works wherever JAX compiles: under jit,
scan, shard_map. Reverse mode has the backward kernel; vmap calls one entry after the other, each
on all threads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.backends.native_cpu.jax_lost_sums import defined_gradients, meets_lost_sums
from polyattn.errors import Unsupported
from polyattn.jax.kit.layouts import to_bnth
from polyattn.jax.kit.masking import Dims, allowed, expand_blocks, narrowed
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.kit.reverse_only import reverse_only
from polyattn.jax.kit.varying import as_varying, struct_like
from polyattn.masks import Mask
from polyattn.masks.biases import Alibi, Bias
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.native.program import Program, dense_program, encode
from polyattn.problem import Problem
from polyattn.problem.processor import processors_usable

__all__ = ["load"]

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
LAYOUTS = {"BTNH": 0, "BNTH": 1, "packed": 2}
_FORWARD, _BACKWARD = "polyattn_forward", "polyattn_backward"
_MOST_THREADS = 1024  # the kernels' own limit
Array: TypeAlias = jax.Array
Maybe: TypeAlias = Array | None


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Register the handlers; return `prepare`, as :class:`polyattn.registry.Backend` has it."""
    _register()
    return _prepare


@functools.cache
def _register() -> None:
    forward, backward = module.load().xla_handlers()
    jax.ffi.register_ffi_target(_FORWARD, forward, platform="cpu")
    jax.ffi.register_ffi_target(_BACKWARD, backward, platform="cpu")


class _Static(NamedTuple):
    """What a call is beside its arrays; hashable."""

    layout: str
    dtype: str
    isa: str
    threads: int
    scale: float
    softcap: float
    codes: tuple[int, ...]
    bias: int  # 0 none, 1 dense, 2 slopes
    value_dim: int

    def attributes(self, sinks: Maybe) -> dict[str, Any]:
        """Return the attributes that the handlers read (native/src/xla.cpp)."""
        heading = DTYPES[self.dtype], LAYOUTS[self.layout], self.threads, self.bias
        numbers = (*heading, int(sinks is not None), *self.codes)
        return {
            "call": np.array(numbers, np.int64),
            "scales": np.array((self.scale, self.softcap), np.float64),
            "isa": self.isa,
        }


class _Arrays(NamedTuple):
    """The arrays of a call, as the kernels read them."""

    q: Array
    k: Array
    v: Array
    masks: tuple[Maybe, ...]  # None: of gradients
    bias: Maybe  # (., ., ., .), or slopes (B|1, N) float32
    sinks: Maybe  # (N, M) float32

    def given(self) -> list[Array]:
        rest = [x for x in (self.bias, self.sinks) if x is not None]
        return [self.q, self.k, self.v, *self.masks, *rest]


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    scale = problem.head_dim**-0.5 if problem.scale is None else problem.scale

    def kernel(
        q: Array,
        k: Array,
        v: Array,
        mask: Mask | None = None,
        bias: Bias | None = None,
        sinks: Maybe = None,
        dropout_key: Any = None,
    ) -> Any:
        dtype = q.dtype
        if _wants_wide(problem, bias, sinks):
            q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        program, masks = _program(mask, q, k, problem)
        sequences = problem.batch if problem.layout == "packed" else 1
        place = isa_for(
            DTYPES[q.dtype.name], problem.q_len, problem.heads, problem.kv_heads, sequences
        )
        static = _Static(
            problem.layout, q.dtype.name, module.isas()[place],
            min(processors_usable(), _MOST_THREADS), scale, problem.softcap or 0.0, program.codes,
            0 if bias is None else 2 if isinstance(bias, Alibi) else 1, problem.value_dim,
        )  # fmt: skip
        arrays = as_varying(_Arrays(q, k, v, masks, _bias(bias), _sinks(sinks)), q, k, v)
        arrays = reverse_only("native_cpu", arrays)
        if not problem.lse:
            return _attend(static, arrays).astype(dtype)
        out, lse = _attend_with_lse(static, arrays)
        return out.astype(dtype), lse

    return kernel


def _wants_wide(problem: Problem, bias: Bias | None, sinks: Maybe) -> bool:
    """Say whether a gradient is wanted in more digits than outputs in the call's dtype have.

    The gradients of bias and sinks are made of row sums of dout * out, so `out` may not be rounded
    to a half type where they are float32: such problems run in float32.
    """
    size = jnp.dtype(problem.dtype).itemsize
    learnt = [bias.payload if problem.bias_grad and bias is not None else None]
    learnt.append(sinks if problem.sinks_grad else None)
    return any(x is not None and x.dtype.itemsize > size for x in learnt)


def _program(
    mask: Mask | None, q: Array, k: Array, problem: Problem
) -> tuple[Program, tuple[Array, ...]]:
    """Return the program of a mask and its arrays; what has none becomes a dense mask."""
    if mask is None:
        return Program((), ()), ()
    program = encode(mask)
    if program is None:
        dims = Dims.of(to_bnth(q, problem.layout), to_bnth(k, problem.layout))
        program = dense_program(allowed(mask, dims))
    return program, tuple(_payload(role, x, problem.kv_len) for role, x in program.arrays)


def _payload(role: str, value: Any, kv_len: int) -> Array:
    if role == "integers":
        return jnp.asarray(value)
    if role == "bits":
        value = expand_blocks(value, kv_len).bits  # type: ignore[attr-defined]
    value = jnp.asarray(value)
    return value.reshape((1,) * (4 - value.ndim) + value.shape)


def _bias(bias: Bias | None) -> Maybe:
    if bias is None:
        return None
    array = bias.payload
    if isinstance(bias, Alibi):
        return array.astype(jnp.float32).reshape(-1 if array.ndim == 2 else 1, array.shape[-1])
    array = array if array.dtype.name in DTYPES else narrowed(array, jnp.float32)
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _sinks(sinks: Maybe) -> Maybe:
    return None if sinks is None else sinks.astype(jnp.float32).reshape(sinks.shape[0], -1)


def _call(static: _Static, arrays: _Arrays, with_lse: bool) -> tuple[Array, ...]:
    out = struct_like(arrays.q, (*arrays.q.shape[:-1], static.value_dim))
    results = (out, _sums_like(static, arrays.q)) if with_lse else (out,)
    run = jax.ffi.ffi_call(_FORWARD, results, vmap_method="sequential")
    run = functools.partial(run, **static.attributes(arrays.sinks))
    return tuple(_foreign(run, *arrays.given()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _foreign(run: Callable[..., Any], *arrays: Array) -> Any:
    """Call a kernel, which has no derivative that JAX could take: ours is of the whole call."""
    return run(*arrays)


def _refuse(run: Callable[..., Any], primals: Any, tangents: Any) -> Any:
    raise Unsupported(
        "got a derivative of a derivative of attention on native_cpu, whose kernels have the first "
        "alone, expected a backend of plain JAX: backend='jax_reference' or 'jax_xla'."
    )


_foreign.defjvp(_refuse)


def _sums_like(static: _Static, q: Array) -> jax.ShapeDtypeStruct:
    """Describe one float32 for each query: (B, N, T), or (N, total) when packed."""
    if static.layout == "packed":
        return struct_like(q, (q.shape[1], q.shape[0]), jnp.float32)
    b, n, t = (0, 2, 1) if static.layout == "BTNH" else (0, 1, 2)
    return struct_like(q, (q.shape[b], q.shape[n], q.shape[t]), jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, arrays: _Arrays) -> Array:
    return _call(static, arrays, False)[0]


def _attend_fwd(static: _Static, arrays: _Arrays) -> tuple[Array, Any]:
    out, lse = _call(static, arrays, True)
    return out, (arrays, out, lse)


def _attend_bwd(static: _Static, kept: Any, dout: Array) -> tuple[Any]:
    return _gradients(static, kept, dout, None)


_attend.defvjp(own_promotion(_attend_fwd), own_promotion(_attend_bwd))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_with_lse(static: _Static, arrays: _Arrays) -> tuple[Array, Array]:
    out, lse = _call(static, arrays, True)
    return out, lse


def _with_lse_fwd(static: _Static, arrays: _Arrays) -> tuple[tuple[Array, Array], Any]:
    out, lse = _call(static, arrays, True)
    return (out, lse), (arrays, out, lse)


def _with_lse_bwd(static: _Static, kept: Any, given: tuple[Array, Array]) -> tuple[Any]:
    return _gradients(static, kept, *given)


_attend_with_lse.defvjp(own_promotion(_with_lse_fwd), own_promotion(_with_lse_bwd))


def _gradients(static: _Static, kept: Any, dout: Array, dlse: Maybe) -> tuple[Any]:
    """Return the gradients of the arrays; masks have none, slopes none that the kernel computes."""
    arrays, _, lse = kept
    if static.bias != 1:
        return (_by_kernel(static, kept, dout, dlse),)
    dense = jax.lax.cond(
        meets_lost_sums(dout, dlse, lse, static.layout),
        lambda: _by_definition(static, arrays, dout, dlse),
        lambda: _by_kernel(static, kept, dout, dlse),
    )
    return (dense,)


def _by_definition(static: _Static, arrays: _Arrays, dout: Array, dlse: Maybe) -> _Arrays:
    dq, dk, dv, dbias, dsinks = defined_gradients(
        arrays, dout, dlse, static.codes,
        layout=static.layout, scale=static.scale, softcap=static.softcap or None,
    )  # fmt: skip
    return _Arrays(dq, dk, dv, tuple(None for _ in arrays.masks), dbias, dsinks)


def _by_kernel(static: _Static, kept: Any, dout: Array, dlse: Maybe) -> _Arrays:
    arrays, out, lse = kept
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    delta = delta if static.layout == "BNTH" else jnp.swapaxes(delta, -1, -2)
    delta = delta if dlse is None else delta - dlse
    results = [struct_like(x) for x in (arrays.q, arrays.k, arrays.v)]
    if arrays.bias is not None and static.bias == 1:
        results.append(struct_like(arrays.bias, dtype=jnp.float32))
    run = jax.ffi.ffi_call(_BACKWARD, results, vmap_method="sequential")
    run = functools.partial(run, **static.attributes(arrays.sinks))
    dq, dk, dv, *rest = _foreign(run, *arrays.given(), lse, dout, delta)
    dbias = rest[0].astype(arrays.bias.dtype) if rest else None
    dsinks = None if arrays.sinks is None else _sinks_gradient(static, arrays.sinks, lse, delta)
    return _Arrays(dq, dk, dv, tuple(None for _ in arrays.masks), dbias, dsinks)


def _sinks_gradient(static: _Static, sinks: Array, lse: Array, delta: Array) -> Array:
    """Return -sum over queries of exp(sink - lse) * delta, (N, M) float32."""
    if static.layout == "packed":
        lse, delta = lse[None], delta[None]

    def one(logits: Array) -> Array:  # a sink at a time: no array larger than the lse
        shares = jnp.exp(logits[None, :, None] - lse)
        shares = jnp.where(lse == -jnp.inf, 0.0, shares)  # no key, and sinks of -inf
        return -(shares * delta).sum((0, 2))

    return jnp.stack([one(sinks[:, i]) for i in range(sinks.shape[1])], 1)

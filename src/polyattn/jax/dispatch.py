"""The way of a call: admitted, a backend chosen, its kernel prepared, recorded, run.

In traced code all of this happens when it is traced. Kernels of JAX backends are
``kernel(q, k, v, mask, bias, sinks, dropout_key)``, of paged keys also with ``(block_table,
lengths)``; JAX differentiates them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.errors import InvalidProblem, Unsupported
from polyattn.jax import context
from polyattn.jax.admission import Call, admit
from polyattn.jax.differentiation import asked_twice, is_traced, trained
from polyattn.jax.kit.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.kit.varying import as_varying
from polyattn.masks.biases import Bias
from polyattn.problem import Problem
from polyattn.selection import scopes
from polyattn.selection.prepare import Plan, kernel_of, prepare
from polyattn.selection.registry import Backend, registry
from polyattn.selection.requests import Request
from polyattn.selection.wishes import Wishes, current_wishes

__all__ = ["admitted", "plan_for", "run"]

Kernel = Callable[..., Any]
Sizes = tuple[tuple[str, int], ...]


def admitted(q: Any, k: Any, v: Any, dropout_key: Any, options: dict[str, Any]) -> Call:
    """Check a call; raise :class:`InvalidProblem` for what is none."""
    call = admit(q, k, v, **options)
    if call.problem.dropout_p > 0 and dropout_key is None:
        raise InvalidProblem(
            f"got dropout_p={call.problem.dropout_p} without dropout_key, expected a key of "
            "jax.random: JAX has no state that random numbers could come from."
        )
    if call.problem.dropout_p > 0:
        _check_key(dropout_key)
    return call


def _check_key(key: Any) -> None:
    """Raise :class:`InvalidProblem` for what is no key, or several."""
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    typed = dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
    # the words of an old key are one dim more than a typed key has
    if shape is not None and (typed or dtype == jnp.uint32) and len(shape) == (0 if typed else 1):
        return
    kind = type(key).__name__ if shape is None else f"{dtype} of shape {tuple(shape)}"
    raise InvalidProblem(
        f"got dropout_key of type {kind}, expected one key of jax.random: make it with "
        "jax.random.key(seed), and take one of several by indexing or jax.vmap."
    )


def plan_for(problem: Problem, backend: Any = None, part: bool = False, sizes: Sizes = ()) -> Plan:
    """Return the plan of a problem under what is asked for here; kept until that changes.

    `part`: whether it is a device's part of a problem whose sequence is spread. What is asked for
    around the call is then meant for the whole, as far as only the whole can be run by it.
    `sizes`: of blocks, by the names that the backend's configurations have.
    """
    names = tuple(backend) if isinstance(backend, (list, tuple)) else backend
    scope = scopes.current_scope()
    return context.settled(lambda now: _plan(problem, names, part, sizes, scope, now))


@functools.lru_cache(maxsize=1024)
def _plan(
    problem: Problem, backend: Any, part: bool, sizes: Sizes, scope: str | None, epoch: str
) -> Plan:
    wishes = current_wishes(backend)
    found = prepare(problem, _of_part(wishes) if part else wishes)
    return _sized(found, problem, sizes) if sizes else found


def _sized(found: Plan, problem: Problem, sizes: Sizes) -> Plan:
    """Return the plan with blocks of these sizes; raise for one that the backend has not."""
    chosen = registry.get(found.selection.backend, problem.framework)
    known = {name for config in registry.configurations(chosen, problem) for name in config}
    for name, size in sizes:
        if name not in known:
            raise InvalidProblem(
                f"got {name}={size} for {chosen.name}, which "
                f"{'has ' + ', '.join(sorted(known)) if known else 'has blocks of its own'}, "
                "expected a backend that takes it, as jax_blockwise: leave the size at its "
                "default, or choose such an implementation."
            )
    selection = replace(found.selection, config={**found.selection.config, **dict(sizes)})
    return Plan(selection, kernel_of(selection, problem))


def _of_part(wishes: Wishes) -> Wishes:
    """Return what is asked for of a part: by name, backends for whole sequences only."""
    spreading = {one.name for one in registry.in_tree("jax") if _spreads(one)}

    def kept(request: Request) -> Request:
        return replace(request, names=tuple(n for n in request.names if n not in spreading))

    return replace(
        wishes, forced=kept(wishes.forced), scope=kept(wishes.scope), env=kept(wishes.env)
    )


def _spreads(backend: Backend) -> bool:
    can = backend.capabilities
    return any(one.spread for one in (can if isinstance(can, tuple) else (can,)))


@functools.lru_cache(maxsize=1024)
def _compiled(kernel: Kernel) -> Kernel:
    """Compile a kernel for calls outside of jit, which would run it one operation at a time."""
    return jax.jit(kernel)  # type: ignore[no-any-return]


@own_promotion
def run(
    call: Call, q: Any, k: Any, v: Any, dropout_key: Any, backend: Any, pages: Any = None,
    part: bool = False, sizes: Sizes = (),
) -> Any:  # fmt: skip
    """Run an admitted call on the backend that is chosen here.

    `pages`: (block_table, lengths) where k and v are pages; kernels get them last. `part`, `sizes`:
    as in :func:`plan_for`.
    """
    context.check()
    _check_numbers(q, k, v, call.sinks)
    plan = plan_for(call.problem, backend, part, sizes)
    for ran in scopes.recording.get(()):
        ran.append(plan.selection)
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    if call.problem.empty:
        return _answer_empty(call.problem, q, k, v, call.sinks)
    choose = functools.partial(plan_for, backend=backend, part=part, sizes=sizes)
    arrays = q, k, v, call.mask, call.bias, call.sinks, pages
    kernel = _kernel(call, plan, choose, is_traced(q, k, v, call.bias, call.sinks))
    q, k, v, mask, bias, sinks, pages = as_varying(arrays, arrays) if is_traced(arrays) else arrays
    more = () if pages is None else (pages,)
    return kernel(q, k, v, mask, bias, sinks, dropout_key, *more)


def _check_numbers(*arrays: Any) -> None:
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in arrays):
        raise InvalidProblem(
            "got a jax.ShapeDtypeStruct, which holds no numbers, expected arrays; call through "
            "jax.eval_shape for shapes of results, or plan or explain, which take such."
        )


def _kernel(
    call: Call, plan: Plan, choose: Callable[[Problem], Plan], is_traced_here: bool
) -> Kernel:
    if not is_traced_here:
        return _compiled(plan.kernel) if plan.is_final else plan.kernel
    problem, bias, sinks = call.problem, is_traced(_payload(call.bias)), is_traced(call.sinks)
    try:
        most = choose(trained(problem, True, bias, sinks))
    except Unsupported:  # which is raised if it is differentiated
        return asked_twice(plan, problem, choose)
    chosen, other = plan.selection, most.selection
    if (chosen.backend, chosen.config) == (other.backend, other.config):
        return most.kernel
    return asked_twice(plan, problem, choose)


def _payload(bias: Bias | None) -> Any:
    return None if bias is None else bias.payload


def _answer_empty(
    problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None
) -> Any:
    """Return zeros and the lse of empty rows; both know the inputs, so that gradients are 0."""
    q4, v4 = to_bnth(q, problem.layout), to_bnth(v, problem.layout)
    out = from_bnth(jnp.zeros((*q4.shape[:3], v4.shape[3]), q.dtype), problem.layout)
    if not problem.lse:
        return out
    wide = jnp.promote_types(q.dtype, jnp.float32)
    lse = jnp.full(q4.shape[:3], -jnp.inf, wide)
    if sinks is not None:
        each = jax.nn.logsumexp(sinks.astype(wide).reshape(1, problem.heads, -1), -1)
        lse = jnp.broadcast_to(each[..., None], q4.shape[:3])
    return out, lse_from_bnt(lse, problem.layout)

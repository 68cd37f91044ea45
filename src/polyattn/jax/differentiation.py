"""Which backend runs a call that is differentiated.

JAX does not say whether a function will be differentiated when it traces it. So both questions
are asked: who runs the call, and who would if all that could be were to be learnt. Where the
answers are one backend, its kernel is called, and everything that JAX does with it works, forward
mode too. Where they differ, JAX's own rule for reverse mode asks again, with what really is
differentiated, and Unsupported is raised there if nobody can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.kit.reverse_only import reverse_only
from polyattn.problem import Problem
from polyattn.selection.prepare import Plan

__all__ = ["asked_twice", "is_traced", "trained"]

Kernel = Callable[..., Any]


def is_traced(*values: Any) -> bool:
    """Whether any array in the values is traced: only then can it be differentiated."""
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree_util.tree_leaves(values))


def trained(problem: Problem, arrays: bool, bias: bool, sinks: bool) -> Problem:
    """Return the problem of a call of which so much is differentiated."""
    return problem.with_(
        grad=arrays,
        bias_grad=bias and problem.bias is not None,
        sinks_grad=sinks and problem.sinks > 0,
    )


def asked_twice(plan: Plan, problem: Problem, choose: Callable[[Problem], Plan]) -> Kernel:
    """Return the kernel of `plan`, and where it is differentiated that of what `choose` gives.

    `choose` gets the problem with what is differentiated, and may raise.
    """

    @jax.custom_vjp
    def call(q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, *rest: Any) -> Any:
        return plan.kernel(q, k, v, mask, bias, sinks, *rest)

    def forward(*primals: Any) -> tuple[Any, Any]:
        moved = [
            any(leaf.perturbed for leaf in jax.tree_util.tree_leaves(x, is_leaf=_is_primal))
            for x in primals
        ]
        q, k, v, mask, bias, sinks, *rest = jax.tree_util.tree_map(
            lambda leaf: leaf.value, primals, is_leaf=_is_primal
        )
        kernel = choose(trained(problem, any(moved[:3]), moved[4], moved[5])).kernel

        def learnt(q: Any, k: Any, v: Any, bias: Any, sinks: Any) -> Any:
            return kernel(q, k, v, mask, bias, sinks, *rest)

        found = jax.vjp(learnt, q, k, v, bias, sinks)
        return found[0], (found[1], (None,) * len(rest))

    def backward(kept: Any, cotangents: Any) -> tuple[Any, ...]:
        pull, others = kept
        dq, dk, dv, dbias, dsinks = pull(jax.tree_util.tree_map(_number, cotangents))
        return dq, dk, dv, None, dbias, dsinks, *others

    call.defvjp(own_promotion(forward), own_promotion(backward), symbolic_zeros=True)
    backend = plan.selection.backend
    return lambda *arrays: call(*reverse_only(backend, arrays))


def _is_primal(x: Any) -> bool:
    return isinstance(x, jax.custom_derivatives.CustomVJPPrimal)


def _number(x: Any) -> Any:
    if isinstance(x, jax.custom_derivatives.SymbolicZero):
        return jnp.zeros(x.shape, x.dtype)
    return x

"""An error in words where forward mode meets a kernel whose gradients are a rule for reverse mode.

JAX takes no derivative forward through ``jax.custom_vjp`` and says no more than that. Arrays pass
through here on their way to such a call: reverse mode goes by, and what would be computed forward
raises, in compiled code when it is compiled. Derivatives of a derivative never come here, since
the arrays of what is differentiated go by as they are.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from polyattn.errors import Unsupported

__all__ = ["RING", "reverse_only"]

RING = "jax_ring"
"""Calls over a mesh axis, which no backend of plain JAX takes."""

T = TypeVar("T")
_arrays, _tangent = Primitive("polyattn_reverse_only"), Primitive("polyattn_forward_mode")
_arrays.multiple_results = True


def reverse_only(backend: str, tree: T) -> T:
    """Return the arrays of `tree`, whose forward derivatives raise :class:`Unsupported`."""
    leaves, structure = jax.tree_util.tree_flatten(tree)
    moved = [i for i, x in enumerate(leaves) if _may_move(x)]
    if not moved:
        return tree
    for i, x in zip(moved, _arrays.bind(*(leaves[i] for i in moved), backend=backend), strict=True):
        leaves[i] = x
    kept: T = jax.tree_util.tree_unflatten(structure, leaves)
    return kept


def _may_move(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer) and jnp.issubdtype(x.dtype, jnp.floating)


def _same(*arrays: Any, backend: str) -> list[Any]:
    return list(arrays)


def _derive(primals: Any, tangents: Any, *, backend: str) -> tuple[list[Any], list[Any]]:
    # the primals without this primitive: an outer derivative is of the rule, not of the call
    moved = [x if type(x) is ad.Zero else _tangent.bind(x, backend=backend) for x in tangents]
    return list(primals), moved


def _refuse(*_: Any, backend: str) -> Any:
    raise Unsupported(
        f"got a forward derivative (jax.jvp, jacfwd, linearize) of attention on {backend}, which "
        "has reverse mode alone (jax.grad, vjp, jacrev), expected a backend of plain JAX, as "
        "backend='jax_reference'"
        + (", outside of spread_sequence and shard_map." if backend == RING else ".")
    )


def _back(cotangent: Any, _: Any, *, backend: str) -> list[Any]:
    return [cotangent]


def _batched(arrays: Any, axes: Any, *, backend: str) -> Any:
    return _arrays.bind(*arrays, backend=backend), axes


_arrays.def_impl(_same)
_arrays.def_abstract_eval(_same)
ad.primitive_jvps[_arrays] = _derive
batching.primitive_batchers[_arrays] = _batched
mlir.register_lowering(_arrays, lambda context, *arrays, backend: arrays)

_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda x, *, backend: x)
# JAX transposes a tangent of reverse mode before it maps it or takes its derivative
ad.primitive_jvps[_tangent] = _refuse
ad.primitive_transposes[_tangent] = _back
batching.primitive_batchers[_tangent] = _refuse
mlir.register_lowering(_tangent, lambda context, x, *, backend: _refuse(backend=backend))

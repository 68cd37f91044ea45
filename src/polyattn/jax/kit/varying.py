"""Over which devices of a mesh values vary, as `jax.shard_map` keeps account of (``check_vma``).

Within it every value has the axes over which devices hold other ones. Operations of JAX see to that
by themselves; loops, conditions, foreign calls and rules for gradients have to be given it.
Source: https://docs.jax.dev/en/latest/notebooks/shard_map.html
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax

__all__ = ["as_varying", "struct_like"]

T = TypeVar("T")


def as_varying(tree: T, *like: Any) -> T:
    """Return the arrays of `tree`, said to vary over every axis over which those of `like` do.

    Where it is differentiated, gradients are summed over the axes that were added.
    """
    axes = frozenset().union(*(_axes(x) for x in jax.tree_util.tree_leaves(like)))
    if not axes:
        return tree
    found: T = jax.tree_util.tree_map(lambda x: _cast(x, axes - _axes(x)), tree)
    return found


def struct_like(
    x: jax.Array, shape: tuple[int, ...] | None = None, dtype: Any = None
) -> jax.ShapeDtypeStruct:
    """Describe an array that varies as `x` does, of its shape and dtype unless others are given."""
    shape, dtype = x.shape if shape is None else shape, x.dtype if dtype is None else dtype
    if not _axes(x):
        return jax.ShapeDtypeStruct(shape, dtype)
    kind: Any = jax.typeof(x)
    name = "manual_axis_type" if hasattr(kind, "manual_axis_type") else "vma"  # before JAX 0.10
    rows = jax.sharding.PartitionSpec(*[None] * len(shape))
    place = jax.sharding.NamedSharding(kind.sharding.mesh, rows)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place, **{name: getattr(kind, name)})


def _axes(x: Any) -> frozenset[Any]:
    kind = jax.typeof(x)
    found = getattr(kind, "manual_axis_type", None)
    return frozenset(getattr(kind, "vma", ()) if found is None else found.varying)


def _cast(x: Any, axes: frozenset[Any]) -> Any:
    if not axes:
        return x
    names = tuple(sorted(axes, key=str))
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, names, to="varying")
    return jax.lax.pvary(x, names)

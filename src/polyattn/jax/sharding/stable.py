"""A spec that keeps some of its axes, and never loses one without a word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.sharding.specs import check_divides, flat, legal

__all__ = ["stable_spec"]


def stable_spec(
    state_ps: PartitionSpec | None = None,
    preserved_indices: Sequence[int] | None = None,
    clone_ps: PartitionSpec | None = None,
    dep: PartitionSpec | bool | None = True,
    tensor: Any = None,
    mesh: Any = None,
) -> PartitionSpec | None:
    """Return `state_ps` with the axes of `preserved_indices` alone; the other dims are replicated.

    `clone_ps`: where the axes of those dims are taken from instead. `dep`: None gives None.
    Without `preserved_indices` it is `state_ps` itself. With a `tensor` and a `mesh`, an axis that
    the mesh lacks or that does not divide its dim is an error, where others drop it silently. An
    axis for two dims is one in any case, and a spec longer than the tensor's rank.

    >>> tuple(stable_spec(PartitionSpec("dp", "sp", "tp"), [0, 2]))
    ('dp', None, 'tp')
    """
    if dep is None or state_ps is None:
        return None
    if preserved_indices is None:
        kept = state_ps
    else:
        source = state_ps if clone_ps is None else clone_ps
        wanted = _checked(preserved_indices, len(state_ps), len(source))
        kept = PartitionSpec(*(source[i] if i in wanted else None for i in range(len(state_ps))))
    kept = legal("the tensor", tuple(kept))
    if tensor is not None and len(kept) > tensor.ndim:
        raise InvalidProblem(
            f"got a spec of {len(kept)} dims, {kept}, for a tensor of shape {tuple(tensor.shape)}, "
            "expected one that is no longer than its rank."
        )
    if mesh is not None:
        for place, axis in enumerate(kept):
            for one in flat(axis):
                if one not in mesh.axis_names:
                    raise InvalidProblem(
                        f"got the axis {one!r} for dim {place}, expected one of the mesh's: "
                        f"{', '.join(mesh.axis_names)}."
                    )
        if tensor is not None:
            check_divides("the tensor", tuple(tensor.shape), kept, mesh)
    return kept


def _checked(indices: Sequence[int], rank: int, cloned: int) -> frozenset[int]:
    found = frozenset(i + rank if i < 0 else i for i in indices)
    for i in found:
        if not 0 <= i < min(rank, cloned):
            raise InvalidProblem(
                f"got preserved_indices={list(indices)}, expected dims of a spec of "
                f"{min(rank, cloned)}."
            )
    return found

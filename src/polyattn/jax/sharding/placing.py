"""Where the arrays of a call lie: put there, and told by the field that holds them."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from polyattn.jax.kit.masking import bind_mask
from polyattn.jax.sharding.axes import Axis
from polyattn.masks import Mask

__all__ = ["in_arrays", "placed", "spec_of"]


def in_arrays(given: dict[str, Any]) -> dict[str, Any]:
    """Return what a call is given beside q, k and v, with lists of its mask as arrays.

    For a list is no leaf, and would be the whole batch's on each device.
    """
    mask = given.get("mask")
    return given | {"mask": bind_mask(mask)} if isinstance(mask, Mask) else given


def placed(mesh: Any, arrays: Any, specs: Any) -> Any:
    """Return arrays that lie as their specs say, where the mesh makes that a part of their type."""
    if not any("Explicit" in str(kind) for kind in getattr(mesh, "axis_types", ())):
        return arrays
    reshard = getattr(jax, "reshard", None) or jax.sharding.reshard
    return jax.tree_util.tree_map(
        lambda x, spec: reshard(x, jax.sharding.NamedSharding(mesh, spec)), arrays, specs
    )


def spec_of(path: Any, x: Any, batch: Axis, head: Axis) -> PartitionSpec:
    """Return where an array of a mask, a bias or the sinks lies: with its batch and its heads.

    Told by the field that holds it: sizes that happen to be equal mean nothing.
    """
    name = str(getattr(path[-1], "name", getattr(path[-1], "key", "")))
    dims: list[Axis] = [None] * x.ndim
    if name in ("q_lengths", "kv_lengths", "lengths", "q_starts", "kv_starts"):
        dims[0] = batch
    elif name in ("q_ids", "kv_ids") and x.ndim == 2:
        dims[0] = batch if x.shape[0] > 1 else None
    elif name in ("mask", "bias"):  # which broadcast to (B, N, T, S)
        for place, axis in ((-4, batch), (-3, head)):
            if x.ndim >= -place and x.shape[place] > 1:
                dims[place] = axis
    elif name in ("indices", "counts", "bits"):
        dims[0], dims[1] = (
            axis if size > 1 else None for axis, size in zip((batch, head), x.shape, strict=False)
        )
    elif name == "slopes":
        dims[-1] = head
        if x.ndim == 2 and x.shape[0] > 1:
            dims[0] = batch
    elif name == "sinks":
        dims[0] = head
    return PartitionSpec(*dims)

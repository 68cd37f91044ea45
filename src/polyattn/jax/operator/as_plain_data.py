"""Values as plain data and back: dtypes, meshes, arrays, partition axes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.jax.sharding.axes import PartitionAxis

__all__ = ["described", "restored"]


def described(value: Any) -> Any:
    """Return plain data for a field of metadata or of an output."""
    if isinstance(value, PartitionAxis):
        return {"axes": value.to_dict()}
    if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        return {"mesh": {name: int(size) for name, size in value.shape.items()}}
    if isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        wide = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
        return {
            "array": wide.ravel().tolist(),
            "shape": list(array.shape),
            "dtype": value.dtype.name,
        }
    return value


def restored(value: Any) -> Any:
    """Undo :func:`described`.

    A mesh comes back over the devices that are here, or as one of shapes alone where they are too
    few: specs need no more.
    """
    if not isinstance(value, dict):
        return value
    if "axes" in value:
        return PartitionAxis.from_dict(value["axes"])
    if "mesh" in value:
        return _mesh(value["mesh"])
    if "array" in value:
        return jnp.asarray(np.array(value["array"]).reshape(value["shape"]), dtype=value["dtype"])
    raise InvalidProblem(
        f"got {sorted(value)}, expected what to_dict() gives of a field: axes, mesh or array."
    )


def _mesh(sizes: dict[str, int]) -> Any:
    names, shape = tuple(sizes), tuple(sizes.values())
    if int(np.prod(shape)) <= jax.device_count():
        return jax.make_mesh(shape, names, devices=jax.devices()[: int(np.prod(shape))])
    return jax.sharding.AbstractMesh(shape, names)

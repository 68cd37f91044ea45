"""Values as plain data and back: dtypes, meshes, arrays, partition axes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem, near_matches
from polyattn.jax.sharding.axes import PartitionAxis

__all__ = ["check_names", "described", "read_fields", "read_json", "restored"]


def described(value: Any) -> Any:
    """Return plain data for a field of metadata or of an output."""
    if isinstance(value, PartitionAxis):
        return {"axes": value.to_dict()}
    if isinstance(value, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
        return {"mesh": _of_mesh(value)}
    if isinstance(value, (jax.Array, np.ndarray)):
        if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == bool) or (
            jnp.issubdtype(value.dtype, jnp.complexfloating)
        ):
            raise InvalidProblem(
                f"got an array of {value.dtype}, expected real numbers: replace(...) it by None "
                "before it is written."
            )
        array = np.asarray(value)
        wide = array.astype(np.float32) if array.dtype == jnp.bfloat16 else array
        return {
            "array": wide.ravel().tolist(),
            "shape": list(array.shape),
            "dtype": value.dtype.name,
        }
    if isinstance(value, Mapping):
        return {"dict": {str(name): described(one) for name, one in value.items()}}
    if isinstance(value, (tuple, list)):
        return [described(one) for one in value]
    if not isinstance(value, (str, int, float, type(None))):
        raise InvalidProblem(
            f"got a field of type {type(value).__name__}, expected plain data, arrays, or a dict "
            "of them: replace(...) it by None before it is written."
        )
    return value


def restored(value: Any) -> Any:
    """Undo :func:`described`.

    A mesh comes back over the devices that it had, or as one of shapes alone where they are not
    here: specs need no more.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(restored(one) for one in value)
    if not isinstance(value, dict):
        return value
    try:
        return _restored(value)
    except InvalidProblem:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidProblem(
            f"got {value!r:.200}, expected what to_dict() gives of a field ({error})."
        ) from error


def _restored(value: dict[str, Any]) -> Any:
    if "dict" in value:
        return {name: restored(one) for name, one in value["dict"].items()}
    if "axes" in value:
        return PartitionAxis.from_dict(value["axes"])
    if "mesh" in value:
        return _mesh(value["mesh"])
    if "array" in value:
        return jnp.asarray(np.array(value["array"]).reshape(value["shape"]), dtype=value["dtype"])
    raise InvalidProblem(
        f"got {sorted(value)}, expected what to_dict() gives of a field: dict, axes, mesh or array."
    )


def _of_mesh(mesh: Any) -> dict[str, Any]:
    devices = None
    if isinstance(mesh, jax.sharding.Mesh):
        devices = [int(device.id) for device in mesh.devices.ravel()]
    types = [kind.name for kind in mesh.axis_types]
    sizes = {name: int(size) for name, size in mesh.shape.items()}
    return {"axes": sizes, "types": types, "devices": devices}


def _mesh(data: Any) -> Any:
    if not isinstance(data, Mapping) or {*data} != {"axes", "types", "devices"}:
        raise InvalidProblem(
            f"got the mesh {data!r}, expected its axes, types and devices, as to_dict() gives them."
        )
    names, shape = tuple(data["axes"]), tuple(data["axes"].values())
    types = tuple(jax.sharding.AxisType[name] for name in data["types"])
    here = {device.id: device for device in jax.devices()}
    if data["devices"] is None or not {*data["devices"]} <= {*here}:
        return jax.sharding.AbstractMesh(shape, names, axis_types=types)
    devices = np.empty(len(data["devices"]), object)
    devices[:] = [here[number] for number in data["devices"]]
    return jax.sharding.Mesh(devices.reshape(shape), names, axis_types=types)


def check_names(data: Any, kind: Any) -> None:
    """Raise :class:`InvalidProblem` for what names no field of a dataclass."""
    known = {one.name for one in dataclasses.fields(kind)}
    for name in data:
        if name not in known:
            raise InvalidProblem(
                f"got the field {name!r}, expected one of {', '.join(sorted(known))}."
                f"{near_matches(str(name), known)}"
            )


def read_fields(data: Any, kind: Any) -> dict[str, Any]:
    """Return the arguments of a dataclass from what its ``to_dict`` gave."""
    if not isinstance(data, Mapping):
        raise InvalidProblem(
            f"got {type(data).__name__}, expected fields by name, as to_dict() gives them."
        )
    check_names(data, kind)
    return {name: restored(value) for name, value in data.items()}


def read_json(text: str) -> Any:
    """Return what JSON says; raise :class:`InvalidProblem` for what is none."""
    try:
        return json.loads(text)
    except (TypeError, ValueError) as error:
        raise InvalidProblem(f"got no JSON ({error}), expected what to_json() gives.") from error

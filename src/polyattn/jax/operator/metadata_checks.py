"""What the fields of metadata may hold: each is read, or refused by its name."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp

from polyattn.errors import InvalidProblem, near_matches
from polyattn.jax.sharding.axes import PartitionAxis

__all__ = [
    "axes_of_sequence", "dtype_named", "matched", "number", "one_of", "partition_axis", "size",
    "switch",
]  # fmt: skip


def dtype_named(name: str, value: Any) -> str | None:
    """Return the name of a floating dtype; None stays."""
    if value is None:
        return None
    try:
        found = jnp.dtype(value)
    except TypeError as error:
        raise InvalidProblem(f"got {name}={value!r}, expected one that JAX knows.") from error
    if not jnp.issubdtype(found, jnp.floating):
        raise InvalidProblem(f"got {name}={found.name}, expected a floating dtype, as bfloat16.")
    return str(found.name)


def one_of(name: str, value: Any, known: tuple[str, ...]) -> str | None:
    """Return a name in lower case; enums are taken by their value or name."""
    if value is None:
        return None
    text = str(getattr(value, "value", value)).lower()
    if text not in known:
        raise InvalidProblem(
            f"got {name}={value!r}, expected one of {', '.join(known)}.{near_matches(text, known)}"
        )
    return text


def number(name: str, value: Any, wanted: str, low: float, high: float = math.inf) -> float:
    """Return a number of Python between bounds that it may not touch, but for 0 to 1.

    NumPy's numbers and JAX's arrays of one number are taken; traced ones have no value yet.
    """
    try:
        if isinstance(value, (str, bool)):
            raise TypeError(value)
        found = float(value)
    except (TypeError, ValueError) as error:  # JAX's for what is traced is a TypeError
        raise InvalidProblem(
            f"got {name} of type {type(value).__name__}, expected {wanted}, known while tracing."
        ) from error
    closed = high == 1.0
    if not (low < found < high or (closed and found in (low, high))):
        raise InvalidProblem(f"got {name}={found!r}, expected {wanted}.")
    return found


def size(name: str, value: Any) -> int:
    """Return a size of 1 or more."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise InvalidProblem(f"got {name}={value!r}, expected a size of 1 or more.")
    return found


def switch(name: str, value: Any) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise InvalidProblem(f"got {name}={value!r}, expected True or False.")
    return value


def axes_of_sequence(value: Any) -> str | tuple[str, ...]:
    """Return the name of an axis, or a tuple of names."""
    found = tuple(value) if isinstance(value, list) else value
    names = (found,) if isinstance(found, str) else found
    if not isinstance(names, tuple) or not names or not all(isinstance(n, str) for n in names):
        raise InvalidProblem(
            f"got sequence_axis_name={value!r}, expected the name of a mesh axis, or a tuple of "
            "two for hybrid."
        )
    return found  # type: ignore[no-any-return]


def partition_axis(given: Any, manager: Any) -> PartitionAxis | None:
    """Return the axes that were given, else those of a partition manager, else None."""
    if given is None and manager is not None:
        given = getattr(manager, "paxis", None)
        if not isinstance(given, PartitionAxis):
            raise InvalidProblem(
                f"got partition_manager of type {type(manager).__name__}, expected an object "
                "whose `paxis` is a polyattn.jax.PartitionAxis; or pass partition_axis."
            )
    if given is not None and not isinstance(given, PartitionAxis):
        raise InvalidProblem(
            f"got partition_axis of type {type(given).__name__}, expected a "
            "polyattn.jax.PartitionAxis."
        )
    return given


def matched(backend: str | None, platform: str | None) -> None:
    """Raise where a platform is another device than the backend."""
    family = {"cuda": "gpu", "rocm": "gpu"}
    if backend is None or platform not in ("cpu", "gpu", "tpu"):
        return
    if family.get(backend, backend) != platform:
        raise InvalidProblem(
            f"got backend={backend!r} with platform={platform!r}, expected one device: leave one "
            "of them out."
        )

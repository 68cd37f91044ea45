"""Which mesh axes the dims of attention are spread over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeAlias

from polyattn.errors import InvalidProblem, near_matches

__all__ = ["INHERIT", "Axis", "PartitionAxis"]

Axis: TypeAlias = str | tuple[str, ...] | None
"""One mesh axis, several of them, or none."""
INHERIT = "__inherit__"
"""As in training; None, which is another thing, takes the axis away."""


@dataclass(frozen=True)
class PartitionAxis:
    """The mesh axes of each dim; those that begin with `decode_` hold in generation.

    A `decode_` axis that is not given is that of training; None un-shards the dim. A query of
    length 1 has no sequence to spread, so `decode_query_sequence_axis` is None unless it is said.

    >>> PartitionAxis(decode_key_sequence_axis=None).of("key_sequence", generation=True) is None
    True
    >>> PartitionAxis().of("head", generation=True)
    'tp'
    """

    batch_axis: Axis = ("fsdp", "dp")
    sequence_axis: Axis = "sp"
    query_sequence_axis: Axis = INHERIT
    key_sequence_axis: Axis = INHERIT
    head_axis: Axis = "tp"
    kv_head_axis: Axis = "tp"
    attention_dim_axis: Axis = None
    attention_kv_dim_axis: Axis = None
    decode_batch_axis: Axis = INHERIT
    decode_query_sequence_axis: Axis = None
    decode_key_sequence_axis: Axis = INHERIT
    decode_head_axis: Axis = INHERIT
    decode_kv_head_axis: Axis = INHERIT
    decode_attention_dim_axis: Axis = INHERIT
    decode_attention_kv_dim_axis: Axis = INHERIT

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
            elif not (value is None or isinstance(value, (str, tuple))):
                raise InvalidProblem(
                    f"got PartitionAxis({field.name}={value!r}), expected the name of a mesh axis, "
                    "a tuple of names, or None."
                )

    def of(self, dim: str, generation: bool = False) -> Axis:
        """Return the axes of a dim: batch, query_sequence, key_sequence, head, kv_head, ..."""
        if generation:
            found: Axis = getattr(self, f"decode_{dim}_axis")
            if found != INHERIT:
                return found
        found = getattr(self, f"{dim}_axis")
        return self.sequence_axis if found == INHERIT else found

    def names(self) -> tuple[str, ...]:
        """Return every mesh axis that is named, each once."""
        every = (getattr(self, field.name) for field in fields(self))
        flat = (one for axis in every for one in ((axis,) if isinstance(axis, str) else axis or ()))
        return tuple(dict.fromkeys(name for name in flat if name != INHERIT))

    def for_mesh(self, mesh: Any) -> PartitionAxis:
        """Return the same without the axes that a mesh lacks: what is dropped is seen here.

        >>> import jax
        >>> mesh = jax.sharding.AbstractMesh((2,), ("tp",))
        >>> PartitionAxis().for_mesh(mesh).names()
        ('tp',)
        """
        here = set(mesh.axis_names)

        def kept(axis: Axis) -> Axis:
            if axis is None or axis == INHERIT:
                return axis
            found = tuple(n for n in ((axis,) if isinstance(axis, str) else axis) if n in here)
            return found[0] if len(found) == 1 else found or None

        return replace(self, **{f.name: kept(getattr(self, f.name)) for f in fields(self)})

    def check(self, mesh: Any) -> None:
        """Raise :class:`InvalidProblem` where an axis is none of the mesh's."""
        here = tuple(mesh.axis_names)
        for name in self.names():
            if name not in here:
                raise InvalidProblem(
                    f"got the axis {name!r}, expected one of the mesh's: {', '.join(here)}."
                    f"{near_matches(name, here)} PartitionAxis(...).for_mesh(mesh) leaves out "
                    "what a mesh lacks."
                )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {n: list(x) if isinstance(x, tuple) else x for n, x in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PartitionAxis:
        """Read what :meth:`to_dict` gives; raise :class:`InvalidProblem` for anything else."""
        known = {field.name for field in fields(cls)}
        for name in data:
            if name not in known:
                raise InvalidProblem(
                    f"got the axis of {name!r}, expected some of {', '.join(sorted(known))}."
                    f"{near_matches(name, known)}"
                )
        return cls(**data)

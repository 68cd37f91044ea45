"""What all calls of an operator share: dtypes, mesh, axes, scale, dropout, block sizes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem, near_matches
from polyattn.jax.operator.as_plain_data import described, restored
from polyattn.jax.sharding.axes import PartitionAxis
from polyattn.jax.sharding.specs import AttnShardingRules, attention_specs

__all__ = ["BACKENDS", "NOT_GIVEN", "AttentionMetadata"]


class _NotGiven:
    """Stands for a field that was not given: None is something that can be given."""

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Any = _NotGiven()
BACKENDS = ("cpu", "gpu", "cuda", "rocm", "tpu")
_PLATFORMS = ("jax", "pallas", "triton", "xla", "cpu", "gpu", "tpu")
_DEFAULTS: dict[str, Any] = {
    "sequence_axis_name": "sp", "mesh": None, "platform": None, "backend": None,
    "partition_axis": None, "partition_manager": None, "scan_ring_attention": True,
    "softmax_scale": None, "soft_cap": None, "dropout_prob": 0.0, "blocksize_q": 512,
    "blocksize_k": 1024, "blocksize_b": 1,
}  # fmt: skip
_PICKED_UP_AS = {"scan_ring_attention": "scan_attention_layers"}


@dataclass(frozen=True)
class AttentionMetadata:
    """Configuration of attention operators; immutable, and right without a mesh.

    - `runtime_dtype`: what queries, keys and values are cast to; None leaves them.
    - `runtime_softmax_dtype`: float32, which every backend computes the soft-max in, or float64.
    - `mesh`: a ``jax.sharding.Mesh`` (or an AbstractMesh, for specs alone); None: one device.
    - `backend`: cpu, gpu, cuda, rocm or tpu, which ``forward_*`` is called; None: where JAX is.
    - `partition_axis`: mesh axes by dim; None: the defaults where the mesh has them.
    - `sequence_axis_name`: over which axis of the mesh sequences lie; two for ``hybrid``.
    - `softmax_scale`: default 1/sqrt(H). `soft_cap`: of the scores. `dropout_prob`: on weights.
    - `blocksize_q`, `blocksize_k`: of implementations that cut the call; `blocksize_b`: kept.

    What is not given comes from `base_config`, if it has an attribute of that name, else from the
    defaults. Raises :class:`~polyattn.errors.InvalidProblem` for values that mean nothing.

    >>> AttentionMetadata(softmax_scale=0.5).get_shardings("__train__")[0] is not None
    True
    >>> AttentionMetadata.from_json(AttentionMetadata().to_json()) == AttentionMetadata()
    True
    """

    runtime_dtype: Any = None
    runtime_softmax_dtype: Any = "float32"
    sequence_axis_name: str | tuple[str, str] = NOT_GIVEN
    mesh: Any = NOT_GIVEN
    platform: Any = NOT_GIVEN
    backend: Any = NOT_GIVEN
    partition_axis: Any = NOT_GIVEN
    partition_manager: Any = NOT_GIVEN
    base_config: Any = field(default=None, compare=False, repr=False)
    scan_ring_attention: bool = NOT_GIVEN
    softmax_scale: float | None = NOT_GIVEN
    soft_cap: float | None = NOT_GIVEN
    dropout_prob: float = NOT_GIVEN
    blocksize_q: int = NOT_GIVEN
    blocksize_k: int = NOT_GIVEN
    blocksize_b: int = NOT_GIVEN

    def __post_init__(self) -> None:
        for name, default in _DEFAULTS.items():
            self.set_attrs_carefully(name, default, _PICKED_UP_AS.get(name))
        object.__setattr__(self, "runtime_dtype", _dtype(self.runtime_dtype))
        object.__setattr__(self, "runtime_softmax_dtype", _dtype(self.runtime_softmax_dtype))
        object.__setattr__(self, "backend", _one_of("backend", self.backend, BACKENDS))
        object.__setattr__(self, "platform", _one_of("platform", self.platform, _PLATFORMS))
        if isinstance(self.sequence_axis_name, list):  # as JSON has it
            object.__setattr__(self, "sequence_axis_name", tuple(self.sequence_axis_name))
        self._check()

    def set_attrs_carefully(
        self,
        attr_name: str,
        default: Any,
        pickup_name: str | None = None,
        use_base_config: bool = True,
    ) -> None:
        """Fill a field that was not given, from the base config or by the default.

        What was given stays: metadata that exists is never changed by it. `pickup_name`: what the
        base config calls the field.
        """
        if getattr(self, attr_name) is not NOT_GIVEN:
            return
        found, picked_up = NOT_GIVEN, pickup_name or attr_name
        if use_base_config and self.base_config is not None:
            found = getattr(self.base_config, picked_up, NOT_GIVEN)
        object.__setattr__(self, attr_name, default if found in (NOT_GIVEN, ...) else found)

    def _check(self) -> None:
        if self.runtime_softmax_dtype not in (None, "float32", "float64"):
            raise InvalidProblem(
                f"got runtime_softmax_dtype={self.runtime_softmax_dtype!r}, expected float32: "
                "every backend computes the soft-max in float32 at least."
            )
        for name in ("blocksize_q", "blocksize_k", "blocksize_b"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidProblem(f"got {name}={size!r}, expected a size of 1 or more.")
        if not 0.0 <= float(self.dropout_prob) <= 1.0:
            raise InvalidProblem(f"got dropout_prob={self.dropout_prob!r}, expected 0 to 1.")
        if self.partition_axis is not None and not isinstance(self.partition_axis, PartitionAxis):
            raise InvalidProblem(
                f"got partition_axis of type {type(self.partition_axis).__name__}, expected a "
                "polyattn.jax.PartitionAxis."
            )
        if self.mesh is not None and not hasattr(self.mesh, "axis_names"):
            raise InvalidProblem(
                f"got mesh of type {type(self.mesh).__name__}, expected a jax.sharding.Mesh."
            )
        self.axes.names()

    @property
    def axes(self) -> PartitionAxis:
        """The mesh axes of each dim: those that were given, checked, or what the mesh has."""
        if self.partition_axis is None:
            found = PartitionAxis(sequence_axis=self.sequence_axis_name)
            return found if self.mesh is None else found.for_mesh(self.mesh)
        if self.mesh is not None:
            self.partition_axis.check(self.mesh)
        return self.partition_axis  # type: ignore[no-any-return]

    @classmethod
    def from_config(
        cls, config: Any, softmax_scale: float | None = None, dropout_prob: float = 0.0
    ) -> AttentionMetadata:
        """Return metadata whose other fields come from a model's configuration.

        `config`: any object; of its attributes those named like a field are taken, ``attn_dtype``
        as the runtime dtype.
        """
        return cls(
            runtime_dtype=getattr(config, "attn_dtype", None),
            runtime_softmax_dtype=getattr(config, "attn_softmax_dtype", None) or "float32",
            base_config=config,
            softmax_scale=softmax_scale,
            dropout_prob=dropout_prob,
        )

    def get_shardings(
        self,
        mode: str,
        BTHD: bool = True,
        qkv_mni_sharding: bool = False,
        *,
        layout: str | None = None,
        softmax_aux: Any = None,
    ) -> AttnShardingRules | tuple[PartitionSpec, ...]:
        """Return (query, key, value, bias, mask, output) specs; with `layout` all of them, named.

        `mode`: ``__train__``, ``__prefill__``, ``__autoregressive__`` or ``__insert__``. `BTHD`:
        heads third, else second; `layout`: bthd, bhtd or thd (packed rows), and the result is an
        :class:`~polyattn.jax.sharding.specs.AttnShardingRules`, with specs of segment ids, and of
        sinks if `softmax_aux` is given.
        """
        named = ("bthd" if BTHD else "bhtd") if layout is None else layout
        rules = attention_specs(self.axes, mode, named, qkv_mni_sharding, softmax_aux)
        return rules[1:7] if layout is None else rules

    def replace(self, **changes: Any) -> AttentionMetadata:
        """Return a copy with some fields changed."""
        known = {one.name for one in dataclasses.fields(self)}
        for name in changes:
            if name not in known:
                raise InvalidProblem(
                    f"got the field {name!r}, expected one of {', '.join(sorted(known))}."
                    f"{near_matches(name, known)}"
                )
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; the base config, of which all is taken already, is left out."""
        names = (one.name for one in dataclasses.fields(self) if one.name != "base_config")
        return {name: described(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionMetadata:
        """Read what :meth:`to_dict` gives."""
        return cls(**{name: restored(value) for name, value in data.items()})

    def to_json(self, **options: Any) -> str:
        """Return JSON; `options` are those of ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_json(cls, text: str) -> AttentionMetadata:
        """Read what :meth:`to_json` gives."""
        return cls.from_dict(json.loads(text))


def _dtype(value: Any) -> str | None:
    if value is None:
        return None
    try:
        return str(jnp.dtype(value).name)
    except TypeError as error:
        raise InvalidProblem(f"got the dtype {value!r}, expected one that JAX knows.") from error


def _one_of(name: str, value: Any, known: tuple[str, ...]) -> str | None:
    """Return a name in lower case; enums are taken by their value or name."""
    if value is None:
        return None
    text = str(getattr(value, "value", value)).lower()
    if text not in known:
        raise InvalidProblem(
            f"got {name}={value!r}, expected one of {', '.join(known)}.{near_matches(text, known)}"
        )
    return text


jax.tree_util.register_static(AttentionMetadata)

"""What all calls of an operator share: dtypes, mesh, axes, scale, dropout, block sizes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.operator.as_plain_data import check_names, described, read_fields, read_json
from polyattn.jax.operator.metadata_checks import (
    axes_of_sequence,
    dtype_named,
    matched,
    number,
    one_of,
    partition_axis,
    size,
    switch,
)
from polyattn.jax.sharding.axes import PartitionAxis
from polyattn.jax.sharding.specs import AttnShardingRules, attention_specs

__all__ = ["BACKENDS", "BLOCKS", "NOT_GIVEN", "PLATFORMS", "AttentionMetadata"]


class _NotGiven:
    """Stands for a field that was not given: None is something that can be given."""

    def __repr__(self) -> str:
        return "NOT_GIVEN"


NOT_GIVEN: Any = _NotGiven()
BACKENDS = ("cpu", "gpu", "cuda", "rocm", "tpu")
PLATFORMS = ("jax", "pallas", "triton", "xla", "cpu", "gpu", "tpu")
_DEFAULTS: dict[str, Any] = {
    "sequence_axis_name": "sp", "mesh": None, "platform": None, "backend": None,
    "partition_axis": None, "partition_manager": None, "scan_ring_attention": True,
    "softmax_scale": None, "soft_cap": None, "dropout_prob": 0.0, "blocksize_q": 512,
    "blocksize_k": 1024, "blocksize_b": 1,
}  # fmt: skip
BLOCKS = {name: _DEFAULTS[name] for name in ("blocksize_q", "blocksize_k")}
"""The sizes of blocks that stand for none in particular: an implementation takes its own."""
_PICKED_UP_AS = {"scan_ring_attention": "scan_attention_layers"}


@dataclass(frozen=True)
class AttentionMetadata:
    """Configuration of attention operators; immutable, and right without a mesh.

    - `runtime_dtype`: what queries, keys and values are cast to; None leaves them.
    - `runtime_softmax_dtype`: float32, which every backend computes the soft-max in at least;
      float64 for calls in float64.
    - `mesh`: a ``jax.sharding.Mesh`` (or an AbstractMesh, for specs alone); None: one device.
    - `backend`: cpu, gpu, cuda, rocm or tpu, where calls run and which ``forward_*`` is called;
      None: where JAX is.
    - `platform`: by what they run: pallas, triton (Pallas on GPUs), xla or jax (plain JAX); cpu,
      gpu and tpu mean the backend.
    - `partition_axis`: mesh axes by dim; None: those of `partition_manager.paxis` where there is
      a manager, else the defaults where the mesh has them.
    - `sequence_axis_name`: over which axis of the mesh sequences lie where `partition_axis` does
      not say it; two for ``hybrid``. `scan_ring_attention`: False unrolls the steps of a ring.
    - `softmax_scale`: default 1/sqrt(H). `soft_cap`: of the scores. `dropout_prob`: on weights.
    - `blocksize_q`, `blocksize_k`: rows and keys of a block, where a backend takes such (sizes
      other than the default are refused by those that do not). `blocksize_b`: 1.

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
    partition_manager: Any = field(default=NOT_GIVEN, compare=False, repr=False)
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
        for name, read in _READ.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        axes = partition_axis(self.partition_axis, self.partition_manager)
        object.__setattr__(self, "partition_axis", axes)
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
            found = _of_config(self.base_config, picked_up, NOT_GIVEN)
        object.__setattr__(self, attr_name, default if found in (NOT_GIVEN, ...) else found)

    def _check(self) -> None:
        if self.runtime_softmax_dtype not in (None, "float32", "float64"):
            raise InvalidProblem(
                f"got runtime_softmax_dtype={self.runtime_softmax_dtype!r}, expected float32: "
                "every backend computes the soft-max in float32 at least."
            )
        if self.blocksize_b != 1:
            raise InvalidProblem(
                f"got blocksize_b={self.blocksize_b}, expected 1: no implementation cuts the batch."
            )
        if self.mesh is not None and not hasattr(self.mesh, "axis_names"):
            raise InvalidProblem(
                f"got mesh of type {type(self.mesh).__name__}, expected a jax.sharding.Mesh."
            )
        matched(self.backend, self.platform)
        self.axes.names()

    @property
    def device(self) -> str | None:
        """Where calls run: the backend, or the platform where that names a device; None: any."""
        named = self.platform if self.platform in ("cpu", "gpu", "tpu") else None
        return self.backend or named

    @property
    def sequence_axis(self) -> str | tuple[str, ...]:
        """Over which axes the sequence lies: those of the partition axes, else by name."""
        return self.axes.of("query_sequence") or self.sequence_axis_name

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

        `config`: any object, or a dict; of its attributes those named like a field are taken,
        ``attn_dtype`` as the runtime dtype.
        """
        return cls(
            runtime_dtype=_of_config(config, "attn_dtype", None),
            runtime_softmax_dtype=_of_config(config, "attn_softmax_dtype", None) or "float32",
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
        check_names(changes, type(self))
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data.

        The base config and the partition manager, of which all is taken already, are left out.
        """
        names = (one.name for one in dataclasses.fields(self) if one.name not in _TAKEN)
        return {name: described(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionMetadata:
        """Read what :meth:`to_dict` gives."""
        return cls(**read_fields(data, cls))

    def to_json(self, **options: Any) -> str:
        """Return JSON; `options` are those of ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_json(cls, text: str) -> AttentionMetadata:
        """Read what :meth:`to_json` gives."""
        return cls.from_dict(read_json(text))


def _of_config(config: Any, name: str, default: Any) -> Any:
    if isinstance(config, Mapping):
        return config.get(name, default)
    return getattr(config, name, default)


def _scale(name: str, value: Any) -> float | None:
    return None if value is None else number(name, value, "a finite number", -math.inf)


def _cap(name: str, value: Any) -> float | None:
    return None if value is None else number(name, value, "a finite number above 0, or None", 0.0)


_TAKEN = ("base_config", "partition_manager")
_READ: dict[str, Callable[[str, Any], Any]] = {
    "runtime_dtype": dtype_named,
    "runtime_softmax_dtype": dtype_named,
    "backend": lambda name, value: one_of(name, value, BACKENDS),
    "platform": lambda name, value: one_of(name, value, PLATFORMS),
    "sequence_axis_name": lambda name, value: axes_of_sequence(value),
    "scan_ring_attention": switch,
    "softmax_scale": _scale,
    "soft_cap": _cap,
    "dropout_prob": lambda name, value: number(name, value, "0 to 1", 0.0, 1.0),
    "blocksize_q": size,
    "blocksize_k": size,
    "blocksize_b": size,
}
"""How each field is read that is not kept as it is."""

jax.tree_util.register_static(AttentionMetadata)

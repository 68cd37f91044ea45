"""Partition specs of attention's arrays, by mode and layout; legal for their mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.sharding.axes import Axis, PartitionAxis
from polyattn.jax.sharding.modes import AUTOREGRESSIVE, GENERATION_MODES, check_mode

__all__ = [
    "LAYOUTS", "AttnShardingRules", "attention_specs", "axis_names", "check_divides", "flat",
    "legal", "ordered",
]  # fmt: skip

LAYOUTS = ("bthd", "bhtd", "thd")


class AttnShardingRules(NamedTuple):
    """The specs of one call. `query3d`: of a query without a sequence dim, (B, N, H)."""

    query3d: PartitionSpec
    query: PartitionSpec
    key: PartitionSpec
    value: PartitionSpec
    bias: PartitionSpec
    mask: PartitionSpec
    output: PartitionSpec
    q_segment_ids: PartitionSpec
    kv_segment_ids: PartitionSpec
    softmax_aux: PartitionSpec | None


class _Dims(NamedTuple):
    """The mesh axes of each dim, in one mode."""

    batch: Axis
    q_len: Axis
    kv_len: Axis
    head: Axis
    kv_head: Axis
    dim: Axis
    kv_dim: Axis


def attention_specs(
    axes: PartitionAxis,
    mode: str,
    layout: str = "bthd",
    qkv_mni_sharding: bool = False,
    softmax_aux: Any = None,
) -> AttnShardingRules:
    """Return the specs of a call in a mode, in a layout.

    `qkv_mni_sharding`: keys and values have the axes of the query heads. `softmax_aux`: sinks, (N,)
    or (N, M), whose spec is wanted. The query of ``__autoregressive__`` is one row, so its sequence
    has no axis. Raises :class:`InvalidProblem` for a mode or layout that is none, and where one
    array would have an axis twice.

    >>> tuple(attention_specs(PartitionAxis(), "__autoregressive__").query)
    (('fsdp', 'dp'), None, 'tp', None)
    """
    if layout not in LAYOUTS:
        raise InvalidProblem(f"got layout={layout!r}, expected one of {', '.join(LAYOUTS)}.")
    at = _dims(axes, check_mode(mode), qkv_mni_sharding)
    q, k = (at.batch, at.q_len, at.head, at.dim), (at.batch, at.kv_len, at.kv_head, at.dim)
    v, out = (*k[:3], at.kv_dim), (*q[:3], at.kv_dim)
    # rows and keys lie on the same axis where a sequence is spread: a score has it once
    columns = None if flat(at.kv_len) & flat(at.q_len) else at.kv_len
    aux = None
    if softmax_aux is not None:
        aux = legal("softmax_aux", (at.head, *(None,) * (np.ndim(softmax_aux) - 1)))
    if layout == "thd":  # one row of all sequences, of which none is cut
        at = at._replace(batch=None, q_len=None, kv_len=None)
        columns = None
    return AttnShardingRules(
        legal("query", (at.batch, at.head, at.dim)),
        legal("query", ordered(q, layout)),
        legal("key", ordered(k, layout)),
        legal("value", ordered(v, layout)),
        legal("bias", (at.batch, at.head, at.q_len, columns)),
        legal("mask", (at.batch, None, at.q_len, columns)),
        legal("output", ordered(out, layout)),
        legal("q_segment_ids", (at.batch, at.q_len)[layout == "thd" :]),
        legal("kv_segment_ids", (at.batch, at.kv_len)[layout == "thd" :]),
        aux,
    )


def _dims(axes: PartitionAxis, mode: str, all_heads: bool) -> _Dims:
    generation = mode in GENERATION_MODES
    rows = axes.of("query_sequence", mode == AUTOREGRESSIVE)
    head = axes.of("head", generation)
    return _Dims(
        axes.of("batch", generation),
        rows,
        axes.of("key_sequence", generation),
        head,
        head if all_heads else axes.of("kv_head", generation),
        axes.of("attention_dim", generation),
        axes.of("attention_kv_dim", generation),
    )


def ordered(dims: tuple[Axis, ...], layout: str) -> tuple[Axis, ...]:
    """Return the axes of (batch, length, heads, last) as a layout has them.

    >>> ordered(("dp", None, "tp", None), "bhtd")
    ('dp', 'tp', None, None)
    """
    batch, length, heads, last = dims
    if layout == "thd":  # packed rows belong to sequences of any length: none is cut
        return None, heads, last
    return (batch, length, heads, last) if layout == "bthd" else (batch, heads, length, last)


def axis_names(axis: Axis) -> tuple[str, ...]:
    """Return the names in an axis, in order.

    >>> axis_names(("fsdp", "dp")), axis_names("tp"), axis_names(None)
    (('fsdp', 'dp'), ('tp',), ())
    """
    return (axis,) if isinstance(axis, str) else axis or ()


def flat(axis: Axis) -> frozenset[str]:
    """Return the names in an axis.

    >>> sorted(flat(("fsdp", "dp"))), flat(None)
    (['dp', 'fsdp'], frozenset())
    """
    return frozenset(axis_names(axis))


def legal(name: str, dims: tuple[Axis, ...]) -> PartitionSpec:
    """Return the spec of an array's dims; raise :class:`InvalidProblem` for an axis twice."""
    seen: dict[str, int] = {}
    for place, axis in enumerate(dims):
        for one in axis_names(axis):
            if one in seen:
                raise InvalidProblem(
                    f"got the mesh axis {one!r} for dims {seen[one]} and {place} of {name}, "
                    "expected each axis once in an array; set one of them to None, as "
                    "PartitionAxis(decode_key_sequence_axis=None)."
                )
            seen[one] = place
    return PartitionSpec(*dims)


def check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec, mesh: Any) -> None:
    """Raise :class:`InvalidProblem` where a dim is no multiple of the devices it is spread over."""
    for place, axis in enumerate(spec):
        size = 1
        for one in flat(axis):
            size *= int(mesh.shape[one])
        if place < len(shape) and shape[place] % size:
            raise InvalidProblem(
                f"got {name} of shape {tuple(shape)} with dim {place} over {axis!r}, which is "
                f"{size} devices; expected a multiple of {size}. Pad it, or take the axis away."
            )

"""A call on each device's share of batch and heads, where the metadata has a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.operator.call_arguments import Arguments
from polyattn.jax.operator.metadata import AttentionMetadata
from polyattn.jax.sharding.axes import Axis
from polyattn.jax.sharding.modes import AUTOREGRESSIVE, TRAIN
from polyattn.jax.sharding.specs import AttnShardingRules, attention_specs, check_divides, flat

__all__ = ["over_mesh", "placed", "spread_over"]


def over_mesh(
    metadata: AttentionMetadata, attend: Callable[..., Any], call: Arguments, mode: str | None
) -> tuple[jax.Array, jax.Array]:
    """Return (out, lse): computed by ``shard_map`` where there is more than one device to share.

    Batch and heads are spread; the sequence is whole on each device (spreading it is the work of
    ring and Ulysses). Raises :class:`InvalidProblem` for sizes that do not divide.
    """
    mesh = metadata.mesh
    if mesh is None or not hasattr(mesh, "devices") or mesh.size == 1:
        return attend(call.query, call.key, call.value, **call.options)  # type: ignore[no-any-return]
    options = dict(call.options)
    arrays = {name: options.pop(name) for name in ("mask", "bias", "sinks", "dropout_key")}
    rules = _whole_sequences(metadata, call, mode or TRAIN)
    batch, head = _parts(rules, options["layout"])
    for name, array, spec in (
        ("query", call.query, rules.query), ("key", call.key, rules.key),
        ("value", call.value, rules.value),
    ):  # fmt: skip
        check_divides(name, tuple(array.shape), spec, mesh)
    if arrays["dropout_key"] is not None:
        raise InvalidProblem(
            "got dropout on a mesh, expected none: each device would drop the same entries; fold "
            "the device's index into a key of your own under shard_map."
        )
    specs = jax.tree_util.tree_map_with_path(lambda path, x: _spec(path, x, batch, head), arrays)

    def shared(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        return attend(q, k, v, **options, **arrays)

    lse = PartitionSpec(batch, head, None)
    lse = lse if options["layout"] != "packed" else PartitionSpec(head, None)
    run = jax.shard_map(
        shared, mesh=mesh, in_specs=(rules.query, rules.key, rules.value, specs),
        out_specs=(rules.output, lse), check_vma=False,
    )  # fmt: skip
    given = placed(mesh, (call.query, call.key, call.value, arrays), (*rules[1:4], specs))
    return run(*given)  # type: ignore[no-any-return]


def placed(mesh: Any, arrays: Any, specs: Any) -> Any:
    """Return arrays that lie as their specs say, where the mesh makes that a part of their type."""
    if not any("Explicit" in str(kind) for kind in getattr(mesh, "axis_types", ())):
        return arrays
    reshard = getattr(jax, "reshard", None) or jax.sharding.reshard
    return jax.tree_util.tree_map(
        lambda x, spec: reshard(x, jax.sharding.NamedSharding(mesh, spec)), arrays, specs
    )


def _whole_sequences(metadata: AttentionMetadata, call: Arguments, mode: str) -> AttnShardingRules:
    layout = {"BTNH": "bthd", "BNTH": "bhtd", "packed": "thd"}[call.options["layout"]]
    axes = metadata.axes
    kept = type(axes)(**{
        **axes.to_dict(), "sequence_axis": None, "query_sequence_axis": None,
        "key_sequence_axis": None, "decode_query_sequence_axis": None,
        "decode_key_sequence_axis": None,
    })  # fmt: skip
    heads = call.key.shape[2 if layout == "bthd" else 1]
    spread = 1
    for name in flat(kept.of("kv_head", mode == AUTOREGRESSIVE)):
        spread *= int(metadata.mesh.shape[name])
    if heads % spread:
        raise InvalidProblem(
            f"got {heads} key/value heads over {spread} devices of the axis "
            f"{kept.of('kv_head')!r}, expected a multiple. Repeat them, or take the axis away with "
            "PartitionAxis(head_axis=None, kv_head_axis=None)."
        )
    return attention_specs(kept, mode, layout)


def _parts(rules: AttnShardingRules, layout: str) -> tuple[Axis, Axis]:
    if layout == "packed":
        return None, rules.query[1]
    return rules.query[0], rules.query[2 if layout == "BTNH" else 1]


def _spec(path: Any, x: Any, batch: Axis, head: Axis) -> PartitionSpec:
    """Return where an array of a mask, a bias or the sinks lies: with its batch and its heads.

    Told by the field that holds it: sizes that happen to be equal mean nothing.
    """
    name = str(getattr(path[-1], "name", getattr(path[-1], "key", "")))
    dims: list[Axis] = [None] * x.ndim
    if name in ("q_lengths", "kv_lengths", "lengths"):
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


def spread_over(
    metadata: AttentionMetadata, attend: Callable[..., Any], call: Arguments, local: Any
) -> tuple[jax.Array, jax.Array]:
    """Return (out, lse) of whole arrays, computed with the sequence spread over the mesh's axis.

    Raises :class:`InvalidProblem` without a mesh that has the axis, and for what cannot be spread.
    """
    mesh, axis, options = metadata.mesh, metadata.sequence_axis_name, dict(call.options)
    if mesh is None or not hasattr(mesh, "devices") or {*flat(axis)} - {*mesh.axis_names}:
        here = "no mesh" if mesh is None else f"a mesh of {', '.join(mesh.axis_names)}"
        raise InvalidProblem(
            f"got {here}, expected a mesh with the sequence axis {axis!r}: "
            "AttentionMetadata(mesh=jax.make_mesh(...))."
        )
    for name, wanted in (("bias", None), ("dropout_p", 0.0), ("layout", "BTNH")):
        if options.pop(name) != wanted:
            raise InvalidProblem(f"got {name} over a sequence that is spread, expected {wanted!r}.")
    options.pop("dropout_key")
    arrays = {name: options.pop(name) for name in ("mask", "sinks")}
    rows = PartitionSpec(None, axis, None, None)
    for name, array in (("query", call.query), ("key", call.key), ("value", call.value)):
        check_divides(name, tuple(array.shape), rows, mesh)
    specs = jax.tree_util.tree_map_with_path(lambda path, x: _of_rows(path, x, axis), arrays)

    def shared(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        return attend(q, k, v, axis_name=axis, return_lse=True, backend=local, **options, **arrays)

    run = jax.shard_map(
        shared, mesh=mesh, in_specs=(rows, rows, rows, specs),
        out_specs=(rows, PartitionSpec(None, None, axis)), check_vma=False,
    )  # fmt: skip
    given = (call.query, call.key, call.value, arrays)
    return run(*placed(mesh, given, (rows, rows, rows, specs)))  # type: ignore[no-any-return]


def _of_rows(path: Any, x: Any, axis: Any) -> PartitionSpec:
    """Return where an array lies: ids with the rows that they are of, all else everywhere."""
    name = str(getattr(path[-1], "name", ""))
    if name in ("q_ids", "kv_ids"):
        return PartitionSpec(*(None,) * (x.ndim - 1), axis)
    return PartitionSpec(*(None,) * x.ndim)

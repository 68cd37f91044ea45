"""A call on each device's share of batch and heads, where the metadata has a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.admission import admit
from polyattn.jax.operator.call_arguments import Arguments
from polyattn.jax.operator.metadata import AttentionMetadata
from polyattn.jax.operator.split_keys import over_split_keys
from polyattn.jax.sharding.axes import Axis
from polyattn.jax.sharding.key_heads import KeyHeads
from polyattn.jax.sharding.modes import GENERATION_MODES, TRAIN
from polyattn.jax.sharding.placing import in_arrays, placed, spec_of
from polyattn.jax.sharding.specs import check_divides, flat, legal, ordered

__all__ = ["devices_along", "devices_of", "over_mesh", "spread_over"]


def over_mesh(
    metadata: AttentionMetadata,
    attend: Callable[..., Any],
    call: Arguments,
    mode: str | None,
    with_lse: bool,
) -> tuple[jax.Array, Any]:
    """Return (out, lse): computed by ``shard_map`` where there is more than one device to share.

    `attend` takes `return_lse`; without it lse is None. Batch and query heads are spread as the
    metadata says, and key heads go where they are read, wherever they were stored; the head dim is
    whole on each device. The sequence is too, but for the keys of a cache (in generation), which
    stay where they are. Spreading the rows is the work of ring and Ulysses. Raises
    :class:`InvalidProblem` for sizes that do not divide.
    """
    mesh = devices_of(metadata)
    if mesh is None:
        found = attend(call.query, call.key, call.value, **call.options, return_lse=with_lse)
        return found if with_lse else (found, None)
    _check_whole(call)
    options = dict(call.options)
    names = ("mask", "bias", "sinks", "dropout_key")
    arrays = in_arrays({name: options.pop(name) for name in names})
    if arrays["dropout_key"] is not None:
        raise InvalidProblem(
            "got dropout on a mesh, expected none: each device would drop the same entries; fold "
            "the device's index into a key of your own under shard_map."
        )
    place = _place(metadata, call, mode or TRAIN)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, x: spec_of(path, x, place.batch, place.head), arrays
    )

    def shared(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        k, v = (place.keys.mine(x, place.head_dim) for x in (k, v))
        if place.parts > 1:
            told: dict[str, Any] = {"axis": place.key_axis, "devices": place.parts}
            told["return_lse"] = True
            found = over_split_keys(attend, q, k, v, **told, **options, **arrays)
            return found if with_lse else (found[0], None)
        found = attend(q, k, v, **options, **arrays, return_lse=with_lse)
        return found if with_lse else (found, None)

    run = jax.shard_map(
        shared, mesh=mesh, in_specs=(*place.specs, specs),
        out_specs=(place.out, place.lse if with_lse else None), check_vma=False,
    )  # fmt: skip
    given = placed(mesh, (call.query, call.key, call.value, arrays), (*place.specs, specs))
    # compiled: JAX cannot run a kernel with a rule of its own for gradients under it eagerly
    return jax.jit(run)(*given)  # type: ignore[no-any-return]


def _check_whole(call: Arguments) -> None:
    """Raise for a wrong call here, where its arrays are whole and known: no device sees that."""
    told = {name: x for name, x in call.options.items() if name != "dropout_key"}
    admit(call.query, call.key, call.value, **told)


def devices_along(mesh: Any, axis: Axis) -> int:
    """Return how many devices an axis of a mesh has, or several together; 1 for none."""
    count = 1
    for name in flat(axis):
        count *= int(mesh.shape[name])
    return count


def devices_of(metadata: AttentionMetadata) -> Any:
    """Return the metadata's mesh where it has several devices, else None.

    Raises :class:`InvalidProblem` for a mesh of shapes alone, which nothing can run on.
    """
    mesh = metadata.mesh
    if mesh is None or mesh.size == 1:
        return None
    if not isinstance(mesh, jax.sharding.Mesh):
        raise InvalidProblem(
            f"got a call over {mesh}, which has no devices, expected a jax.sharding.Mesh: "
            "metadata.replace(mesh=jax.make_mesh(...)). An AbstractMesh is for specs alone."
        )
    return mesh


class _Place(NamedTuple):
    """Where the arrays of a call lie while it is computed; keys in `parts` along `key_axis`."""

    batch: Axis
    head: Axis
    keys: KeyHeads
    head_dim: int
    specs: tuple[PartitionSpec, PartitionSpec, PartitionSpec]
    out: PartitionSpec
    lse: PartitionSpec
    key_axis: Axis
    parts: int


def _place(metadata: AttentionMetadata, call: Arguments, mode: str) -> _Place:
    layout = {"BTNH": "bthd", "BNTH": "bhtd", "packed": "thd"}[call.options["layout"]]
    generation, axes = mode in GENERATION_MODES, metadata.axes
    batch = None if layout == "thd" else axes.of("batch", generation)
    head, value_dim = axes.of("head", generation), axes.of("attention_kv_dim", generation)
    head_dim = 2 if layout == "bthd" else 1
    query = legal("query", ordered((batch, None, head, None), layout))
    check_divides("query", tuple(call.query.shape), query, metadata.mesh)
    keys = KeyHeads.of(metadata.mesh, head, call.query.shape[head_dim], call.key.shape[head_dim])
    key_axis = axes.of("key_sequence", True) if generation and layout != "thd" else None
    used = flat(batch) | flat(head) | flat(value_dim)
    parts = devices_along(metadata.mesh, key_axis)
    if flat(key_axis) & used or call.key.shape[3 - head_dim] % parts:
        key_axis, parts = None, 1
    # scores need the whole of the head dim; the columns of values are each computed by itself
    key = legal("key", ordered((batch, key_axis, keys.axis, None), layout))
    value = legal("value", ordered((batch, key_axis, keys.axis, value_dim), layout))
    for name, array, spec in (("key", call.key, key), ("value", call.value, value)):
        check_divides(name, tuple(array.shape), spec, metadata.mesh)
    out = legal("output", ordered((batch, None, head, value_dim), layout))
    lse = PartitionSpec(head, None) if layout == "thd" else PartitionSpec(batch, head, None)
    return _Place(batch, head, keys, head_dim, (query, key, value), out, lse, key_axis, parts)


def spread_over(
    metadata: AttentionMetadata,
    attend: Callable[..., Any],
    call: Arguments,
    mode: str,
    options: dict[str, Any],
) -> tuple[jax.Array, jax.Array]:
    """Return (out, lse) of whole arrays, computed with the sequence spread over the mesh's axis.

    Batch and heads lie as the metadata says; `options` are more of `attend`'s. Raises
    :class:`InvalidProblem` without a mesh that has the axis, and for what cannot be spread.
    """
    mesh, axis, given = metadata.mesh, metadata.sequence_axis, dict(call.options)
    if mesh is None or {*flat(axis)} - {*mesh.axis_names}:
        here = "no mesh" if mesh is None else f"a mesh of {', '.join(mesh.axis_names)}"
        raise InvalidProblem(
            f"got {here}, expected a mesh with the sequence axis {axis!r}: "
            "AttentionMetadata(mesh=jax.make_mesh(...))."
        )
    devices_of(metadata)
    _check_whole(call)
    heads_second = given["layout"] == "BNTH"
    _check_spreadable(given)
    arrays = in_arrays({name: given.pop(name) for name in ("mask", "sinks")})
    q, k, v = (x.swapaxes(1, 2) if heads_second else x for x in (call.query, call.key, call.value))
    generation = mode in GENERATION_MODES
    batch, head = (metadata.axes.of(name, generation) for name in ("batch", "head"))
    rows = legal("query", (batch, axis, head, None))
    check_divides("query", tuple(q.shape), rows, mesh)
    keys = KeyHeads.of(mesh, head, q.shape[2], k.shape[2])
    columns = legal("key", (batch, axis, keys.axis, None))
    for name, array in (("key", k), ("value", v)):
        check_divides(name, tuple(array.shape), columns, mesh)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, x: _of_rows(path, x, batch, head, axis), arrays
    )

    def shared(q: Any, k: Any, v: Any, arrays: Any) -> Any:
        k, v = keys.mine(k, 2), keys.mine(v, 2)
        return attend(q, k, v, axis_name=axis, return_lse=True, **options, **given, **arrays)

    places = rows, columns, columns, specs
    run = jax.shard_map(
        shared, mesh=mesh, in_specs=places, out_specs=(rows, PartitionSpec(batch, head, axis)),
        check_vma=False,
    )  # fmt: skip
    out, lse = run(*placed(mesh, (q, k, v, arrays), places))
    return (out.swapaxes(1, 2) if heads_second else out), lse


def _check_spreadable(options: dict[str, Any]) -> None:
    """Take out of the options what no spread call has; raise where it is given."""
    for name, wanted in (("bias", (None,)), ("dropout_p", (0.0,)), ("layout", ("BTNH", "BNTH"))):
        if options.pop(name) not in wanted:
            raise InvalidProblem(
                f"got {name} over a sequence that is spread, expected {wanted[0]!r}."
            )
    options.pop("dropout_key")


def _of_rows(path: Any, x: Any, batch: Axis, head: Axis, axis: Axis) -> PartitionSpec:
    """Return where an array lies: ids with the rows that they are of, all else as in a call."""
    name = str(getattr(path[-1], "name", ""))
    if name not in ("q_ids", "kv_ids"):
        return spec_of(path, x, batch, head)
    if x.ndim == 1:
        return PartitionSpec(axis)
    return PartitionSpec(batch if x.shape[0] > 1 else None, axis)

"""Arrays whose type says where they lie (a mesh of Explicit axes): each device computes its share.

With such types JAX asks of every operation where its result lies, which kernels that split heads or
call foreign code cannot say. The call as a whole can: batch and heads stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.sharding.axes import Axis
from polyattn.jax.sharding.key_heads import KeyHeads
from polyattn.jax.sharding.placing import in_arrays, placed, spec_of
from polyattn.jax.sharding.specs import check_divides, legal, ordered

__all__ = ["ExplicitPlace"]

_LAYOUTS = {"BTNH": "bthd", "BNTH": "bhtd", "packed": "thd"}


class ExplicitPlace(NamedTuple):
    """The mesh of a call's query, and over which of its axes batch and heads lie."""

    mesh: Any
    batch: Axis
    head: Axis
    layout: str

    @classmethod
    def of(cls, arrays: tuple[Any, ...], layout: Any) -> ExplicitPlace | None:
        """Return where a query lies by its type; None where that is left to the compiler."""
        if layout not in _LAYOUTS or not all(isinstance(x, jax.Array) for x in arrays):
            return None
        types = [jax.typeof(x).sharding for x in arrays]
        over = [x for x, one in zip(arrays, types, strict=True) if any(one.spec)]
        rank = 3 if layout == "packed" else 4
        if not over or not jax.typeof(over[0]).sharding.mesh.explicit_axes:
            return None
        if any(x.ndim != rank for x in arrays):  # for admission to refuse
            return None
        mesh, spec = jax.typeof(over[0]).sharding.mesh, tuple(types[0].spec)
        known = getattr(over[0], "sharding", None)
        if isinstance(known, jax.sharding.NamedSharding):
            mesh = known.mesh if isinstance(known.mesh, jax.sharding.Mesh) else mesh
        head_dim = 2 if layout == "BTNH" else 1
        return cls(mesh, None if layout == "packed" else spec[0], spec[head_dim], layout)

    def run(
        self, attend: Callable[..., Any], arrays: tuple[Any, Any, Any], options: Mapping[str, Any]
    ) -> Any:
        """Call `attend` on each device's share; the sequence and the head dim are whole there."""
        query, key, _ = arrays
        if options.get("dropout_p"):
            raise InvalidProblem(
                "got dropout on arrays over an Explicit mesh, expected none: each device would "
                "drop the same entries; fold the device's index into a key under shard_map."
            )
        name, head_dim = _LAYOUTS[self.layout], 2 if self.layout == "BTNH" else 1
        rows = legal("query", ordered((self.batch, None, self.head, None), name))
        check_divides("query", tuple(query.shape), rows, self.mesh)
        keys = KeyHeads.of(self.mesh, self.head, query.shape[head_dim], key.shape[head_dim])
        columns = legal("key", ordered((self.batch, None, keys.axis, None), name))
        names = ("mask", "bias", "sinks")
        given = in_arrays({n: options[n] for n in names if options.get(n) is not None})
        rest = {n: x for n, x in options.items() if n not in given}
        specs = jax.tree_util.tree_map_with_path(
            lambda path, x: spec_of(path, x, self.batch, self.head), given
        )
        lse = PartitionSpec(self.head) if name == "thd" else PartitionSpec(self.batch, self.head)

        def share(q: Any, k: Any, v: Any, given: Any) -> Any:
            k, v = keys.mine(k, head_dim), keys.mine(v, head_dim)
            return attend(q, k, v, **rest, **given)

        places = rows, columns, columns, specs
        run = jax.shard_map(
            share, mesh=self.mesh, in_specs=places,
            out_specs=(rows, lse) if options.get("return_lse") else rows, check_vma=False,
        )  # fmt: skip
        return jax.jit(run)(*placed(self.mesh, (*arrays, given), places))  # as over_mesh does

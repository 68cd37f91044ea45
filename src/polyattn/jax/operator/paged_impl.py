"""The operator for keys in pages: sequences and heads over a mesh, pages with their heads."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import PartitionSpec

from polyattn.errors import InvalidProblem
from polyattn.jax.operator.impl import AttentionImpl
from polyattn.jax.operator.impl_registry import AttentionRegistry
from polyattn.jax.operator.output import AttentionOutput
from polyattn.jax.operator.over_mesh import placed
from polyattn.jax.paged_call import paged_attention
from polyattn.jax.sharding.modes import AUTOREGRESSIVE
from polyattn.jax.sharding.specs import check_divides
from polyattn.masks import Causal, Mask

__all__ = ["PagedAttention"]

_CAUSAL = Causal()


@AttentionRegistry.register
class PagedAttention(AttentionImpl):
    """Attention to keys in pages; see :func:`polyattn.jax.paged_attention` for the arrays.

    Takes the query, the pages of keys and of values, `block_table` and `lengths`, and as options
    `mask`, `softmax_scale`, `logits_soft_cap`, `softmax_aux`, `return_lse`, `BTHD` and `backend`.
    Over a mesh, sequences and heads are spread; each device has the pages of its heads, all of
    them.
    """

    @classmethod
    def get_impl_name(cls) -> str | tuple[str, ...]:
        return "paged_attention"

    @classmethod
    def get_requirements(cls, mode: str = AUTOREGRESSIVE) -> dict[str, Any]:
        return {**super().get_requirements(mode), "cache": True}

    def forward_native(
        self,
        query: jax.Array,
        key_pages: jax.Array,
        value_pages: jax.Array,
        block_table: jax.Array,
        lengths: jax.Array,
        *,
        mask: Mask | None = _CAUSAL,
        softmax_scale: float | None = None,
        logits_soft_cap: float | None = None,
        softmax_aux: jax.Array | None = None,
        return_lse: bool = False,
        BTHD: bool = True,
        backend: str | tuple[str, ...] | None = None,
    ) -> AttentionOutput:
        known = self.metadata
        scale = known.softmax_scale if softmax_scale is None else softmax_scale
        options: dict[str, Any] = {
            "mask": mask, "scale": scale, "layout": "BTNH" if BTHD else "BNTH",
            "softcap": known.soft_cap if logits_soft_cap is None else logits_soft_cap,
            "return_lse": True, "backend": backend,
        }  # fmt: skip

        def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any) -> Any:
            return paged_attention(q, k, v, table, lengths, sinks=sinks, **options)

        arrays = query, key_pages, value_pages, block_table, lengths, softmax_aux
        out, lse = self._over_mesh(attend, arrays, 2 if BTHD else 1)
        return AttentionOutput(None, out, lse if return_lse else None)

    def _over_mesh(self, attend: Any, arrays: tuple[Any, ...], head_dim: int) -> Any:
        """Run on each device's sequences and heads, where the metadata has a mesh."""
        mesh = self.metadata.mesh
        if mesh is None or not hasattr(mesh, "devices") or mesh.size == 1:
            return attend(*arrays)
        axes = self.metadata.axes
        batch, head = axes.of("batch", True), axes.of("head", True)
        if axes.of("kv_head", True) != head:
            raise InvalidProblem(
                f"got query heads over {head!r} and key/value heads over "
                f"{axes.of('kv_head', True)!r}, expected one axis for both: pages lie with the "
                "heads that read them."
            )
        pages = PartitionSpec(*(head if dim == head_dim else None for dim in range(4)))
        rows = PartitionSpec(batch, *pages[1:])
        specs = (rows, pages, pages, PartitionSpec(batch, None), PartitionSpec(batch))
        for name, array, spec in zip(("query", "key pages"), arrays, specs, strict=False):
            if array.ndim != 4:
                raise InvalidProblem(f"got {name} of shape {array.shape}, expected four dims.")
            check_divides(name, tuple(array.shape), spec, mesh)
        sinks = arrays[5]
        of_sinks = None if sinks is None else PartitionSpec(head, *(None,) * (sinks.ndim - 1))
        run = jax.shard_map(
            attend, mesh=mesh, in_specs=(*specs, of_sinks),
            out_specs=(rows, PartitionSpec(batch, head, None)), check_vma=False,
        )  # fmt: skip
        return run(*placed(mesh, arrays, (*specs, of_sinks)))

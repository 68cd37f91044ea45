"""The operator for keys in pages: sequences and heads over a mesh, pages with their heads."""

from __future__ import annotations

from typing import Any

import jax

from polyattn.errors import InvalidProblem
from polyattn.jax.operator.asked_backends import blocks_of, of_platform
from polyattn.jax.operator.call_arguments import arrays_of, scale_of, sinks_of
from polyattn.jax.operator.impl import AttentionImpl
from polyattn.jax.operator.impl_registry import AttentionRegistry
from polyattn.jax.operator.output import AttentionOutput
from polyattn.jax.operator.over_mesh import devices_of
from polyattn.jax.paged_call import paged_attention
from polyattn.jax.sharding.modes import AUTOREGRESSIVE, check_mode
from polyattn.jax.sharding.spread_pages import over_pages
from polyattn.masks import Causal, Mask

__all__ = ["PagedAttention"]

_CAUSAL = Causal()


@AttentionRegistry.register
class PagedAttention(AttentionImpl):
    """Attention to keys in pages; see :func:`polyattn.jax.paged_attention` for the arrays.

    Takes the query, the pages of keys and of values, `block_table` and `lengths`, and as options
    `mask`, `softmax_scale`, `logits_soft_cap`, `softmax_aux`, `return_lse`, `BTHD`, `mode` and
    `backend`.
    Over a mesh, sequences and heads are spread; each device has the pages of the key heads that
    its query heads read, all of them.
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
        mode: str | None = None,
    ) -> AttentionOutput:
        known = self.metadata
        if mode is not None:
            check_mode(mode)
        if sizes := blocks_of(known):
            raise InvalidProblem(
                f"got {sizes} for keys in pages, whose blocks these are, expected the default."
            )
        query, key_pages, value_pages = arrays_of(
            known, query=query, key_pages=key_pages, value_pages=value_pages
        )
        if backend is None and known.platform is not None:
            backend = of_platform(known, "paged_attention", ("jax_paged_decode", "jax_reference"))
        options: dict[str, Any] = {
            "mask": mask, "scale": scale_of(known, softmax_scale),
            "layout": "BTNH" if BTHD else "BNTH",
            "softcap": known.soft_cap if logits_soft_cap is None else logits_soft_cap,
            "return_lse": True, "backend": backend,
        }  # fmt: skip

        def attend(q: Any, k: Any, v: Any, table: Any, lengths: Any, sinks: Any) -> Any:
            return paged_attention(q, k, v, table, lengths, sinks=sinks, **options)

        sinks = sinks_of(softmax_aux)
        arrays = query, key_pages, value_pages, block_table, lengths, sinks
        out, lse = self._over_mesh(attend, arrays, 2 if BTHD else 1)
        return AttentionOutput(None, out, lse if return_lse else None)

    def _over_mesh(self, attend: Any, arrays: tuple[Any, ...], head_dim: int) -> Any:
        """Run on each device's sequences and heads, where the metadata has a mesh."""
        mesh = devices_of(self.metadata)
        if mesh is None:
            return attend(*arrays)
        axes = self.metadata.axes
        batch, head = axes.of("batch", True), axes.of("head", True)
        for name, array in zip(("query", "key pages", "value pages"), arrays, strict=False):
            if array.ndim != 4:
                raise InvalidProblem(f"got {name} of shape {array.shape}, expected four dims.")
        return over_pages(mesh, (batch, head), attend, arrays, head_dim)

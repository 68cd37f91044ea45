"""Attention in plain JAX, block by block; imports no framework."""

from __future__ import annotations

from polyattn.backends.declaring import BIASES, FLOATS, JAX_DEVICES, LAYOUTS, jax_probe, loader
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 22


def declare(registry: Registry) -> None:
    """Register it."""
    anywhere = Capabilities(
        devices=JAX_DEVICES, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True,
    )  # fmt: skip
    registry.register(
        Backend(
            "jax_blockwise",
            "jax",
            anywhere,
            jax_probe,
            loader("blockwise.jax"),
            None,
            "jax",
            "attention in plain JAX over blocks of keys: memory O(T), forward and backward",
            _block_sizes,
            any_lengths=True,
        )
    )


def _block_sizes(problem: Problem) -> list[dict[str, int]]:
    return [{"block_q": q, "block_k": k} for q, k in ((128, 128), (256, 512), (1024, 1024))]

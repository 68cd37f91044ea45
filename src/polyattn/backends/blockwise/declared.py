"""Attention in plain JAX, block by block; imports no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from polyattn.backends.declaring import BIASES, FLOATS, JAX_DEVICES, LAYOUTS, jax_probe, loader
from polyattn.masks import STATIC_KINDS
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import ALL_MASKS, Capabilities, Reason
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 22


_ANYWHERE = Capabilities(
    devices=JAX_DEVICES, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
    masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
    sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
    deterministic_backward=True, strided=True,
)  # fmt: skip
_FORWARD = dataclasses.replace(
    _ANYWHERE, backward=False, bias_grad=False, sinks_grad=False, deterministic_backward=False
)
_PAGED = dataclasses.replace(
    _FORWARD, paged=True, layouts=frozenset({"BTNH", "BNTH"}), biases=frozenset(),
    masks=STATIC_KINDS,
)  # fmt: skip


def declare(registry: Registry) -> None:
    """Register the kernel, and its two ways for decoding."""
    registry.register(_backend(
        "jax_blockwise", _ANYWHERE, "jax", "load", None,
        "attention in plain JAX over blocks of keys: memory O(T), forward and backward",
        [{"block_q": q, "block_k": k} for q, k in ((128, 128), (256, 512), (1024, 1024))],
    ))  # fmt: skip
    registry.register(_backend(
        "jax_decode", _ANYWHERE, "jax", "load_decode", None,
        "the same for few queries over a cache: heads of a group together, large "
        "blocks, up to the longest length",
        [{"block_k": size} for size in (2048, 8192, 32768)],
    ))  # fmt: skip
    registry.register(_backend(
        "jax_paged_decode", _PAGED, "pages", "load", _only_pages,
        "the same over keys in pages: some at a time are gathered, up to the longest length",
        [{"keys": keys} for keys in (256, 1024, 4096)],
    ))  # fmt: skip


def _backend(
    name: str, can: Capabilities, module: str, load: str,
    extra: Callable[[Problem], Iterator[Reason]] | None, summary: str,
    configs: list[dict[str, int]],
) -> Backend:  # fmt: skip
    return Backend(
        name,
        "jax",
        can,
        jax_probe,
        loader(f"blockwise.{module}", load),
        extra,
        "jax",
        summary,
        lambda problem: configs,
        any_lengths=True,
    )


def _only_pages(p: Problem) -> Iterator[Reason]:
    if p.paged is None:
        yield Reason("keys", "no pages", "paged keys (polyattn.jax.paged_attention)")

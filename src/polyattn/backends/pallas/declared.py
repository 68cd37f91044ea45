"""Our kernel in Pallas, for GPUs and TPUs; imports no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from polyattn import settings
from polyattn.backends.declaring import HALVES, LAYOUTS, jax_probe, loader
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import Capabilities, Reason
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 21
_MASKS = frozenset((
    "And", "Causal", "Window", "Chunked", "FirstKeys", "PrefixLM", "Padding", "LeftPadding",
    "Packed", "Segments", "BlockMap",
))  # fmt: skip
_LEAST = {"tpu": 128}
"""What the blocks of a map are a multiple of: a tile of the kernel is a part of one."""
_VMEM = 12 << 20  # of 16 MiB: what one head's keys and values may take, twice for the next one's


def declare(registry: Registry) -> None:
    """Register it."""
    gpu = Capabilities(
        devices={"cuda", "rocm"}, dtypes=HALVES | {"float32"}, head_dims=(1, 256, 1),
        layouts=LAYOUTS, masks=_MASKS, scale=True, softcap=True, sinks=True, sinks_grad=True,
        gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True,
    )  # fmt: skip
    cpu = dataclasses.replace(gpu, devices=frozenset({"cpu"}))
    tpu = dataclasses.replace(
        gpu, devices=frozenset({"tpu"}), dtypes=frozenset({"bfloat16", "float32"})
    )
    registry.register(
        Backend(
            "pallas",
            "jax",
            (gpu, tpu, cpu),
            jax_probe,
            loader("pallas.jax"),
            _extra,
            "jax",
            "our kernel in Pallas, forward and backward; on CPUs interpreted (its results were "
            "checked on an H100, its speed was not measured; never run by us on a TPU)",
            _tiles,
        )
    )


def _extra(p: Problem) -> Iterator[Reason]:
    if p.device == "cpu" and not settings.current().pallas_interpret:
        fix = "POLYATTN_PALLAS_INTERPRET=1 interprets it, which is slow"
        yield Reason("device", "cpu", "cuda, rocm or tpu", fix)
    if p.value_dim == 0 or p.head_dim == 0:
        yield Reason("head dim", "0", "1 to 256")
    least = _LEAST.get(p.device, 16)
    for part in () if p.mask is None else p.mask.structure.leaves():
        if part.kind == "BlockMap" and any(size % least for size in part.arguments[:2]):
            sizes = " x ".join(map(str, part.arguments[:2]))
            yield Reason("mask", f"blocks of {sizes}", f"multiples of {least}")
    size = 4 if p.dtype == "float32" else 2
    held = 2 * size * (p.head_dim + p.value_dim) * max(p.kv_len, p.q_len if p.grad else 0)
    if p.device == "tpu" and held > _VMEM:
        got = f"{held >> 20} MiB of keys and values of a head, twice"
        yield Reason("length", got, f"{_VMEM >> 20} MiB", "splash streams them")


def _tiles(problem: Problem) -> list[dict[str, int]]:
    return [{"block_q": q, "block_k": k} for q, k in ((64, 64), (128, 64), (128, 128), (64, 128))]

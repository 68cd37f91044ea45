"""JAX's Splash kernel for TPUs; imports no framework."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from polyattn import settings
from polyattn.backends.declaring import jax_probe, loader
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import Capabilities, Reason
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 25


def declare(registry: Registry) -> None:
    """Register it."""
    # its products of float32 are of bfloat16 on a TPU, so float32 would be weakened there
    tpu = Capabilities(
        devices={"tpu"}, dtypes={"bfloat16"}, head_dims=(1, 512, 1), layouts={"BTNH", "BNTH"},
        masks={"And", "Causal", "Window", "Padding", "Segments"}, scale=True, softcap=True,
        sinks=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True,
    )  # fmt: skip
    cpu = dataclasses.replace(tpu, devices=frozenset({"cpu"}), dtypes={"bfloat16", "float32"})
    registry.register(
        Backend(
            "splash",
            "jax",
            (tpu, cpu),
            jax_probe,
            loader("splash.jax"),
            _extra,
            "jax",
            "JAX's Splash kernel; on CPUs interpreted (never run by us on a TPU yet)",
            _block_sizes,
        )
    )


def _extra(p: Problem) -> Iterator[Reason]:
    if p.device == "cpu" and not settings.current().pallas_interpret:
        fix = "POLYATTN_PALLAS_INTERPRET=1 interprets it, which is slow"
        yield Reason("device", "cpu", "tpu", fix)
    if p.lse and p.grad:
        yield Reason("lse", "return_lse=True of what is differentiated", "one of both")
    if p.lse and p.dtype != "float32" and not _is_power_of_two(p):
        # it takes scaled queries: what rounding them to bfloat16 does shows in the lse
        yield Reason("lse", f"return_lse=True at scale={p.scale} in {p.dtype}", "powers of two")
    if p.head_dim == 0 or p.value_dim == 0:
        yield Reason("head dim", "0", "1 to 512")
    for kind in ("Segments", "Padding"):
        if p.mask is not None and len(p.mask.structure.of(kind)) > 1:
            yield Reason("mask", f"several {kind}", "one of a kind")


def _is_power_of_two(p: Problem) -> bool:
    scale = p.head_dim**-0.5 if p.scale is None and p.head_dim else p.scale
    return math.frexp(scale or 0.0)[0] in (0.5, -0.5, 0.0)


def _block_sizes(problem: Problem) -> list[dict[str, int]]:
    return [{"block": block} for block in (128, 256, 512, 1024)]

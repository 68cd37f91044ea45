"""JAX's own attention: XLA's unfused path and cuDNN's kernel; imports no framework."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

from polyattn.backends.declaring import BIASES, HALVES, JAX_DEVICES, LAYOUTS, jax_probe, loader
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import ALL_MASKS, Capabilities, Reason
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 24


def declare(registry: Registry) -> None:
    """Register both."""
    registry.register(_xla())
    registry.register(_cudnn())


def _xla() -> Backend:
    # its soft-max is float32, so float64 would be weakened; XLA's CPUs have no such float16 product
    everywhere = Capabilities(
        devices=JAX_DEVICES - {"cpu"}, dtypes=HALVES | {"float32"}, head_dims=(1, 1 << 16, 1),
        layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, gqa=True, backward=True,
        deterministic=True, deterministic_backward=True, strided=True,
    )  # fmt: skip
    cpu = dataclasses.replace(
        everywhere, devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"})
    )
    return Backend(
        "jax_xla",
        "jax",
        (cpu, everywhere),
        jax_probe,
        loader("jax_nn.jax", "load_xla"),
        None,
        "jax",
        "jax.nn.dot_product_attention in XLA's operations; materialises the scores",
        any_lengths=True,
    )


def _cudnn() -> Backend:
    cuda = Capabilities(
        devices={"cuda"}, dtypes=HALVES, head_dims=(8, 128, 8), archs=(80, 121),
        layouts={"BTNH", "BNTH"}, masks={"Causal"}, scale=True, gqa=True, backward=True,
        strided=True,
    )  # fmt: skip
    return Backend(
        "jax_cudnn",
        "jax",
        cuda,
        functools.partial(jax_probe, accelerators_only=True),
        loader("jax_nn.jax", "load_cudnn"),
        _cudnn_extra,
        "jax",
        "cuDNN's fused attention through jax.nn (checked on an H100, its speed was not measured)",
        any_lengths=True,
    )


def _cudnn_extra(p: Problem) -> Iterator[Reason]:
    if p.mask and p.q_len != p.kv_len:
        yield Reason("mask", f"a causal mask with T={p.q_len}, S={p.kv_len}", "equal lengths")
    if p.scale is not None and p.scale <= 0:  # of the keys that it adds behind the last, too
        yield Reason("scale", str(p.scale), "a scale > 0")
    if p.grad and (p.q_len % 2 or p.kv_len % 2):
        yield Reason("length", f"T={p.q_len}, S={p.kv_len} in training", "even ones")

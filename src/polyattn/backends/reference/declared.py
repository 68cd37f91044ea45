"""The definition in float64; imports no framework."""

from __future__ import annotations

from polyattn.backends.declaring import (
    BIASES,
    FLOATS,
    JAX_DEVICES,
    LAYOUTS,
    jax_probe,
    loader,
    torch_probe,
)
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 30


def declare(registry: Registry) -> None:
    """Register it, for torch and for JAX."""
    registry.register(_reference())
    registry.register(_jax_reference())


def _reference() -> Backend:
    anywhere = Capabilities(
        devices={"cpu", "cuda"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, dropout=True, gqa=True, value_dim=True, lse=True, backward=True,
        deterministic=True, deterministic_backward=True, strided=True, compiled=True,
        isolates_compiled=True, paged=True, quantized=True, higher=True,
    )  # fmt: skip
    return Backend(
        "reference",
        "torch",
        anywhere,
        torch_probe,
        loader("reference.torch"),
        None,
        "torch",
        "the definition, in float64; slow, and right",
        any_lengths=True,
    )


def _jax_reference() -> Backend:
    anywhere = Capabilities(
        devices=JAX_DEVICES, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, dropout=True, gqa=True, value_dim=True, lse=True, backward=True,
        deterministic=True, deterministic_backward=True, strided=True, paged=True,
    )  # fmt: skip
    return Backend(
        "jax_reference",
        "jax",
        anywhere,
        jax_probe,
        loader("reference.jax"),
        None,
        "jax",
        "the definition, in float64 where jax_enable_x64 is set; slow, and right",
        any_lengths=True,
    )

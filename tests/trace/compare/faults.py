"""Faults as they happen in ports, seeded into a model, each with whom the verdict must name."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.trace.compare.models import F32, Array, Module, Transformer


class Fault(NamedTuple):
    """`seed` breaks a block of a model; it returns the culprit's name in it and the kind."""

    name: str
    seed: Callable[[Module], tuple[str, str]]


def _interleaved(out: Array, x: Array) -> Array:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[-2])[:, None] * 100.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    return np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)


def _silu(out: Array, x: Array) -> Array:
    return (x / (1 + np.exp(-x))).astype(x.dtype)


def _erf_gelu(out: Array, x: Array) -> Array:
    from math import erf

    return (0.5 * x * (1 + np.vectorize(erf)(x / 2**0.5))).astype(x.dtype)


def swapped_heads(block):
    block.attn.before_o = lambda out: out[:, [1, 0, *range(2, out.shape[1])]]
    return "attn", "input"


def heads_not_transposed(block):
    block.attn.join = lambda x: x.reshape(x.shape[0], x.shape[2], -1)
    return "attn", "input"


def rotary_order(block):
    block.attn.rope_q.change = _interleaved
    return "attn.rope_q", "output"


def rotary_forgotten(block):
    block.attn.rope_k.change = lambda out, x: x
    return "attn.rope_k", "output"


def rotary_shifted(block):
    block.attn.rope_k.change = lambda out, x: np.roll(out, 1, axis=-2)
    return "attn.rope_k", "output"


def missing_scale(block):
    block.attn.core.scale = 1.0
    return "attn.core", "output"


def slightly_wrong_scale(block):
    block.attn.core.scale = 0.99 * (block.attn.q.weight.shape[0] // block.attn.heads) ** -0.5
    return "attn.core", "output"


def mask_off_by_one(block):
    block.attn.core.diagonal = 2
    return "attn.core", "output"


def no_mask(block):
    block.attn.core.diagonal = 10**6
    return "attn.core", "output"


def wrong_eps(block):
    block.norm1.eps = 1e-6
    return "norm1", "output"


def wrong_eps_later(block):
    block.norm2.eps = 1e-4
    return "norm2", "output"


def one_plus_weight(block):
    block.norm2.change = lambda out, x: (out + x).astype(x.dtype)
    return "norm2", "output"


def dropped_residual(block):
    block.first = lambda x, y: y
    return "", "input"


def dropped_second_residual(block):
    block.second = lambda x, y: y
    return "", "output"


def residual_of_the_norm(block):
    block.second = lambda x, y: x + y + F32(1e-3) * y
    return "", "output"


def product_without_gate(block):
    block.mlp.join = lambda gate, up: up
    return "mlp", "input"


def sum_for_product(block):
    block.mlp.join = np.add
    return "mlp", "input"


def wrong_activation(block):
    block.mlp.act.change = _silu
    return "mlp.act", "output"


def other_gelu(block):
    block.mlp.act.change = _erf_gelu
    return "mlp.act", "output"


def forgotten_bias(block):
    block.mlp.gate.change = lambda out, x: out - block.mlp.gate.bias
    return "mlp.gate", "output"


def clipped(block):
    block.mlp.up.change = lambda out, x: np.clip(out, -1.5, 1.5)
    return "mlp.up", "output"


def half_precision(block):
    block.mlp.down.change = lambda out, x: out.astype(np.float16).astype(x.dtype)
    return "mlp.down", "output"


def one_token(block):
    def change(out, x):
        out = out.copy()
        out[0, -1] = 0
        return out

    block.attn.o.change = change
    return "attn.o", "output"


def one_element(block):
    def change(out, x):
        out = out.copy()
        out[1, 3, 5] += F32(0.01)
        return out

    block.attn.v.change = change
    return "attn.v", "output"


def tokens_rolled(block):
    block.attn.v.change = lambda out, x: np.roll(out, 1, axis=1)
    return "attn.v", "output"


def batch_swapped(block):
    block.mlp.change = lambda out, x: out[::-1].copy()
    return "mlp", "output"


def second_call_only(block):
    block.attn.core.change = lambda out, *_: out * F32(1.01) if block.attn.core.step else out
    return "attn.core", "output"


def not_a_number(block):
    def change(out, x):
        out = out.copy()
        out[0, 0, 0] = np.nan
        return out

    block.attn.k.change = change
    return "attn.k", "output"


def transposed_weight(block):
    block.attn.q.weight = np.ascontiguousarray(block.attn.q.weight.T)
    return "attn.q", "parameter"


def scaled_weight(block):
    block.mlp.up.weight = block.mlp.up.weight * F32(1.001)
    return "mlp.up", "parameter"


def exchanged_weights(block):
    k, v = block.attn.k, block.attn.v
    k.weight, v.weight = v.weight, k.weight
    return "attn.k", "parameter"


def heads_of_a_weight_permuted(block):
    w = block.attn.o.weight
    block.attn.o.weight = np.ascontiguousarray(np.roll(w, w.shape[1] // block.attn.heads, axis=1))
    return "attn.o", "parameter"


FAULTS = [
    Fault(one.__name__, one)
    for one in (
        swapped_heads,
        heads_not_transposed,
        rotary_order,
        rotary_forgotten,
        rotary_shifted,
        missing_scale,
        slightly_wrong_scale,
        mask_off_by_one,
        no_mask,
        wrong_eps,
        wrong_eps_later,
        one_plus_weight,
        dropped_residual,
        dropped_second_residual,
        residual_of_the_norm,
        product_without_gate,
        sum_for_product,
        wrong_activation,
        other_gelu,
        forgotten_bias,
        clipped,
        half_precision,
        one_token,
        one_element,
        tokens_rolled,
        batch_swapped,
        second_call_only,
        not_a_number,
        transposed_weight,
        scaled_weight,
        exchanged_weights,
        heads_of_a_weight_permuted,
    )
]


def model_faults(model: Transformer) -> list[tuple[str, Callable[[], None], str, str]]:
    """Faults outside the blocks: name, how to seed it, the culprit and its kind."""

    def final_norm() -> None:
        model.norm.eps = 1e-2

    def head() -> None:
        model.head.change = lambda out, x: out * F32(1.0001)

    def embedding() -> None:
        model.embed.change = lambda out, x: out * F32(2)

    def embedding_row() -> None:
        model.embed.weight = model.embed.weight.copy()
        model.embed.weight[7] = 0

    return [
        ("final_norm", final_norm, "norm", "output"),
        ("head", head, "head", "output"),
        ("embedding", embedding, "embed", "output"),
        ("embedding_row", embedding_row, "embed", "parameter"),
    ]

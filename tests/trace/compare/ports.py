"""Ports of the transformer of `models`: the same mathematics, written and named another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.trace.compare.models import (
    MLP,
    Array,
    Attention,
    Block,
    Conv1D,
    Core,
    Dropout,
    Linear,
    Module,
    Transformer,
    matmul,
)

_NAMES = {
    "blocks": "model.layers", "attn": "self_attn", "core": "sdpa", "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm", "q": "q_proj", "k": "k_proj", "v": "v_proj",
    "o": "out_proj", "rope_q": "rotary_q", "rope_k": "rotary_k", "mlp": "ffn", "gate": "w1",
    "up": "w3", "down": "w2", "act": "activation_fn", "embed": "model.embed_tokens",
    "head": "lm_head", "qkv": "c_attn",
}  # fmt: skip
_KINDS = {
    "RMSNorm": "LlamaRMSNorm", "Block": "DecoderLayer", "Attention": "SelfAttention2",
    "GELU": "NewGELUActivation", "Core": "FlashKernel", "Rope": "RotaryEmbedding",
    "MLP": "GatedFeedForward", "Transformer": "LlamaForCausalLM", "Linear": "QuantLinear",
}  # fmt: skip


def renamed(name: str) -> str:
    """The reference's name as a port would call it."""
    if name == "norm":
        return "model.norm"
    return ".".join(_NAMES.get(part, part) for part in name.split(".")) if name else ""


def plain(name: str) -> str:
    return name


def plain_change(model: Transformer) -> None:
    """Leave the model as it is."""


@dataclass
class Port:
    """`change` rewrites a transformer in place; `rename` is applied when it is traced."""

    name: str
    change: Callable[[Transformer], None] = plain_change
    rename: Callable[[str], str] = plain
    weights: bool = True
    without: tuple[str, ...] = ()  # faults that it cannot have as they are
    inside: str = ""  # where in a block its parts are

    def skips(self, fault: str) -> bool:
        return fault in self.without

    def culprit(self, layer: int, part: str) -> str:
        """The name, in this port, of a part of a block of the reference."""
        return self.rename(f"blocks.{layer}.{self.inside}{part}".rstrip("."))


def _rekind(model: Transformer) -> None:
    for _, module in model.modules():
        module.kind = _KINDS.get(module.kind, module.kind)


class NoisyBlock(Block):
    """With Dropout and Identity modules around everything."""

    def forward(self, x: Array) -> Array:
        x = self.first(x, self.drop1(self.attn(self.pre(self.norm1(x)))))
        return self.second(x, self.drop2(self.mlp(self.drop0(self.norm2(x)))))


def _extras(model: Transformer) -> None:
    for block in model.blocks:
        block.__class__ = NoisyBlock
        block.drop0, block.drop1, block.drop2, block.pre = (Dropout() for _ in range(4))
        block.pre.kind = "Identity"


class FusedAttention(Attention):
    """One weight for q, k and v, transposed as in GPT-2, and heads before tokens throughout."""

    def forward(self, x: Array) -> Array:
        q, k, v = (self.split(part) for part in np.split(self.qkv(x), 3, axis=-1))
        out = self.core(self.rope_q(q), self.rope_k(k), v)
        if self.before_o is not None:
            out = self.before_o(out)
        return self.o(self.join(out))


def _fused(model: Transformer) -> None:
    for block in model.blocks:
        attn = block.attn
        attn.__class__ = FusedAttention
        parts = [getattr(attn, name).weight.T for name in "qkv"]
        attn.qkv = Conv1D(np.ascontiguousarray(np.concatenate(parts, axis=1)))
        for name in "qkv":
            delattr(attn, name)


class TransposedLinear(Linear):
    def forward(self, x: Array) -> Array:
        out = matmul(x, self.weight)
        return out + self.bias if hasattr(self, "bias") else out


def _transposed(model: Transformer) -> None:
    for _, module in model.modules():
        if type(module) is Linear:
            module.__class__ = TransposedLinear
            module.kind = "Conv1D"
            module.weight = np.ascontiguousarray(module.weight.T)


class Wrapper(Module):
    def __init__(self, inner: Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Array) -> Array:
        return self.inner(*args)


class OtherOrder(Attention):
    """v first, and keys before queries; the layout of the core is (batch, tokens, heads, dim)."""

    def forward(self, x: Array) -> Array:
        v, k, q = (self.split(one(x)) for one in (self.v, self.k, self.q))
        k = self.rope_k(k)
        out = self.core(self.rope_q(q), k, v)
        if self.before_o is not None:
            out = self.before_o(out)
        return self.o(self.join(out))


def _other_order(model: Transformer) -> None:
    for block in model.blocks:
        block.attn.__class__ = OtherOrder


class TokensFirst(Core):
    def forward(self, q: Array, k: Array, v: Array) -> Array:
        turned = (one.transpose(0, 2, 1, 3) for one in (q, k, v))
        return super().forward(*turned).transpose(0, 2, 1, 3)


class TokensFirstAttention(Attention):
    def forward(self, x: Array) -> Array:
        q, k, v = (self.split(one(x)) for one in (self.q, self.k, self.v))
        q, k = self.rope_q(q), self.rope_k(k)
        out = self.core(*(one.transpose(0, 2, 1, 3) for one in (q, k, v)))
        if self.before_o is not None:
            out = self.before_o(out.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        return self.o(self.join(out.transpose(0, 2, 1, 3)))


def _tokens_first(model: Transformer) -> None:
    for block in model.blocks:
        block.attn.__class__ = TokensFirstAttention
        block.attn.core.__class__ = TokensFirst


class ResidualAttention(Attention):
    """The residual and the norm are inside; the block around only calls it."""

    def forward(self, x: Array) -> Array:
        return x + super().forward(self.norm(x))


class ThinBlock(Block):
    def forward(self, x: Array) -> Array:
        x = self.attn(x)
        return self.second(x, self.mlp(self.norm2(x)))


def _residual_inside(model: Transformer) -> None:
    for block in model.blocks:
        block.__class__, block.attn.__class__ = ThinBlock, ResidualAttention
        block.attn.kind = "AttentionWithResidual"
        block.attn.norm = block.norm1
        del block.norm1


class FusedMLP(MLP):
    """gate holds its activation, and returns a tuple with something for the curious."""

    def forward(self, x: Array) -> Array:
        return self.down(self.join(self.gate(x)[0], self.up(x)))


class LinearGELU(Linear):
    def forward(self, x: Array) -> tuple[Array, Array]:
        out = super().forward(x)
        return self.act.forward(out), out.max(axis=-1)


def _fused_activation(model: Transformer) -> None:
    for block in model.blocks:
        block.mlp.__class__, block.mlp.gate.__class__ = FusedMLP, LinearGELU
        block.mlp.gate.kind = "LinearGELU"
        block.mlp.gate.act = block.mlp.act
        block.mlp.gate.act.recorded = False
        del block.mlp.act


def _sequential(model: Transformer) -> None:
    """Blocks in a wrapper each, so that names and nesting shift."""
    model.blocks = [Wrapper(block) for block in model.blocks]


def _both(*changes: Callable[[Transformer], None]) -> Callable[[Transformer], None]:
    def change(model: Transformer) -> None:
        for one in changes:
            one(model)

    return change


_OF_WEIGHTS = (
    "transposed_weight",
    "scaled_weight",
    "exchanged_weights",
    "heads_of_a_weight_permuted",
)
_OF_QKV = (*_OF_WEIGHTS, "one_element", "tokens_rolled", "not_a_number")
_OF_NORM1 = ("wrong_eps", "dropped_residual")
_OF_ACT = ("wrong_activation", "other_gelu", "forgotten_bias")

_MOVED = ("exchanged_weights",)
"""By their weights k is v and v is k, and what then differs is the code that uses them."""

_RENAMED = [
    Port("renamed", _rekind, renamed, without=_MOVED),
    Port("renamed without weights", plain_change, renamed, False, _OF_WEIGHTS),
    Port("renamed classes without weights", _rekind, renamed, False, _OF_WEIGHTS),
    Port("extra modules, renamed", _both(_rekind, _extras), renamed, without=_MOVED),
    Port("fused qkv, renamed", _both(_rekind, _fused), renamed, without=_OF_QKV),
    Port("transposed weights, renamed", _both(_transposed, _rekind), renamed, without=_OF_WEIGHTS),
    Port("tokens first, renamed", _both(_tokens_first, _rekind), renamed, without=_MOVED),
    Port(
        "residual inside, renamed", _both(_residual_inside, _rekind), renamed,
        without=(*_OF_NORM1, *_MOVED),
    ),
    Port(
        "fused activation, renamed", _both(_fused_activation, _rekind), renamed,
        without=(*_OF_ACT, *_MOVED),
    ),
    Port(
        "wrapped blocks, renamed", _both(_sequential, _rekind), renamed, without=_MOVED,
        inside="inner.",
    ),
]  # fmt: skip

PORTS = [
    Port("as it is"),
    Port("extra modules", _extras),
    Port("fused qkv", _fused, without=_OF_QKV),
    Port("transposed weights", _transposed, without=_OF_WEIGHTS),
    Port("other order", _other_order, without=_MOVED),
    Port("tokens first", _tokens_first),
    Port("residual inside", _residual_inside, without=_OF_NORM1),
    Port("fused activation", _fused_activation, without=_OF_ACT),
    Port("wrapped blocks", _sequential, without=_MOVED, inside="inner."),
    *_RENAMED,
]

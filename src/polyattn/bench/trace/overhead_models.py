"""The models whose forward is timed with and without a trace; weights and inputs are seeded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyattn.errors import MissingDependency

__all__ = ["MODELS", "Timed", "make"]

Inputs = dict[str, Any]
GOAL = 1.03
INPUTS = 32


@dataclass(frozen=True)
class Timed:
    """A model to be timed. `goal`: what a traced forward may take, in untraced ones; None: any."""

    name: str
    what: str
    build: Callable[[], tuple[nn.Module, list[Inputs]]]
    dtype: str = "float32"
    goal: float | None = GOAL


def make(timed: Timed, seed: int) -> tuple[nn.Module, list[Inputs]]:
    """Return the model in evaluation mode, and several inputs: no two forwards are the same.

    Raises MissingDependency without transformers.
    """
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingDependency(
            "got `bench trace` without transformers, whose models it times, expected it: "
            "pip install transformers"
        ) from error
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, inputs = timed.build()
    dtype = getattr(torch, timed.dtype)
    cast = [
        {name: t.to(dtype) if t.is_floating_point() else t for name, t in one.items()}
        for one in inputs
    ]
    return model.eval().to(dtype), cast


def _llama(
    *, layers: int, hidden: int, inner: int, heads: int, tokens: int
) -> Callable[[], tuple[nn.Module, list[Inputs]]]:
    def build() -> tuple[nn.Module, list[Inputs]]:
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            vocab_size=2048,
            use_cache=False,
        )
        inputs = [{"input_ids": torch.randint(0, 2048, (1, tokens))} for _ in range(INPUTS)]
        return LlamaForCausalLM(config), inputs

    return build


def _vit() -> tuple[nn.Module, list[Inputs]]:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=384, num_hidden_layers=12, num_attention_heads=6, intermediate_size=1536
    )
    return ViTModel(config), [{"pixel_values": torch.randn(1, 3, 224, 224)} for _ in range(INPUTS)]


_reference = _llama(layers=8, hidden=512, inner=1376, heads=8, tokens=256)
_REFERENCE = "Llama, 8 layers, hidden 512, 256 tokens"

MODELS = (
    Timed("llama", _REFERENCE, _reference),
    Timed("llama bf16", _REFERENCE, _reference, dtype="bfloat16"),
    Timed("vit", "ViT-S/16, 12 layers, hidden 384, 197 tokens", _vit),
    Timed(
        "large llama", "Llama, 4 layers, hidden 1024, 512 tokens",
        _llama(layers=4, hidden=1024, inner=2752, heads=16, tokens=512),
    ),
    Timed(
        "tiny llama", "Llama, 2 layers, hidden 64, 16 tokens: calls of hooks and little else",
        _llama(layers=2, hidden=64, inner=172, heads=4, tokens=16), goal=None,
    ),
)  # fmt: skip

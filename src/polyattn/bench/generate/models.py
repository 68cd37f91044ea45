"""Models of transformers made from their configurations, with seeded weights, and their prompts.

Nothing is downloaded. The models have few layers and a small vocabulary, so that a token takes
some milliseconds; heads, head dims and caches are those of models that people run, and the scores
of a long context are a part of each token's work that can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyattn.bench.generate.generated import Row

__all__ = ["FRAMES", "MODELS", "Sizes", "build", "prompt"]

FRAMES = 1500
"""The keys that each token of Whisper's decoder looks at, beside those of the text."""
VOCABULARY = 4096
_LONGEST = 8192


@dataclass(frozen=True)
class Sizes:
    """Of a model: `width` of a token, `inner` width of the MLP, heads of queries and of keys."""

    width: int = 512
    inner: int = 1024
    layers: int = 4
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    window: int = 512
    frames: int = FRAMES
    vocabulary: int = VOCABULARY


def _llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(sizes), attn_implementation="sdpa"))


def _gemma(sizes: Sizes) -> nn.Module:
    """Gemma 3: three layers of four look at a window only."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention" if n % 4 == 3 else "sliding_attention" for n in range(sizes.layers)]
    config = Gemma3TextConfig(
        **_decoder(sizes),
        sliding_window=sizes.window,
        layer_types=kinds,
        query_pre_attn_scalar=sizes.head_dim,
        attn_implementation="sdpa",
    )
    return Gemma3ForCausalLM(config)


def _gemma_2(sizes: Sizes) -> nn.Module:
    """Gemma 2: its scores are capped, which transformers computes by itself, in eager attention."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_decoder(sizes),
        sliding_window=sizes.window,
        attn_logit_softcapping=50.0,
        query_pre_attn_scalar=sizes.head_dim,
        attn_implementation="eager",
    )
    return Gemma2ForCausalLM(config)


def _whisper(sizes: Sizes) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=sizes.vocabulary, d_model=sizes.width, encoder_layers=sizes.layers,
        decoder_layers=sizes.layers, encoder_attention_heads=sizes.heads,
        decoder_attention_heads=sizes.heads, encoder_ffn_dim=2 * sizes.inner,
        decoder_ffn_dim=2 * sizes.inner, max_source_positions=sizes.frames,
        max_target_positions=448, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, begin_suppress_tokens=None, suppress_tokens=None,
        attn_implementation="sdpa",
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _decoder(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary, "hidden_size": sizes.width,
        "intermediate_size": sizes.inner, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "max_position_embeddings": _LONGEST, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


MODELS: Mapping[str, tuple[Callable[[Sizes], nn.Module], Sizes]] = {
    "llama": (_llama, Sizes()),
    "gemma": (_gemma, Sizes(heads=8, head_dim=128)),
    "gemma-2": (_gemma_2, Sizes(heads=8, head_dim=128)),
    "whisper": (_whisper, Sizes(heads=8)),
}


def build(row: Row, seed: int, sizes: Sizes | None = None) -> nn.Module:
    """Return the row's model in evaluation mode, its weights seeded, and set not to stop early."""
    made, usual = MODELS[row.model]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = made(sizes or usual)
    settings: Any = model.generation_config
    settings.eos_token_id = None  # all sides generate the same number of tokens
    settings.pad_token_id = 0
    return model.eval().to(getattr(torch, row.dtype))


def prompt(row: Row, seed: int, sizes: Sizes | None = None) -> dict[str, Any]:
    """Return what the row's ``generate`` begins with.

    Of a batch each further text is a quarter of the context shorter, and padded on the left.
    """
    sizes = sizes or MODELS[row.model][1]
    source = torch.Generator().manual_seed(seed)
    if row.model == "whisper":
        heard = torch.randn(row.batch, 80, 2 * sizes.frames, generator=source)
        return {"input_features": heard.to(getattr(torch, row.dtype))}
    ids = torch.randint(4, sizes.vocabulary, (row.batch, row.context), generator=source)
    shorter = torch.arange(row.batch)[:, None] * (row.context // 4)
    present = torch.arange(row.context)[None] >= shorter
    return {"input_ids": torch.where(present, ids, 0), "attention_mask": present.long()}

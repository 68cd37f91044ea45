"""Decoders that are given what others made: states, keys and values, codes of several books."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.bench.models.transformers_models.model_inputs import (
    BATCH,
    DECODED,
    TOKENS,
    noise,
    seen,
    words,
)
from polyattn.bench.models.transformers_models.recipe import Recipe, sets, takes

__all__ = ["DECODER_INPUTS"]

_ENCODED = 9
_PATCHES = 5
_WINDOW = 5
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _codes(config: Any, books: int) -> Tensor:
    ids = torch.arange(BATCH * TOKENS * books) * 7 % 40
    return ids.view(BATCH, TOKENS, books)


def _dia(config: Any) -> dict[str, Any]:
    return {
        "input_ids": _codes(config, config.num_channels),
        "encoder_hidden_states": noise(BATCH, _ENCODED, config.cross_hidden_size),
        "encoder_attention_mask": seen(_ENCODED, _ENCODED - 3),
    }


def _by_depth(config: Any) -> dict[str, Any]:
    """One word of text and the codes of the books before the last."""
    ids = words(config)[:, : config.num_codebooks]
    return {
        "input_ids": ids,
        "last_hidden_state": noise(BATCH, 1, config.input_size),
        "attention_mask": torch.ones_like(ids),
    }


def _delayed(config: Any) -> dict[str, Any]:
    return {"input_ids": words(config), "t_cond": noise(1, 1, config.hidden_size)}


def _heard(config: Any) -> dict[str, Any]:
    """As much sound as words: each word hears some frames."""
    mels = config.audio_config.num_mel_bins
    frames = TOKENS * config.audio_length_per_tok
    return {"input_ids": words(config.text_config), "input_features": noise(BATCH, mels, frames)}


def _asked_documents(config: Any) -> dict[str, Any]:
    """Two documents for each question, one of them shorter."""
    ids = words(config.generator)
    return {
        "input_ids": ids,
        "context_input_ids": ids.repeat_interleave(2, 0),
        "context_attention_mask": seen(TOKENS, TOKENS - 4).repeat(2, 1),
        "doc_scores": noise(BATCH, 2),
        "decoder_input_ids": ids[:, :DECODED],
    }


def _bytes_in_patches(config: Any) -> dict[str, Any]:
    """Bytes of which each belongs to a patch, and masks that say so, to be added to scores."""
    ids = words(config)
    patch = (torch.arange(TOKENS) * _PATCHES // TOKENS).expand(BATCH, TOKENS)
    of = torch.arange(_PATCHES).repeat_interleave(config.cross_attn_k)
    own = of[:, None] == patch[:, None, None]
    return {
        "input_ids": ids, "patch_ids": patch, "num_patches": _PATCHES,
        "attention_mask": _added(torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()),
        "encoder_attention_mask": _added(own),
    }  # fmt: skip


def _bytes_of_patches(config: Any) -> dict[str, Any]:
    given = _bytes_in_patches(config)
    own = given["encoder_attention_mask"].transpose(2, 3)
    return {
        "inputs_embeds": noise(BATCH, TOKENS, config.hidden_size),
        "patch_embeds": noise(BATCH, _PATCHES, config.hidden_size_global),
        "attention_mask": given["attention_mask"], "encoder_attention_mask": own,
    }  # fmt: skip


def _added(allowed: Tensor) -> Tensor:
    """Return the numbers that eager attention adds to scores for a mask (True: attends)."""
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape).masked_fill(~allowed, lowest)


def _with_indexer(text: Any) -> None:
    """Give the layers that choose their keys what no default says of the choice."""
    text.indexer_n_heads, text.indexer_kv_heads = 2, 1
    text.indexer_head_dim = text.head_dim
    text.indexer_budget, text.indexer_compress_ratio = 4, 2


def _of_text(change: Any) -> Recipe:
    return Recipe(lambda config: change(config.text_config))


def _mimi_of(config: Any) -> None:
    config.codec_config.upsample_groups = config.codec_config.hidden_size


DECODER_INPUTS: dict[str, Recipe] = {
    "blt": sets(
        encoder_hash_byte_group_vocab=500, local_attention_window_len=_WINDOW, use_cache=False
    ),
    "blt_local_decoder": takes(_bytes_of_patches),
    "blt_local_encoder": takes(_bytes_in_patches),
    "csm": Recipe(_mimi_of),
    "dia_decoder": takes(_dia),
    "moshi_depth": takes(_by_depth, sets(num_codebooks=8)),
    "qwen4_exp": _of_text(_with_indexer),
    "qwen4_exp_text": Recipe(_with_indexer),
    "rag": takes(_asked_documents, sets(n_docs=2)),
    "step3p7": sets(
        text_config__sliding_window=_WINDOW,
        text_config__layer_types=["full_attention", "sliding_attention"],
        text_config__rope_parameters={"full_attention": _ROPE, "sliding_attention": _ROPE},
    ),
    "voxtral_realtime": takes(_heard),
    "voxtral_realtime_text": takes(_delayed),
}

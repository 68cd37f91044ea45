"""Models whose inputs no other has: sounds, films, patches of pictures, series of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.bench.models.transformers_models.model_inputs import BATCH, noise, words
from polyattn.bench.models.transformers_models.recipe import Recipe, sets

__all__ = ["OWN_INPUTS"]

_MEL = 1024, 64
"""Frames and bins of the sounds that CLAP hears."""
_SIDE = 4
_STEPS = 5


def _takes(inputs: Callable[[Any], dict[str, Any]], change: Recipe | None = None) -> Recipe:
    """Return a recipe of inputs, which are made of the model's configuration."""
    return Recipe(change and change.change, lambda model: iter([inputs(model.config)]))


def _sound(config: Any) -> dict[str, Any]:
    short = torch.zeros(BATCH, 1, dtype=torch.bool)
    return {"input_features": noise(BATCH, 1, *_MEL), "is_longer": short}


def _film(config: Any) -> dict[str, Any]:
    side = config.image_size
    return {"pixel_values": noise(BATCH, config.num_frames, 3, side, side)}


def _patches(config: Any) -> dict[str, Any]:
    """Pictures in patches, one of them of three rows and padded."""
    part = getattr(config, "vision_config", config)
    count = _SIDE * _SIDE
    return {
        "pixel_values": noise(BATCH, count, part.num_channels * part.patch_size**2),
        "pixel_attention_mask": _seen(count, count - _SIDE),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE], [_SIDE - 1, _SIDE]]),
    }


def _placed_patches(config: Any) -> dict[str, Any]:
    """Patches that begin with their row and column, counted from 1."""
    count = 9
    rows = torch.ones(BATCH, count, 1)
    columns = torch.arange(1.0, count + 1).view(1, count, 1).expand(BATCH, count, 1)
    patches = noise(BATCH, count, config.patch_embed_hidden_size)
    flat = torch.cat([rows, columns, patches], 2)
    return {"flattened_patches": flat, "attention_mask": _seen(count, count - 2)}


def _seen(*lengths: int) -> Tensor:
    """Return a padding mask (B, longest) of these lengths."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def _series(config: Any) -> dict[str, Any]:
    return {"past_values": noise(BATCH, config.context_length, config.num_input_channels)}


def _decisions(config: Any) -> dict[str, Any]:
    return {
        "states": noise(BATCH, _STEPS, config.state_dim),
        "actions": noise(BATCH, _STEPS, config.act_dim),
        "rewards": noise(BATCH, _STEPS, 1),
        "returns_to_go": noise(BATCH, _STEPS, 1),
        "timesteps": torch.arange(_STEPS).expand(BATCH, _STEPS),
        "attention_mask": _seen(_STEPS - 1, _STEPS).flip(1),
    }


def _forecast(config: Any) -> dict[str, Any]:
    whole = torch.zeros(BATCH, 64, dtype=torch.long)
    return {
        "past_values": noise(BATCH, 64), "past_values_padding": whole, "freq": whole[:, :1],
    }  # fmt: skip


OWN_INPUTS: dict[str, Recipe] = {
    "audio-spectrogram-transformer": _takes(
        lambda c: {"input_values": noise(BATCH, c.max_length, c.num_mel_bins)},
        sets(max_length=64, num_mel_bins=32),
    ),
    "blip_2_qformer": _takes(
        lambda c: {
            "query_embeds": noise(BATCH, 6, c.hidden_size),
            "encoder_hidden_states": noise(BATCH, 9, c.encoder_hidden_size),
        }
    ),
    "clap": _takes(lambda c: {"input_ids": words(c), **_sound(c)}),
    "clap_audio_model": _takes(_sound),
    "decision_transformer": _takes(_decisions),
    "granite_speech_encoder": _takes(lambda c: {"hidden_states": noise(BATCH, 20, c.input_dim)}),
    "granite_speech_plus_encoder": _takes(
        lambda c: {"hidden_states": noise(BATCH, 20, c.input_dim)}
    ),
    "patchtsmixer": _takes(_series),
    "patchtst": _takes(_series),
    "pix2struct_vision_model": _takes(_placed_patches),
    "siglip2": _takes(lambda c: {"input_ids": words(c), **_patches(c)}),
    "siglip2_vision_model": _takes(_patches),
    "t5gemma2_decoder": _takes(
        lambda c: {
            "input_ids": words(c), "encoder_hidden_states": noise(BATCH, 9, c.hidden_size),
        },
        sets(dropout_rate=0.0),
    ),
    "timesfm": _takes(_forecast),
    "videomae": _takes(_film),
    "vivit": _takes(_film, sets(num_frames=4)),
    "wav2vec2-bert": _takes(
        lambda c: {"input_features": noise(BATCH, 20, c.feature_projection_input_dim)}
    ),
}  # fmt: skip

"""Models that hear several sounds of unequal lengths, and are told how long each is."""

from __future__ import annotations

import math
from typing import Any

import torch

from polyattn.bench.models.transformers_models.model_inputs import (
    BATCH,
    DECODED,
    noise,
    seen,
    words,
)
from polyattn.bench.models.transformers_models.recipe import Recipe, sets, takes

__all__ = ["SOUND_INPUTS"]

_FRAMES, _FILTERS = 60, 2
_HEARD = 60, 43
"""How many frames of each sound are no padding."""


def _of_mels(config: Any) -> dict[str, Any]:
    """As many frames as the encoder has positions, of which one sound has few."""
    frames = 2 * config.max_source_positions
    return {
        "input_features": noise(BATCH, config.num_mel_bins, frames),
        "input_features_mask": seen(frames, frames // 2 + 5),
    }


def _in_chunks(config: Any) -> dict[str, Any]:
    """Frames in chunks that share a window, the last of one sound unfilled."""
    frames = 4 * config.n_window
    return {
        "input_features": noise(BATCH, config.num_mel_bins, frames),
        "input_features_mask": seen(frames, frames // 2 + 7),
    }


def _stacked_frames(config: Any) -> dict[str, Any]:
    width = config.num_mel_bins * config.num_stacked_frames
    return {"input_features": noise(BATCH, _FRAMES, width), "input_features_mask": seen(*_HEARD)}


def _hidden_frames(config: Any) -> dict[str, Any]:
    """Frames whose mask says what is padding, and not what is sound."""
    return {
        "audio_mel": noise(BATCH, 4 * _FRAMES, config.input_feat_size),
        "audio_mel_mask": ~seen(4 * _FRAMES, 150).bool(),
    }


def _with_samples(config: Any) -> dict[str, Any]:
    return {
        "input_features": noise(BATCH, config.feature_size, 120),
        "chunk_sample_lengths": torch.tensor([120, 70]) * config.hop_length,
    }


def _transcribed(config: Any) -> dict[str, Any]:
    return {
        "input_features": noise(BATCH, 160, config.asr_config.num_mel_bins),
        "input_features_mask": seen(160, 90),
    }


def _heard_and_read(config: Any) -> dict[str, Any]:
    """A sound of which one half is padding, beside words."""
    samples = 12 * config.audio_config.dac_config.hop_length
    return {
        "input_ids": words(config.text_config),
        "input_values": noise(BATCH, 1, samples),
        "padding_mask": seen(samples, samples // 2),
    }


def _streamed(config: Any) -> dict[str, Any]:
    frame = int(config.encoder_config.sample_rate * config.encoder_config.frame_ms / 1000)
    samples = 64 * frame
    return {
        "input_values": noise(BATCH, samples),
        "attention_mask": seen(samples, samples // 2),
        "decoder_input_ids": words(config)[:, :DECODED],
    }


def _synthesized(config: Any) -> dict[str, Any]:
    """Noise over two blocks and a half of codes, whose layers look one block behind or ahead."""
    codes = 5 * config.block_size // (2 * config.repeats)
    frames = codes * config.repeats
    return {
        "hidden_states": noise(BATCH, frames, config.mel_dim),
        "condition_vector": noise(BATCH, 30, config.mel_dim),
        "speaker_embedding": noise(BATCH, frames, config.enc_emb_dim),
        "quantized_code": torch.arange(BATCH * codes).view(BATCH, codes),
        "time_step": torch.tensor(0.3),
    }


def _as_many_keys(config: Any) -> None:
    config.num_key_value_heads = config.num_attention_heads


def _coded(config: Any) -> dict[str, Any]:
    """A wave beside its features, as many as the codes that the wave becomes."""
    codes = 12
    width = config.semantic_model_config.feature_projection_input_dim
    samples = codes * math.prod(config.downsampling_ratios)
    return {"input_values": noise(BATCH, 1, samples), "input_features": noise(BATCH, codes, width)}


SOUND_INPUTS: dict[str, Recipe] = {
    "audioflamingo3_encoder": takes(_of_mels, sets(max_source_positions=30)),
    "dots3_note_audio_encoder": takes(_with_samples),
    "fun_asr_nano_encoder": takes(_stacked_frames),
    "gemma3n_audio": takes(_hidden_frames),
    "inkling_audio": takes(
        lambda c: {
            "audio_input_ids": torch.arange(BATCH * 7 * c.n_mel_bins).view(BATCH, 7, -1) % 200
        }
    ),
    "muse_spark_audio": takes(
        lambda c: {"input_values": noise(BATCH, 4 * c.samples_per_token)},
        sets(num_hidden_layers=4, hidden_sizes=(16, 16, 32, 32), out_hidden_size=32),
    ),
    "nemotron3_5_transcribe_audio": takes(_transcribed),
    "moonshine_streaming": takes(_streamed, Recipe(_as_many_keys)),
    "neucodec": takes(_coded),
    "pe_audio": takes(_heard_and_read),
    "qwen2_5_omni_bigvgan": takes(
        lambda c: {"mel_spectrogram": noise(BATCH, c.mel_dim, 4)}, sets(upsample_initial_channel=64)
    ),
    "qwen2_5_omni_dit": takes(
        _synthesized, sets(look_ahead_layers=(1,), look_backward_layers=(0,))
    )._replace(beside="sdpa"),
    "qwen3_asr_encoder": takes(_in_chunks),
    "vibevoice_acoustic_tokenizer": takes(
        lambda c: {"input_values": noise(BATCH, 1, 3200), "sample": False},
        sets(num_filters=_FILTERS),
    ),
    "vibevoice_acoustic_tokenizer_decoder": takes(
        lambda c: {"hidden_states": noise(BATCH, c.hidden_size, 3)}, sets(num_filters=_FILTERS)
    ),
    "vibevoice_acoustic_tokenizer_encoder": takes(
        lambda c: {"hidden_states": noise(BATCH, c.channels, 3200)}, sets(num_filters=_FILTERS)
    ),
    "vibevoice": sets(
        audio_config__num_filters=_FILTERS, semantic_model_config__num_filters=_FILTERS
    ),
    "vibevoice_asr": sets(
        acoustic_tokenizer_encoder_config__num_filters=_FILTERS,
        semantic_tokenizer_encoder_config__num_filters=_FILTERS,
    ),
    "xcodec2": takes(_coded),
}

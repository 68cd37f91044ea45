"""Models whose inputs no other has: sounds, series of numbers, what another has encoded."""

from __future__ import annotations

from typing import Any

import torch

from polyattn.bench.models.transformers_models.model_inputs import (
    BATCH,
    DECODED,
    TOKENS,
    noise,
    seen,
    words,
)
from polyattn.bench.models.transformers_models.recipe import Recipe, sets, takes

__all__ = ["OWN_INPUTS"]

_MEL = 1024, 64
"""Frames and bins of the sounds that CLAP hears."""
_STEPS = 5


def _sound(config: Any) -> dict[str, Any]:
    short = torch.zeros(BATCH, 1, dtype=torch.bool)
    return {"input_features": noise(BATCH, 1, *_MEL), "is_longer": short}


def _series(config: Any) -> dict[str, Any]:
    return {"past_values": noise(BATCH, config.context_length, config.num_input_channels)}


def _decisions(config: Any) -> dict[str, Any]:
    return {
        "states": noise(BATCH, _STEPS, config.state_dim),
        "actions": noise(BATCH, _STEPS, config.act_dim),
        "rewards": noise(BATCH, _STEPS, 1),
        "returns_to_go": noise(BATCH, _STEPS, 1),
        "timesteps": torch.arange(_STEPS).expand(BATCH, _STEPS),
        "attention_mask": seen(_STEPS - 1, _STEPS).flip(1),
    }


def _lagged(config: Any) -> dict[str, Any]:
    """A series with what is known of its times: what was, as far back as its lags, and what is."""
    past = config.context_length + max(config.lags_sequence)
    known = config.num_time_features
    return {
        "past_values": noise(BATCH, past),
        "past_time_features": noise(BATCH, past, known),
        "past_observed_mask": torch.ones(BATCH, past),
        "future_values": noise(BATCH, config.prediction_length),
        "future_time_features": noise(BATCH, config.prediction_length, known),
    }


def _with_lags(config: Any) -> None:
    config.prediction_length, config.context_length = 6, 12
    config.lags_sequence, config.num_time_features = [1, 2, 3], 2
    config.feature_size = 3 * config.input_size + config.num_time_features
    config.feature_size += sum(config.embedding_dimension) + 2 * config.input_size


def _codes(config: Any) -> dict[str, Any]:
    books = BATCH * config.decoder.num_codebooks
    decoded = torch.arange(books * DECODED).view(books, DECODED) % 40
    return {"input_ids": words(config.text_encoder), "decoder_input_ids": decoded}


def _in_windows(config: Any) -> dict[str, Any]:
    """Sounds behind one another, of which each has a length."""
    frames = 2 * config.n_window
    return {
        "input_features": noise(config.num_mel_bins, 2 * frames),
        "feature_lens": torch.tensor([frames + 10, frames - 10]),
    }


def _stacked(config: Any) -> dict[str, Any]:
    """Frames beside their differences, two and two."""
    return {"input_features": noise(BATCH, 60, 4 * config.num_mel_bins)}


def _wave(config: Any) -> dict[str, Any]:
    return {"input_values": noise(BATCH, 1, 9600)}


def _group_by_width(config: Any) -> None:
    config.upsample_groups = config.hidden_size


def _forecast(config: Any) -> dict[str, Any]:
    whole = torch.zeros(BATCH, 64, dtype=torch.long)
    return {
        "past_values": noise(BATCH, 64), "past_values_padding": whole, "freq": whole[:, :1],
    }  # fmt: skip


def _patched(config: Any) -> dict[str, Any]:
    """Series in patches, of which one begins with two that are padding."""
    steps = 6 * config.patch_length
    padding = torch.zeros(BATCH, steps, dtype=torch.long)
    padding[0, : 2 * config.patch_length] = 1
    return {"past_values": noise(BATCH, steps), "past_values_padding": padding}


def _folded(config: Any) -> dict[str, Any]:
    """Atoms of the residues of two proteins, the second shorter."""
    from transformers.models.esmfold2.modeling_esmfold2 import EsmFold2AtomInputs

    count, atoms = 6, 12
    place = torch.arange(count).expand(BATCH, count)
    of = (torch.arange(atoms) * count // atoms).expand(BATCH, atoms)
    none = torch.zeros_like(place)
    elements = torch.arange(BATCH * atoms).view(BATCH, atoms) % 20
    given = EsmFold2AtomInputs(
        ref_pos=noise(BATCH, atoms, 3), ref_charge=torch.zeros(BATCH, atoms),
        atom_attention_mask=seen(atoms, atoms - 4).bool(), ref_element=elements,
        ref_atom_name_chars=elements[..., None].expand(BATCH, atoms, config.max_chars),
        ref_space_uid=of, atom_to_token=of,
    )  # fmt: skip
    return {
        "token_index": place, "residue_index": place, "res_type": place,
        "asym_id": none, "sym_id": none, "entity_id": none, "mol_type": none,
        "token_bonds": torch.zeros(BATCH, count, count, 1),
        "attention_mask": seen(count, count - 2).bool(), "atom_inputs": given, "num_loops": 1,
    }  # fmt: skip


_FOLD = {
    "hidden_size": 24, "pairwise_hidden_size": 16, "single_inputs_size": 24 + 2 * 33 + 1,
    "atom_feature_dim": 389, "folding_trunk_num_hidden_layers": 1, "sliding_window": 5,
    "atom_encoder__hidden_size": 128, "atom_encoder__num_attention_heads": 4,
    "atom_encoder__head_dim": 32, "atom_encoder__output_dim": 24, "msa_encoder__enabled": False,
}  # fmt: skip

OWN_INPUTS: dict[str, Recipe] = {
    "audio-spectrogram-transformer": takes(
        lambda c: {"input_values": noise(BATCH, c.max_length, c.num_mel_bins)},
        sets(max_length=64, num_mel_bins=32),
    ),
    "blip_2_qformer": takes(
        lambda c: {
            "query_embeds": noise(BATCH, 6, c.hidden_size),
            "encoder_hidden_states": noise(BATCH, 9, c.encoder_hidden_size),
        }
    ),
    "clap": takes(lambda c: {"input_ids": words(c), **_sound(c)}),
    "clap_audio_model": takes(_sound),
    "decision_transformer": takes(_decisions),
    "granite_speech_encoder": takes(lambda c: {"hidden_states": noise(BATCH, 20, c.input_dim)}),
    "granite_speech_plus_encoder": takes(
        lambda c: {"hidden_states": noise(BATCH, 20, c.input_dim)}
    ),
    "dac": takes(_wave),
    "encodec": takes(_wave),
    "esmfold2": takes(_folded, sets(**_FOLD)),
    "gemma4_audio": takes(lambda c: {"input_features": noise(BATCH, 120, 128)}),
    "granite_speech5_ctc": takes(lambda c: _stacked(c.encoder_config)),
    "granite_speech5_encoder": takes(_stacked),
    "idefics2_perceiver": takes(
        lambda c: {"context": noise(BATCH, 9, c.hidden_size), "attention_mask": seen(9, 7)}
    ),
    "informer": takes(_lagged, Recipe(_with_lags)),
    "mimi": takes(_wave, Recipe(_group_by_width)),
    "mimi_encoder": takes(_wave),
    "mimi_decoder": takes(
        lambda c: {"latents": noise(BATCH, c.hidden_size, TOKENS)}, Recipe(_group_by_width)
    ),
    "musicgen": takes(_codes),
    "musicgen_melody": takes(_codes),
    "pe_audio_encoder": takes(_wave),
    "phi4_multimodal_audio": takes(
        lambda c: {"hidden_states": noise(BATCH, 160, c.input_size), "mask": None}
    ),
    "pocket_tts_audio_tokenizer": takes(_wave, Recipe(_group_by_width)),
    "pocket_tts_audio_tokenizer_decoder": takes(
        lambda c: {"latents": noise(BATCH, c.hidden_size, 9)}, Recipe(_group_by_width)
    ),
    "pocket_tts_audio_tokenizer_encoder": takes(_wave),
    "qwen2_5_omni_audio_encoder": takes(_in_windows),
    "qwen3_omni_moe_audio_encoder": takes(_in_windows),
    "time_series_transformer": takes(_lagged, Recipe(_with_lags)),
    "xcodec": takes(_wave),
    "patchtsmixer": takes(_series),
    "patchtst": takes(_series),
    "t5gemma2_decoder": takes(
        lambda c: {
            "input_ids": words(c), "encoder_hidden_states": noise(BATCH, 9, c.hidden_size),
        },
        sets(dropout_rate=0.0),
    ),
    "timesfm": takes(_forecast),
    "timesfm2_5": takes(_patched),
    "wav2vec2-bert": takes(
        lambda c: {"input_features": noise(BATCH, 20, c.feature_projection_input_dim)}
    ),
}  # fmt: skip

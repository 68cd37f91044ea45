"""Models that see pictures in the places that words leave, and those that act on what they see."""

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

__all__ = ["PLACED_INPUTS"]

_PLACE = 300
"""The word that stands for a part of a picture."""
_LINE = 301
_CODES = 64
_STEPS = 5


def _after(ids: Tensor, count: int) -> Tensor:
    """Return words behind `count` that stand for a picture."""
    return torch.cat([torch.full((BATCH, count), _PLACE), ids], 1)


def _acting(config: Any) -> dict[str, Any]:
    """What two cameras see, of which one item has but one, words, and steps to be made."""
    vlm = config.vlm_config
    side = vlm.vision_config.image_size
    shown = (side // vlm.vision_config.patch_size) ** 2
    ids = _after(words(vlm.text_config), 2 * shown)
    ids[0, :shown] = 0
    mask = torch.ones_like(ids)
    mask[0, :shown] = 0
    return {
        "action_embeds": noise(BATCH, _STEPS, config.dit_config.hidden_size),
        "input_ids": ids, "attention_mask": mask,
        "pixel_values": noise(BATCH, 2, 3, side, side),
        "pixel_attention_mask": torch.tensor([[True, False], [True, True]]),
    }  # fmt: skip


def _in_codes(config: Any) -> dict[str, Any]:
    """A picture of 4 by 4 codes, each line of which ends in a word."""
    return {
        "input_ids": _after(words(config.text_config), 4 * 5),
        "pixel_values": noise(BATCH, 3, 32, 32),
        "image_sizes": torch.tensor([[32, 32]] * BATCH),
    }


def _with_codes(config: Any) -> None:
    config.vocabulary_map = {f"<|visual token {i:06d}|>": 100 + i for i in range(_CODES)}
    config.vocabulary_map |= {"<|extra_200|>": _LINE, "<image>": _PLACE}
    config.image_token_id = _PLACE
    config.vq_config.codebook_size, config.vq_config.base_channels = _CODES, 32
    config.vq_config.hidden_size = 32 * config.vq_config.channel_multiplier[-1]


def _packed(config: Any) -> dict[str, Any]:
    """A picture whole and once more as one tile, both by half as many patches a side."""
    side = config.vision_config.image_size
    half = side // config.vision_config.patch_size // 2
    count = half * half + half * (half + 1)
    return {
        "input_ids": _after(words(config.text_config), count),
        "pixel_values": noise(BATCH, 2, 3, side, side),
        "image_sizes": torch.tensor([[side, side]] * BATCH),
    }


def _by_halves(config: Any) -> None:
    side = config.vision_config.image_size
    config.image_grid_pinpoints = [[side, side]]
    config.downsample_rate, config.image_token_index = "1/2", _PLACE
    config.deepstack_layer_map, config.spatial_target_layers = [[-1, 0]], [1]


def _of_vit_and_bert() -> Any:
    """No default says which two models it is made of."""
    from transformers import BertConfig, VisionEncoderDecoderConfig, ViTConfig

    of = VisionEncoderDecoderConfig.from_encoder_decoder_configs
    return of(ViTConfig(), BertConfig())  # type: ignore[no-untyped-call]


def _told(config: Any) -> dict[str, Any]:
    side = config.encoder.image_size
    return {
        "pixel_values": noise(BATCH, 3, side, side),
        "decoder_input_ids": words(config.decoder)[:, :DECODED],
        "decoder_attention_mask": seen(DECODED, DECODED - 3),
    }


def _decided(config: Any) -> dict[str, Any]:
    """Two questions at marks among the words of one prompt."""
    return {
        "input_ids": words(config.text_config)[:1],
        "marks": torch.tensor([[5, TOKENS - 1]]),
        "num_options": torch.tensor([[2, 3]]),
        "question_type_ids": torch.tensor([[0, 1]]),
    }


def _blocks(config: Any) -> tuple[Tensor, Tensor]:
    """Return words and which of them are of a picture: in runs longer than windows, and short."""
    ids = words(getattr(config, "text_config", config))
    of_picture = torch.zeros_like(ids)
    of_picture[0, 2:9], of_picture[0, 10:12] = 1, 1
    of_picture[1, :3], of_picture[1, 5:] = 1, 1
    return ids, of_picture


def _of_kinds(name: str) -> Any:
    """Return words whose kinds, so called, let them attend within pictures both ways."""

    def make(config: Any) -> dict[str, Any]:
        ids, of_picture = _blocks(config)
        return {"input_ids": ids, name: of_picture}

    return make


def _denoised(config: Any) -> dict[str, Any]:
    given = _of_kinds("mm_token_type_ids")(config)
    return {**given, "decoder_input_ids": given["input_ids"].flip(1)[:, : config.canvas_length]}


_BOTH_WAYS = sets(text_config__use_bidirectional_attention="vision")
_KINDS = _of_kinds("token_type_ids")
_KINDS_OF_PARTS = _of_kinds("mm_token_type_ids")

PLACED_INPUTS: dict[str, Recipe] = {
    "colpali": takes(_KINDS),
    "diffusion_gemma": takes(
        _denoised,
        sets(
            text_config__top_k_experts=2,
            text_config__use_bidirectional_attention="vision",
            canvas_length=DECODED,
        ),
    ),
    "gemma3": takes(_KINDS),
    "gemma4": takes(_KINDS_OF_PARTS, _BOTH_WAYS),
    "gemma4_unified": takes(_KINDS_OF_PARTS, _BOTH_WAYS),
    "hrm_text": takes(_KINDS, sets(num_layers_per_stack=2, num_hidden_layers=16)),
    "molmo2": takes(_KINDS_OF_PARTS),
    "paligemma": takes(_KINDS),
    "shieldgemma2": takes(_KINDS, sets(yes_token_index=5, no_token_index=7)),
    "emu3": takes(_in_codes, Recipe(_with_codes)),
    "granite4_vision": takes(_packed, Recipe(_by_halves)),
    "jev": takes(_decided),
    "pi0": takes(_acting),
    "vision-encoder-decoder": takes(
        _told, sets(decoder__is_decoder=True, decoder__add_cross_attention=True)
    )._replace(start=_of_vit_and_bert),
}

"""Models whose pictures come as no other's: in patches, in tiles, in films, among words."""

from __future__ import annotations

from collections.abc import Callable
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

__all__ = ["PICTURE_INPUTS"]

_SIDE = 4
_FRAMES = 4
_PLACE = 300
"""The word that stands for a part of a picture."""


def _film(config: Any) -> dict[str, Any]:
    side = config.image_size
    return {"pixel_values": noise(BATCH, config.num_frames, 3, side, side)}


def _patches(config: Any) -> dict[str, Any]:
    """Pictures in patches, one of them of three rows and padded."""
    part = getattr(config, "vision_config", config)
    count = _SIDE * _SIDE
    return {
        "pixel_values": noise(BATCH, count, part.num_channels * part.patch_size**2),
        "pixel_attention_mask": seen(count, count - _SIDE),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE], [_SIDE - 1, _SIDE]]),
    }


def _placed_patches(config: Any) -> dict[str, Any]:
    """Patches that begin with their row and column, counted from 1."""
    part = getattr(config, "vision_config", config)
    count = 9
    rows = torch.ones(BATCH, count, 1)
    columns = torch.arange(1.0, count + 1).view(1, count, 1).expand(BATCH, count, 1)
    patches = noise(BATCH, count, part.patch_embed_hidden_size)
    flat = torch.cat([rows, columns, patches], 2)
    return {"flattened_patches": flat, "attention_mask": seen(count, count - 2)}


def _picture(part: Any, *before: int) -> Tensor:
    return noise(BATCH, *before, 3, part.image_size, part.image_size)


def _among_words(config: Any, count: int) -> Tensor:
    """Return words behind `count` that stand for a picture."""
    places = torch.full((BATCH, count), _PLACE)
    return torch.cat([places, words(config.text_config)], 1)


def _asked(frames: int) -> Callable[[Any], dict[str, Any]]:
    """Return pictures that a transformer of a few queries looks at, guided by words."""

    def make(config: Any) -> dict[str, Any]:
        before = (frames,) if frames > 1 else ()
        return {
            "pixel_values": _picture(config.vision_config, *before),
            "qformer_input_ids": words(config.qformer_config),
            "input_ids": _among_words(config, config.num_query_tokens * frames),
        }

    return make


def _placed(config: Any) -> dict[str, Any]:
    """A picture in the places that a mask says."""
    where = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    where[:, 1 : 1 + config.latent_query_num] = True
    return {
        "pixel_values": _picture(config.vision_config),
        "input_ids": words(config.text_config),
        "image_embeds_position_mask": where,
    }


def _tiles(config: Any) -> dict[str, Any]:
    tiles, side = config.max_num_tiles, config.image_size
    present = torch.ones(BATCH, 1, tiles, dtype=torch.long)
    present[0, 0, 1:] = 0
    return {
        "pixel_values": noise(BATCH, 1, tiles, 3, side, side),
        "aspect_ratio_ids": torch.ones(BATCH, 1, dtype=torch.long),
        "aspect_ratio_mask": present,
    }


def _whole_mlp(config: Any) -> None:
    """Give what follows a shuffle of pixels the width that the shuffle makes."""
    config.intermediate_size = int(config.hidden_size / config.pixel_shuffle_ratio**2)


def _boxes(config: Any) -> dict[str, Any]:
    corners = noise(BATCH, TOKENS, 4).sigmoid().sort(2).values
    ids = words(config)
    return {"input_ids": ids, "bbox": corners, "decoder_input_ids": ids[:, :DECODED]}


def _levels(config: Any) -> dict[str, Any]:
    width = config.hidden_size
    level = noise(BATCH, width, _SIDE, _SIDE)
    return {
        "vision_features": [level],
        "text_features": noise(BATCH, TOKENS, width),
        "vision_pos_embeds": [level.flip(0)],
        "text_mask": seen(TOKENS, TOKENS - 3).bool(),
    }


def _detected(config: Any) -> dict[str, Any]:
    width = config.hidden_size
    level = noise(BATCH, _SIDE * _SIDE, width)
    return {
        "vision_features": level,
        "text_features": noise(BATCH, TOKENS, width),
        "vision_pos_encoding": level.flip(0),
        "text_mask": seen(TOKENS, TOKENS - 3).bool(),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE]]),
    }


def _masked(config: Any) -> dict[str, Any]:
    """What was detected, at three sizes of the picture, and the words asked for."""
    width = config.hidden_size
    return {
        "decoder_queries": noise(BATCH, 5, width),
        "backbone_features": [noise(BATCH, width, s * _SIDE, s * _SIDE) for s in (4, 2, 1)],
        "encoder_hidden_states": noise(BATCH, _SIDE * _SIDE, width),
        "prompt_features": noise(BATCH, TOKENS, width),
        "prompt_mask": seen(TOKENS, TOKENS - 3).bool(),
    }


def _by_position(config: Any) -> dict[str, Any]:
    """Patches beside their columns and rows."""
    count = _SIDE * _SIDE
    places = torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE)).flip(1)
    return {
        "pixel_values": noise(BATCH, count, 3 * config.patch_size**2),
        "pixel_position_ids": places.expand(BATCH, count, 2),
    }


def _merged(config: Any) -> dict[str, Any]:
    count = BATCH * _SIDE * _SIDE
    return {
        "pixel_values": noise(count, config.num_channels * config.patch_size**2),
        "grid_thw": torch.tensor([[1, _SIDE, _SIDE]] * BATCH),
        "merge_sizes": torch.tensor([2, 1]),
    }


def _square_patches(config: Any) -> dict[str, Any]:
    count, side = BATCH * _SIDE * _SIDE, config.patch_size
    return {
        "pixel_values": noise(1, count, config.num_channels, side, side),
        "grid_thw": torch.tensor([[1, _SIDE, _SIDE]] * BATCH),
    }


def _filmed_words(config: Any) -> dict[str, Any]:
    part = config.vision_config
    return {"pixel_values": _picture(part, part.num_frames), "input_ids": words(config.text_config)}


def _decoded_patches(config: Any) -> dict[str, Any]:
    return {
        **_placed_patches(config), "decoder_input_ids": words(config.text_config)[:, :DECODED],
    }  # fmt: skip


def _lines(kind: str, height: int, **sizes: int) -> Recipe:
    """Return pictures of lines of text, which the head alone of these models attends in."""
    made = takes(lambda config: {"pixel_values": noise(BATCH, 3, height, 160)}, sets(**sizes))
    return made._replace(kind=f"{kind}ForTextRecognition")


_OF_PLACES = sets(image_token_index=_PLACE)

PICTURE_INPUTS: dict[str, Recipe] = {
    "bridgetower_vision_model": takes(
        lambda c: {"image": noise(BATCH, 3, c.image_size, c.image_size)}, sets(hidden_size=64)
    ),
    "blip-2": takes(
        lambda c: {
            "pixel_values": _picture(c.vision_config),
            "input_ids": _among_words(c, c.num_query_tokens),
        },
        _OF_PLACES,
    ),
    "chameleon": sets(vocabulary_map={"<image>": _PLACE}),
    "florence_vision": takes(lambda c: {"hidden_states": noise(BATCH, 3, 64, 64)}),
    "gemma4_vision": takes(_by_position),
    "idefics": takes(
        lambda c: {
            "input_ids": words(c),
            "pixel_values": _picture(c.vision_config, 1),
            "image_attention_mask": torch.ones(BATCH, TOKENS, 1, dtype=torch.long),
        }
    ),
    "instructblip": takes(_asked(1), _OF_PLACES),
    "instructblipvideo": takes(_asked(_FRAMES), sets(video_token_index=_PLACE)),
    "janus_vqgan": takes(
        lambda c: {"pixel_values": noise(BATCH, 3, 64, 64)}, sets(num_patches=4, base_channels=32)
    ),
    "kosmos-2": takes(_placed, sets(latent_query_num=4)),
    "kosmos_2_5_vision_model": takes(_placed_patches),
    "llama4_vision_model": Recipe(_whole_mlp),
    "mllama_vision_model": takes(_tiles, sets(intermediate_layers_indices=[0, 1])),
    "paddleocr_vl_vision": takes(_square_patches),
    "pix2struct": takes(_decoded_patches, sets(text_config__initializer_range=0.02)),
    "pix2struct_text_model": sets(initializer_range=0.02),
    "pix2struct_vision_model": takes(_placed_patches),
    "pp_ocrv5_mobile_rec": _lines("PPOCRV5MobileRec", 96, hidden_size=16),
    "pp_ocrv5_server_rec": _lines("PPOCRV5ServerRec", 48),
    "pp_ocrv6_small_rec": _lines("PPOCRV6SmallRec", 48),
    "sam3_detr_decoder": takes(_detected),
    "sam3_lite_text_detr_decoder": takes(_detected),
    "sam3_lite_text_detr_encoder": takes(_levels),
    "sam3_lite_text_text_model": sets(num_hidden_layers=4),
    "sam3_lite_text_mask_decoder": takes(_masked),
    "sam3_mask_decoder": takes(_masked),
    "sam3_detr_encoder": takes(_levels),
    "siglip2": takes(lambda c: {"input_ids": words(c), **_patches(c)}),
    "siglip2_vision_model": takes(_patches),
    "udop": takes(_boxes),
    "video_llama_3_vision": takes(_merged),
    "videoprism": takes(
        lambda c: {
            "pixel_values_videos": noise(BATCH, _FRAMES, 3, 72, 72),
            "input_ids": words(c.text_config),
            "attention_mask": seen(TOKENS, TOKENS - 4),
        },
        sets(
            vision_config__image_size=72,
            vision_config__num_frames=_FRAMES,
            vision_config__num_spatial_layers=1,
            vision_config__num_temporal_layers=1,
            vision_config__num_auxiliary_layers=1,
        ),
    ),
    "videomae": takes(_film),
    "vjepa2": takes(
        lambda c: {"pixel_values_videos": noise(BATCH, _FRAMES, 3, 64, 64)},
        sets(crop_size=64, frames_per_clip=_FRAMES),
    ),
    "vivit": takes(_film, sets(num_frames=4)),
    "xclip": takes(_filmed_words),
    "xclip_vision_model": takes(
        lambda c: {"pixel_values": _picture(c, c.num_frames).flatten(0, 1)}
    ),
}

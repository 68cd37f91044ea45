"""Models that see pictures of unequal sizes in one row of patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.bench.models.transformers_models.model_inputs import noise
from polyattn.bench.models.transformers_models.recipe import Recipe, sets, takes

__all__ = ["GRID_INPUTS"]

_GRIDS = (1, 4, 6), (1, 4, 4)
"""Of each picture: frames, rows, columns."""
_PATCHES = sum(t * h * w for t, h, w in _GRIDS)


def _grids(by: int = 1) -> Tensor:
    return torch.tensor([(t, h // by, w // by) for t, h, w in _GRIDS])


def _in_rows(config: Any) -> dict[str, Any]:
    depth = getattr(config, "num_channels", 3) * getattr(config, "patch_temporal", 1)
    return {"pixel_values": noise(_PATCHES, depth * config.patch_size**2), "grid_thw": _grids()}


def _in_squares(config: Any) -> dict[str, Any]:
    return {
        "pixel_values": noise(_PATCHES, 3, config.patch_size, config.patch_size),
        "grid_thw": _grids(),
    }


def _by_fours(config: Any) -> dict[str, Any]:
    """Squares of patches that are merged, the colours last."""
    merge = config.spatial_merge_size
    side = merge * config.patch_size
    return {
        "pixel_values": noise(_PATCHES // merge**2, side, side, config.num_channels),
        "image_grid_thw": _grids(merge),
    }


def _in_one_strip(config: Any) -> dict[str, Any]:
    """Patches beside one another in a strip as high as one of them."""
    side = config.patch_size
    return {
        "pixel_values": noise(1, config.num_channels, side, _PATCHES * side),
        "target_sizes": _grids()[:, 1:],
    }


def _pooled(config: Any) -> dict[str, Any]:
    """Patches of which four are pooled to one, where the picture has as many."""
    width = config.hidden_size * len(config.vision_feature_layer)
    places = torch.arange(12).view(3, 4)
    places[1, 2:], places[2, 1:] = -1, -1
    return {"image_features": noise(2, 6, width), "pooled_patches_idx": places}


def _folded(config: Any) -> dict[str, Any]:
    side = config.patch_size
    return {"pixel_values": noise(2, config.temporal_patch_size, side, side, config.num_channels)}


GRID_INPUTS: dict[str, Recipe] = {
    "dots3_note_vision_encoder": takes(_in_rows, sets(_experts_implementation="eager")),
    "inkling2_vision": takes(_by_fours),
    "inkling_vision": takes(_folded),
    "kimi_k25_vision": takes(_in_squares),
    "minicpm_ocr_vision": takes(_in_one_strip, sets(insert_layer_id=0)),
    "minicpmv4_6_vision": takes(_in_one_strip, sets(insert_layer_id=0)),
    "minicpmv4_7_vision": takes(_in_one_strip, sets(insert_layer_id=0)),
    "molmo2_adapter": takes(_pooled),
    "molmo2_vision": takes(
        lambda c: {"pixel_values": noise(2, 16, c.num_channels * c.patch_size**2)},
        sets(num_position_embeddings=16),
    ),
    "muse_glimmer_vision": takes(_in_rows),
    "muse_spark_vision": takes(_in_rows),
}

"""Models that read a picture in stages: from the layers of a backbone, or at several sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.bench.models.transformers_models.model_inputs import BATCH, noise
from polyattn.bench.models.transformers_models.recipe import Recipe, sets, takes

__all__ = ["BACKBONE_INPUTS", "SAM2_PARTS"]


def _reads(*layers: int, **sizes: Any) -> Recipe:
    """Read what these layers of the backbone give, and keep as many as that needs."""

    def change(config: Any) -> None:
        part = config.backbone_config
        part.num_hidden_layers = max(layers)
        part.stage_names = ["stem", *(f"stage{i + 1}" for i in range(max(layers)))]
        part.set_output_features_output_indices(None, list(layers))
        sets(**sizes).change(config)  # type: ignore[misc]

    return Recipe(change)


def _and(*recipes: Recipe) -> Recipe:
    def change(config: Any) -> None:
        for one in recipes:
            if one.change is not None:
                one.change(config)

    return Recipe(change)


def _shown(side: int, *before: int, channels: int = 3) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {"pixel_values": noise(BATCH, *before, channels, side, side)}


def _padded(side: int) -> Callable[[Any], dict[str, Any]]:
    """Pictures of which one is smaller than the other."""
    mask = torch.ones(BATCH, side, side, dtype=torch.long)
    mask[0, :, side // 2 :] = 0
    return lambda config: {"pixel_values": noise(BATCH, 3, side, side), "pixel_mask": mask}


def _as_wide(config: Any) -> None:
    config.hidden_size = config.backbone_config.hidden_size


def _in_windows(config: Any) -> None:
    """Look in windows in the first layer, and detect on one level."""
    config.backbone_config.window_block_indices = [0]
    config.backbone_config.num_windows, config.backbone_config.num_windows_side = 4, 2
    config.projector_scale_factors = [1.0]
    config.projector_in_channels, config.num_feature_levels = [config.d_model], 1
    config.num_queries = 10


def _few_queries(config: Any) -> None:
    config.backbone_config.window_block_indexes = [0]
    config.backbone_config.num_windows, config.num_queries = 2, 10


_STAGES = {
    "hidden_size": 16, "image_size": [128, 128], "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128], "global_attention_blocks": [3],
    "window_size_per_stage": [8, 4, 6, 3],
}  # fmt: skip
_SAM2_VISION = {
    "backbone_channel_list": [128, 64, 32, 16], "fpn_hidden_size": 64,
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
    **{f"backbone_config__{name}": value for name, value in _STAGES.items()},
}  # fmt: skip


SAM2_PARTS: dict[str, Any] = {
    **{f"vision_config__{name}": value for name, value in _SAM2_VISION.items()},
    "prompt_encoder_config__hidden_size": 64, "prompt_encoder_config__image_size": 128,
    "mask_decoder_config__hidden_size": 64, "mask_decoder_config__mlp_dim": 64,
    "mask_decoder_config__iou_head_hidden_dim": 64,
}  # fmt: skip
"""Of a SAM 2 that sees small pictures."""


def _asked_points(config: Any) -> dict[str, Any]:
    """Pictures in which two things are asked for, one of them by points of which one is none."""
    labels = torch.tensor([[[1, 0], [1, -10]]] * BATCH)
    return {
        "pixel_values": noise(BATCH, 3, 128, 128),
        "input_points": 128 * noise(BATCH, 2, 2, 2).sigmoid(), "input_labels": labels,
    }  # fmt: skip


_FOUR = (8, 8, 16, 16)

BACKBONE_INPUTS: dict[str, Recipe] = {
    "chmv2": _reads(1, 2, 3, 4, post_process_channels=list(_FOUR)),
    "depth_anything": _reads(1, 2, 3, 4, neck_hidden_sizes=_FOUR),
    "depth_pro": takes(
        _shown(256),
        sets(
            patch_size=64, intermediate_hook_ids=(1, 0), fusion_hidden_size=16,
            intermediate_feature_dims=(16, 16), scaled_images_feature_dims=(16, 16, 16),
            image_model_config__image_size=64, image_model_config__patch_size=16,
            patch_model_config__image_size=64, patch_model_config__patch_size=16,
        ),
    ),
    "efficientloftr": takes(_shown(64, 2, channels=1)),
    "lightglue": takes(_shown(64, 2)),
    "lw_detr": takes(_padded(64), _and(_reads(1, 2), Recipe(_in_windows))),
    "pp_doclayout_v2": takes(
        _padded(128),
        sets(
            encoder_hidden_dim=32, d_model=32, decoder_in_channels=[32] * 3, num_queries=20,
            encoder_attention_heads=4, decoder_attention_heads=4, num_labels=20,
            class_thresholds=[0.0] * 20, class_order=list(range(20)),
        ),
    ),
    "prompt_depth_anything": _reads(1, 2, 3, 4, neck_hidden_sizes=_FOUR),
    "rf_detr": takes(_padded(56), _and(_reads(1, 2), Recipe(_few_queries))),
    "sam2": takes(_asked_points, sets(**SAM2_PARTS)),
    "sam2_hiera_det_model": takes(_shown(128), sets(**_STAGES)),
    "sam2_vision_model": takes(_shown(128), sets(**_SAM2_VISION)),
    "tipsv2_dpt": _reads(1, 2, 3, 4, neck_hidden_sizes=list(_FOUR)),
    "vitmatte": takes(
        _shown(64, channels=4),
        _and(
            _reads(
                2, backbone_config__num_channels=4, convstream_hidden_sizes=[8, 8, 16],
                fusion_hidden_sizes=[32, 16, 8, 8],
            ),
            Recipe(_as_wide),
        ),
    ),
    "vitpose": _reads(2, backbone_config__image_size=(64, 48)),
}  # fmt: skip

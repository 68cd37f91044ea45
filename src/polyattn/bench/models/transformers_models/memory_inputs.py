"""Models that are given a memory: here one that keeps nothing, so that every run is the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.bench.models.transformers_models.backbone_inputs import SAM2_PARTS
from polyattn.bench.models.transformers_models.model_inputs import BATCH, TOKENS, noise
from polyattn.bench.models.transformers_models.recipe import Recipe, sets, takes

__all__ = ["MEMORY_INPUTS"]

_SIDE = 8
"""Of a frame's features."""


def _tracked(kind: str, tokens: int) -> Any:
    """Return inputs: the third frame of a film, and what is known of a thing in two before."""

    def make(config: Any) -> dict[str, Any]:
        return {"inference_session": _session(kind, config, tokens, torch.float32), "frame_idx": 2}

    return make


def _session(kind: str, config: Any, tokens: int, dtype: torch.dtype) -> Any:
    import transformers

    class Session(getattr(transformers, f"{kind}InferenceSession")):  # type: ignore[misc]
        sealed = False

        def store_output(self, *given: Any, **named: Any) -> None:
            if not self.sealed:
                super().store_output(*given, **named)

        def double(self) -> Any:
            return _session(kind, config, tokens, torch.float64)

    side = config.image_size
    film = noise(3, 3, side, side)
    found = Session(video=film, video_height=side, video_width=side, dtype=dtype)
    found.cache.cache_vision_features = lambda *given: None
    thing = found.obj_id_to_idx(1)
    for frame, drawn in enumerate((True, False)):
        known = _known(config, tokens, frame, dtype)
        found.store_output(thing, frame, output_value=known, is_conditioning_frame=drawn)
    found.sealed = True
    return found


def _known(config: Any, tokens: int, frame: int, dtype: torch.dtype) -> dict[str, Tensor]:
    of_one = 1, tokens, config.memory_encoder_output_channels
    features = noise(*of_one).roll(frame)
    if config.model_type != "edgetam_video":  # which alone has the item first
        features = features.transpose(0, 1)
    made = {
        "maskmem_features": features,
        "maskmem_pos_enc": features.flip(2),
        "object_pointer": noise(1, config.vision_config.fpn_hidden_size).roll(frame),
    }
    return {name: x.to(dtype) for name, x in made.items()}


def _drafted(config: Any) -> dict[str, Any]:
    """A block of words to come, beside what the model it drafts for made of those before."""
    from transformers.cache_utils import DFlashCache

    class Cache(DFlashCache):  # type: ignore[misc]
        def update(self, keys: Tensor, values: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
            return keys, values

    cache = Cache(config=config)
    cache.set_previous_accepted_tokens(TOKENS)
    width = config.hidden_size * len(config.target_layer_ids)
    return {
        "noise_embeds": noise(BATCH, config.block_size, config.hidden_size),
        "context_hidden_states": noise(BATCH, TOKENS, width),
        "past_key_values": cache,
    }


_MEMORY = {
    "memory_attention_hidden_size": 64, "memory_attention_rope_feat_sizes": [_SIDE, _SIDE],
    "memory_encoder_hidden_size": 64, "memory_encoder_output_channels": 64,
    "mask_downsampler_embed_dim": 64, "memory_fuser_embed_dim": 64,
    "memory_fuser_intermediate_dim": 64, "image_size": 128,
}  # fmt: skip

_SAM3 = {
    "fpn_hidden_size": 64, "backbone_feature_sizes": [[32, 32], [16, 16], [_SIDE, _SIDE]],
    "backbone_config__image_size": 112, "backbone_config__window_size": 4,
    "backbone_config__pretrain_image_size": 56, "backbone_config__global_attn_indexes": [1],
}  # fmt: skip

MEMORY_INPUTS: dict[str, Recipe] = {
    "edgetam_video": takes(
        _tracked("EdgeTamVideo", 8),
        sets(
            **SAM2_PARTS, **_MEMORY, memory_attention_rope_k_sizes=[2, 2],
            perceiver_resampler_num_latents=4, perceiver_resampler_num_latents_2d=4,
        ),
    ),
    "muse_glimmer_assistant": takes(_drafted),
    "sam2_video": takes(_tracked("Sam2Video", _SIDE * _SIDE), sets(**SAM2_PARTS, **_MEMORY)),
    "sam3_tracker_video": takes(
        _tracked("Sam3TrackerVideo", _SIDE * _SIDE),
        sets(**(
            SAM2_PARTS | _MEMORY | {f"vision_config__{name}": x for name, x in _SAM3.items()}
            | {"image_size": 112, "prompt_encoder_config__image_size": 112}
        )),
    ),
}  # fmt: skip

"""Inputs for a small model of transformers, from its configuration and its forward's signature."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from polyattn.bench.models.transformers_models.shrinking import VOCABULARY

__all__ = ["BATCH", "PADDED", "TOKENS", "candidates", "noise", "padded", "seen", "words"]

BATCH, TOKENS, DECODED, PADDED = 2, 14, 9, 4
_SOUND = 16000


def candidates(model: Any) -> Iterator[dict[str, Any]]:
    """Yield inputs that may suit the model, the likeliest first."""
    config = model.config
    known = inspect.signature(model.forward).parameters
    for names in _SETS:
        if not all(name in known or name.startswith("*") for name in names):
            continue
        for size in (0, 1, 2):
            makers = _MAKERS | (_OF_PATCHES if "grid_thw" in names else {})
            made = [makers[name](config, size) for name in names]
            yield {name: x for name, x in zip(names, made, strict=True) if x is not None}
            if not any(name in _OF_SIZES for name in names):
                break


def padded(inputs: dict[str, Any], model: Any, left: bool) -> tuple[dict[str, Any], Tensor] | None:
    """Return the inputs with a padding mask, and the mask (B, T); None if they take none."""
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in inputs or "attention_mask" not in known:
        return None
    mask = torch.ones(BATCH, inputs["input_ids"].shape[1], dtype=torch.long)
    if left:
        mask[0, :PADDED] = 0
    else:
        mask[0, -PADDED:] = 0
    return inputs | {"attention_mask": mask}, mask.bool()


def _words(count: int) -> Any:
    def make(config: Any, size: int) -> Tensor:
        most = min(getattr(config, "vocab_size", None) or VOCABULARY, VOCABULARY) - 110
        most = most if most > 8 else max(getattr(config, "vocab_size", 8) or 8, 4) - 1
        flat = torch.arange(3, 3 + BATCH * count) * 7 % max(most - 4, 1) + 3
        return flat.view(BATCH, count) % max(most, 4)

    return make


def words(config: Any) -> Tensor:
    """Return ids (B, T) that the vocabulary has."""
    made: Tensor = _words(TOKENS)(config, 0)
    return made


def _part(config: Any, *names: str) -> Any:
    for name in names:
        part = getattr(config, name, None)
        if part is not None and hasattr(part, "model_type"):
            return part
    return config


def _side(config: Any, size: int) -> tuple[int, int]:
    part = _part(config, "vision_config", "backbone_config", "encoder")
    side = getattr(part, "image_size", None) or (224, 64, 384)[size]
    if isinstance(side, (list, tuple)):
        return (int(side[0]), int(side[-1]))
    return (int(side), int(side)) if size == 0 else ((64, 64), (224, 224))[size - 1]


def _channels(config: Any) -> int:
    part = _part(config, "vision_config", "backbone_config", "encoder")
    return getattr(part, "num_channels", None) or getattr(part, "in_channels", None) or 3


def _picture(config: Any, size: int) -> Tensor:
    height, width = _side(config, size)
    return noise(BATCH, _channels(config), height, width)


def _film(config: Any, size: int) -> Tensor:
    height, width = _side(config, size)
    part = _part(config, "vision_config")
    frames = getattr(part, "num_frames", None) or getattr(part, "frames_per_clip", None) or 8
    return noise(BATCH, min(frames, 16), _channels(config), height, width)


def _features(config: Any, size: int) -> Tensor:
    part = _part(config, "audio_config", "encoder_config", "text_encoder")
    mels = getattr(part, "num_mel_bins", None) or getattr(part, "input_dim", None)
    mels = mels or getattr(part, "feature_size", None) or 80
    frames = 2 * (getattr(part, "max_source_positions", None) or 750)
    return noise(BATCH, mels, frames) if size == 0 else noise(BATCH, (120, 3000)[size - 1], mels)


def noise(*shape: int) -> Tensor:
    """Return normal numbers, for a shape always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def seen(*lengths: int) -> Tensor:
    """Return a padding mask (B, longest) of these lengths."""
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


def _embeds(config: Any, size: int) -> Tensor:
    width = getattr(config, "hidden_size", None) or getattr(config, "d_model", None) or 64
    return noise(BATCH, TOKENS, width)


def _patches(config: Any, size: int) -> Tensor:
    part = _part(config, "vision_config")
    patch = getattr(part, "patch_size", None) or 14
    depth = getattr(part, "temporal_patch_size", None) or 1
    return noise(BATCH * _GRID[1] * _GRID[2], _channels(config) * depth * patch * patch)


def _grid(config: Any, size: int) -> Tensor:
    return torch.tensor([_GRID] * BATCH)


_GRID = (1, 4, 4)
"""Of a picture in patches: frames, rows, columns."""

_MAKERS: dict[str, Any] = {
    "input_ids": _words(TOKENS),
    "decoder_input_ids": _words(DECODED),
    "pixel_values": _picture,
    "pixel_values_videos": _film,
    "input_values": lambda config, size: noise(BATCH, (_SOUND, 1600, 48000)[size]),
    "input_features": _features,
    "inputs_embeds": _embeds,
    "hidden_states": _embeds,
    "grid_thw": _grid,
    "bbox": lambda config, size: torch.ones(BATCH, TOKENS, 4, dtype=torch.long),
}
_OF_PATCHES = {"pixel_values": _patches, "hidden_states": _patches}
_OF_SIZES = frozenset({"pixel_values", "pixel_values_videos", "input_values", "input_features"})
_SETS = (
    ("input_ids",),
    ("input_ids", "decoder_input_ids"),
    ("input_ids", "bbox"),
    ("input_ids", "pixel_values"),
    ("pixel_values", "grid_thw"),
    ("hidden_states", "grid_thw"),
    ("pixel_values",),
    ("pixel_values_videos",),
    ("input_features",),
    ("input_features", "decoder_input_ids"),
    ("input_values",),
    ("input_values", "decoder_input_ids"),
    ("input_features", "input_ids"),
    ("input_ids", "input_values"),
    ("inputs_embeds",),
    ("hidden_states",),
)

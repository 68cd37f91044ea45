"""Small models of diffusers' architectures, each with inputs; from configurations alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["MODELS", "built"]


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


_TIME = torch.tensor([1.0])

MODELS: dict[str, tuple[dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "FluxTransformer2DModel": (
        {
            "patch_size": 1, "in_channels": 4, "num_layers": 3, "num_single_layers": 3,
            "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 32,
            "pooled_projection_dim": 32, "axes_dims_rope": [4, 4, 8],
        },
        lambda: {
            "hidden_states": _draw(1, 16, 4), "encoder_hidden_states": _draw(1, 6, 32),
            "pooled_projections": _draw(1, 32), "timestep": _TIME, "img_ids": _ids(16, 3),
            "txt_ids": _ids(6, 3),
        },
    ),
    "WanTransformer3DModel": (
        {
            "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12,
            "in_channels": 4, "out_channels": 4, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32,
            "num_layers": 4, "rope_max_seq_len": 32,
        },
        lambda: {
            "hidden_states": _draw(1, 4, 2, 8, 8), "encoder_hidden_states": _draw(1, 6, 16),
            "timestep": _TIME,
        },
    ),
    "SD3Transformer2DModel": (
        {
            "sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 4,
            "attention_head_dim": 8, "num_attention_heads": 4, "caption_projection_dim": 32,
            "joint_attention_dim": 32, "pooled_projection_dim": 64, "out_channels": 4,
        },
        lambda: {
            "hidden_states": _draw(1, 4, 8, 8), "encoder_hidden_states": _draw(1, 6, 32),
            "pooled_projections": _draw(1, 64), "timestep": _TIME,
        },
    ),
    "PixArtTransformer2DModel": (
        {
            "sample_size": 8, "num_layers": 4, "patch_size": 2, "attention_head_dim": 8,
            "num_attention_heads": 3, "caption_channels": 8, "in_channels": 4,
            "cross_attention_dim": 24, "out_channels": 8, "use_additional_conditions": False,
            "norm_type": "ada_norm_single",
        },
        lambda: {
            "hidden_states": _draw(1, 4, 8, 8), "encoder_hidden_states": _draw(1, 6, 8),
            "timestep": _TIME, "added_cond_kwargs": {"aspect_ratio": None, "resolution": None},
        },
    ),
    "SanaTransformer2DModel": (
        {
            "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 4,
            "attention_head_dim": 4, "num_attention_heads": 2, "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 8,
            "sample_size": 8,
        },
        lambda: {
            "hidden_states": _draw(1, 4, 8, 8), "encoder_hidden_states": _draw(1, 6, 8),
            "timestep": _TIME,
        },
    ),
    "AuraFlowTransformer2DModel": (
        {
            "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_mmdit_layers": 3,
            "num_single_dit_layers": 3, "attention_head_dim": 8, "num_attention_heads": 4,
            "caption_projection_dim": 32, "joint_attention_dim": 32, "out_channels": 4,
            "pos_embed_max_size": 256,
        },
        lambda: {
            "hidden_states": _draw(1, 4, 8, 8), "encoder_hidden_states": _draw(1, 6, 32),
            "timestep": _TIME,
        },
    ),
    "CogVideoXTransformer3DModel": (
        {
            "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
            "out_channels": 4, "time_embed_dim": 2, "text_embed_dim": 8, "num_layers": 4,
            "sample_width": 8, "sample_height": 8, "sample_frames": 8, "patch_size": 2,
            "temporal_compression_ratio": 4, "max_text_seq_length": 8,
        },
        lambda: {
            "hidden_states": _draw(1, 1, 4, 8, 8), "encoder_hidden_states": _draw(1, 8, 8),
            "timestep": _TIME,
        },
    ),
    "LTXVideoTransformer3DModel": (
        {
            "in_channels": 8, "out_channels": 8, "num_attention_heads": 4,
            "attention_head_dim": 8, "cross_attention_dim": 32, "num_layers": 4,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": _draw(1, 16, 8), "encoder_hidden_states": _draw(1, 6, 16),
            "timestep": _TIME, "encoder_attention_mask": torch.ones(1, 6).bool(),
            "num_frames": 1, "height": 4, "width": 4,
        },
    ),
    "UNet2DConditionModel": (
        {
            "block_out_channels": (4, 8), "norm_num_groups": 4, "layers_per_block": 2,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 8,
            "attention_head_dim": 2, "out_channels": 4, "in_channels": 4, "sample_size": 16,
        },
        lambda: {
            "sample": _draw(1, 4, 16, 16), "timestep": _TIME,
            "encoder_hidden_states": _draw(1, 6, 8),
        },
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": [4, 8, 8], "in_channels": 3, "out_channels": 3,
            "down_block_types": ["DownEncoderBlock2D"] * 3,
            "up_block_types": ["UpDecoderBlock2D"] * 3, "latent_channels": 4, "norm_num_groups": 4,
        },
        lambda: {"sample": _draw(1, 3, 16, 16)},
    ),
}  # fmt: skip
"""Each class: its configuration, and what makes its inputs."""


def built(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Build a class small, and return it with its inputs."""
    configuration, inputs = MODELS[name]
    torch.manual_seed(0)
    model = getattr(importlib.import_module("diffusers"), name)(**configuration)
    return model.eval().requires_grad_(False), {**inputs(), "return_dict": False}

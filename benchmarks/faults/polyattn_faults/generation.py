"""Models of diffusers, small and with their real code, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyattn_faults.perception import noise

__all__ = ["autoencoder", "dit", "flux", "sd3", "unet", "wan"]


def unet(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The UNet of Stable Diffusion: residual blocks, cross attention, skips."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1,
        block_out_channels=(32, 48), norm_num_groups=8, cross_attention_dim=20,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    inputs = {
        "sample": noise(seed, 2, 4, 8, 8),
        "timestep": torch.tensor([17, 430]),
        "encoder_hidden_states": noise(seed + 1, 2, 7, 20),
        "return_dict": False,
    }
    return model, inputs


def autoencoder(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """AutoencoderKL: an encoder and a decoder of images."""
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        sample_size=16,
    )
    return model, {"sample": noise(seed, 2, 3, 16, 16), "return_dict": False}


def dit(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """DiT: blocks whose norms are shifted and scaled by time and class."""
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=20,
        norm_num_groups=4,
        out_channels=8,
    )
    inputs = {
        "hidden_states": noise(seed, 2, 4, 8, 8),
        "timestep": torch.tensor([17, 430]),
        "class_labels": torch.tensor([3, 11]),
        "return_dict": False,
    }
    return model, inputs


def sd3(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """SD3: text and image tokens attend to each other, with weights of their own."""
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=12,
        num_attention_heads=4, joint_attention_dim=20, caption_projection_dim=48,
        pooled_projection_dim=24, out_channels=4, pos_embed_max_size=8, qk_norm="rms_norm",
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(seed, 2, 4, 8, 8), "timestep": torch.tensor([17, 430]),
        "encoder_hidden_states": noise(seed + 1, 2, 7, 20),
        "pooled_projections": noise(seed + 2, 2, 24), "return_dict": False,
    }  # fmt: skip
    return model, inputs


def flux(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Flux: double and single blocks, rotary positions in several axes."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=8, num_layers=2, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=3, joint_attention_dim=20, pooled_projection_dim=24,
        guidance_embeds=False, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip
    places = torch.stack([torch.zeros(12), torch.arange(12) // 4, torch.arange(12) % 4], 1)
    inputs = {
        "hidden_states": noise(seed, 2, 12, 8), "timestep": torch.tensor([0.17, 0.43]),
        "encoder_hidden_states": noise(seed + 1, 2, 5, 20),
        "pooled_projections": noise(seed + 2, 2, 24), "img_ids": places,
        "txt_ids": torch.zeros(5, 3), "return_dict": False,
    }  # fmt: skip
    return model, inputs


def wan(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Wan: video, with rotary positions in time and space, and cross attention to text."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=3, attention_head_dim=16, in_channels=4,
        out_channels=4, text_dim=20, freq_dim=32, ffn_dim=72, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip
    inputs = {
        "hidden_states": noise(seed, 1, 4, 2, 6, 6),
        "timestep": torch.tensor([430]),
        "encoder_hidden_states": noise(seed + 1, 1, 7, 20),
        "return_dict": False,
    }
    return model, inputs

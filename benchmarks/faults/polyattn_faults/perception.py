"""Models of transformers that see and hear, small and with their real code, and their inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polyattn_faults.language import tokens

__all__ = ["clip", "vit", "wav2vec2", "whisper"]


def noise(seed: int, *shape: int) -> Tensor:
    """Return seeded normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def vit(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """ViT: patches by a convolution, a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=80,
        image_size=16,
        patch_size=4,
        num_labels=10,
        attn_implementation="sdpa",
    )
    return ViTForImageClassification(config), {"pixel_values": noise(seed, 2, 3, 16, 16)}


def clip(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """CLIP: two towers of different sizes, joined at the end."""
    from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

    text = CLIPTextConfig(
        vocab_size=96,
        hidden_size=40,
        intermediate_size=72,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        eos_token_id=3,
        projection_dim=24,
    )
    vision = CLIPVisionConfig(
        hidden_size=56,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
        projection_dim=24,
    )
    config = CLIPConfig(
        text_config=text.to_dict(),
        vision_config=vision.to_dict(),
        projection_dim=24,
        attn_implementation="sdpa",
    )
    ids = tokens(9, seed)
    ids[0, 6], ids[1, 8] = 3, 3
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": noise(seed, 2, 3, 16, 16),
    }
    return CLIPModel(config), inputs


def whisper(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Whisper: convolutions over time, an encoder and a decoder that looks at it."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=96, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=80, decoder_ffn_dim=72, num_mel_bins=16,
        max_source_positions=20, max_target_positions=16, attn_implementation="sdpa",
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    inputs = {
        "input_features": noise(seed, 2, 16, 40),
        "decoder_input_ids": tokens(7, seed),
        "use_cache": False,
    }
    return WhisperForConditionalGeneration(config), inputs


def wav2vec2(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Wav2Vec2: a stack of convolutions over the wave, grouped ones for the position."""
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    config = Wav2Vec2Config(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        conv_dim=(24, 24, 24), conv_kernel=(10, 3, 3), conv_stride=(5, 2, 2),
        num_feat_extract_layers=3, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        attn_implementation="sdpa", feat_extract_norm="group",
    )  # fmt: skip
    return Wav2Vec2Model(config), {"input_values": noise(seed, 2, 600)}

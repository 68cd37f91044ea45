"""Image and video models: a ViT of transformers, and transformers of diffusers.

From their configurations, with seeded weights, few layers and the lengths of real pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.bench.programs.switched_program import Program, of_diffusers, of_transformers

__all__ = ["VISION", "Picture"]


@dataclass(frozen=True)
class Picture:
    """Sizes of a model and of what it sees: `side` of a picture in patches, `frames`, `text`."""

    layers: int = 4
    heads: int = 6
    head_dim: int = 64
    side: int = 14
    frames: int = 1
    text: int = 128
    batch: int = 1


def _seeded(make: Callable[[], Any], dtype: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval().to(getattr(torch, dtype))


def _noise(seed: int, dtype: str, *shape: int) -> Tensor:
    source = torch.Generator().manual_seed(seed + 1)
    return torch.randn(*shape, generator=source).to(getattr(torch, dtype))


def _vit(sizes: Picture, dtype: str, seed: int) -> Program:
    from transformers import ViTConfig, ViTModel

    width = sizes.heads * sizes.head_dim
    config = ViTConfig(
        hidden_size=width, num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads,
        intermediate_size=4 * width, image_size=16 * sizes.side, patch_size=16,
    )  # fmt: skip
    model = _seeded(lambda: ViTModel(config, add_pooling_layer=False), dtype, seed)
    pixels = _noise(seed, dtype, sizes.batch, 3, 16 * sizes.side, 16 * sizes.side)

    @torch.inference_mode()
    def step() -> Tensor:
        return model(pixel_values=pixels).last_hidden_state.float()

    return of_transformers(model, step)


def _flux(sizes: Picture, dtype: str, seed: int) -> Program:
    """Flux: text and picture attend one another as one row."""
    from diffusers import FluxTransformer2DModel

    def make() -> Any:
        return FluxTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=sizes.layers // 2,
            num_single_layers=sizes.layers - sizes.layers // 2,
            attention_head_dim=sizes.head_dim, num_attention_heads=sizes.heads,
            joint_attention_dim=256, pooled_projection_dim=64,
            axes_dims_rope=(sizes.head_dim // 4, sizes.head_dim * 3 // 8, sizes.head_dim * 3 // 8),
        )  # fmt: skip

    model = _seeded(make, dtype, seed)
    patches = sizes.side**2
    rows = torch.arange(patches)
    places = torch.stack([rows * 0, rows // sizes.side, rows % sizes.side], -1).float()
    inputs = {
        "hidden_states": _noise(seed, dtype, sizes.batch, patches, 64),
        "encoder_hidden_states": _noise(seed + 1, dtype, sizes.batch, sizes.text, 256),
        "pooled_projections": _noise(seed + 2, dtype, sizes.batch, 64),
        "timestep": torch.full((sizes.batch,), 0.5, dtype=getattr(torch, dtype)),
        "img_ids": places, "txt_ids": torch.zeros(sizes.text, 3),
    }  # fmt: skip
    return of_diffusers(model, _first_of(model, inputs))


def _wan(sizes: Picture, dtype: str, seed: int) -> Program:
    """Wan: a video attends itself whole, and the text in a call of its own."""
    from diffusers import WanTransformer3DModel

    def make() -> Any:
        return WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=sizes.heads,
            attention_head_dim=sizes.head_dim, in_channels=16, out_channels=16, text_dim=256,
            freq_dim=256, ffn_dim=4 * sizes.heads * sizes.head_dim, num_layers=sizes.layers,
            cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
        )  # fmt: skip

    model = _seeded(make, dtype, seed)
    video = (sizes.batch, 16, sizes.frames, 2 * sizes.side, 2 * sizes.side)
    inputs = {
        "hidden_states": _noise(seed, dtype, *video),
        "encoder_hidden_states": _noise(seed + 1, dtype, sizes.batch, sizes.text, 256),
        "timestep": torch.full((sizes.batch,), 500, dtype=torch.long),
    }
    return of_diffusers(model, _first_of(model, inputs))


def _first_of(model: Any, inputs: dict[str, Any]) -> Callable[[], Tensor]:
    @torch.inference_mode()
    def step() -> Tensor:
        return model(**inputs, return_dict=False)[0].float()

    return step


VISION: Mapping[str, tuple[Callable[[Picture, str, int], Program], Picture]] = {
    "vit batch": (_vit, Picture(batch=8, layers=6)),
    "flux transformer": (_flux, Picture(side=40, heads=8)),
    "wan transformer": (_wan, Picture(side=18, frames=6)),
}
"""Each program: what builds it, and its usual sizes."""

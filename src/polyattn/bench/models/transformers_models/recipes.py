"""What some models need beside what all of them get, to be built small and to run."""

from __future__ import annotations

from typing import Any

from polyattn.bench.models.transformers_models.backbone_inputs import BACKBONE_INPUTS
from polyattn.bench.models.transformers_models.decoder_inputs import DECODER_INPUTS
from polyattn.bench.models.transformers_models.grid_inputs import GRID_INPUTS
from polyattn.bench.models.transformers_models.memory_inputs import MEMORY_INPUTS
from polyattn.bench.models.transformers_models.own_inputs import OWN_INPUTS
from polyattn.bench.models.transformers_models.picture_inputs import PICTURE_INPUTS
from polyattn.bench.models.transformers_models.placed_inputs import PLACED_INPUTS
from polyattn.bench.models.transformers_models.recipe import Recipe, sets
from polyattn.bench.models.transformers_models.sound_inputs import SOUND_INPUTS

__all__ = ["RECIPES", "Recipe"]

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def _of_text(config: Any) -> Any:
    return getattr(config, "text_config", config)


def _rotations(*section: int, **sizes: int) -> Recipe:
    """Set how rotary pairs are shared out among time, height and width, which no default says."""

    def change(config: Any) -> None:
        text = _of_text(config)
        for name, size in sizes.items():
            setattr(text, name, size)
        text.rope_parameters = text.rope_parameters | {"mrope_section": list(section)}

    return Recipe(change)


_GLM4V = _rotations(1, 1, 2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
_ERNIE = _rotations(2, 2, 4)


def _whole_heads(config: Any) -> None:
    """Give zamba2's state-space heads the width that they share, and say which layers attend."""
    config.hybrid_layer_ids = [
        i for i, kind in enumerate(config.layers_block_type) if kind == "hybrid"
    ]
    config.mamba_headdim = config.mamba_expand * config.hidden_size // config.n_mamba_heads


RECIPES: dict[str, Recipe] = {
    "bamba": sets(attn_layer_indices=[1]),
    "granitemoehybrid": sets(layer_types=["linear_attention", "full_attention"]),
    "dots1": sets(n_shared_experts=1),
    "diffusion_gemma_text": sets(top_k_experts=2),
    "glm4v_moe": _GLM4V,
    "glm4v_moe_text": _GLM4V,
    "ernie4_5_vl_moe": _ERNIE,
    "ernie4_5_vl_moe_text": _ERNIE,
    "lfm2_moe": sets(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "cohere_compass_text": sets(
        rope_parameters={"full_attention": _ROPE}, layer_types=["full_attention"] * 2
    ),
    "bailing_hybrid": sets(num_expert_group=2, topk_group=1, num_experts=8),
    "qwen3_omni_moe_talker_text": sets(shared_expert_intermediate_size=32),
    "recurrent_gemma": sets(num_hidden_layers=3),
    "step3p5": sets(sliding_window=5),
    "t5gemma2_text": sets(dropout_rate=0.0),
    "t5gemma2_encoder": sets(text_config__dropout_rate=0.0),
    "xmod": sets(default_language="en_XX"),
    "dbrx": sets(attn_config__rope_theta=10000.0, attn_config__clip_qkv=8.0),
    "zamba2": Recipe(_whole_heads),
    "cohere_compass": sets(
        text_config__rope_parameters={"full_attention": _ROPE},
        text_config__layer_types=["full_attention"] * 2,
    ),
    "zamba": sets(num_hidden_layers=4, layers_block_type=["linear_attention", "hybrid"] * 2),
    **OWN_INPUTS,
    **PICTURE_INPUTS,
    **GRID_INPUTS,
    **PLACED_INPUTS,
    **MEMORY_INPUTS,
    **BACKBONE_INPUTS,
    **DECODER_INPUTS,
    **SOUND_INPUTS,
}

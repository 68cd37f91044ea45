"""Configurations of transformers are made small by what their fields mean."""

from __future__ import annotations

import pytest

transformers = pytest.importorskip("transformers")

from polyattn.bench.models.transformers_models.building import built
from polyattn.bench.models.transformers_models.examining import examine
from polyattn.bench.models.transformers_models.shrinking import share_rotations, shrink


def test_widths_are_divided_and_counts_are_not() -> None:
    config = transformers.LlamaConfig(num_key_value_heads=8)
    shrink(config)
    assert (config.hidden_size, config.intermediate_size) == (256, 688)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 2)
    assert (config.num_hidden_layers, config.head_dim) == (2, 32)
    vision = transformers.CONFIG_MAPPING["qwen2_vl"]().vision_config
    patch = vision.patch_size
    shrink(vision)
    assert vision.patch_size == patch


def test_what_single_layers_have_of_their_own_is_kept_and_made_small() -> None:
    config = transformers.CONFIG_MAPPING["gemma4_text"]()
    wide = {layer.head_dim for layer in config.per_layer_config}
    assert len(wide) == 2, "Gemma 4 has heads of two widths"
    shrink(config)
    assert len(config.layer_types) == len(set(config.layer_types)) == 2
    small = {layer.head_dim for layer in config.per_layer_config}
    assert small == {width // 4 for width in wide}


def test_rotary_pairs_are_shared_out_in_full() -> None:
    config = transformers.CONFIG_MAPPING["glm4v_text"]()
    shrink(config)
    share_rotations(config)
    width = config.hidden_size // config.num_attention_heads
    assert sum(config.rope_parameters["mrope_section"]) == width // 2


@pytest.mark.parametrize("name", ["llama", "gemma4_text", "glm4v_text", "glm_ocr_vision", "bamba"])
def test_models_are_small_and_equal(name: str) -> None:
    assert sum(p.numel() for p in built(name).model.parameters()) < 20_000_000
    found = examine(name)
    assert found.outcome == "equal" and found.calls, found.reason


def test_what_a_model_makes_without_a_dtype_is_float64_in_the_exact_run() -> None:
    found = examine("kosmos_2_text_model")  # fills a float32 tensor with float64's least number
    assert found.outcome == "equal", found.reason


def test_token_ids_that_a_model_hands_on_say_nothing_to_attention() -> None:
    found = examine("glm5_next_text")
    assert found.outcome == "equal", found.reason

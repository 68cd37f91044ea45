"""Registering with transformers: what it puts in place, what it refuses, what it leaves behind."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface, PreTrainedModel

from polyattn import record_selections
from polyattn.errors import MissingDependency, Unsupported
from polyattn.integrations.transformers import is_registered, register, unregister
from tests.integrations.transformers.small_models import ours, small, words


def standing() -> tuple[Any, ...]:
    """Everything of transformers that could have been changed."""
    return (
        dict(vars(AttentionInterface)["_global_mapping"]),
        dict(vars(AttentionMaskInterface)["_global_mapping"]),
        dict(vars(PreTrainedModel)), dict(vars(ContinuousBatchingManager)), list(sys.meta_path),
    )  # fmt: skip


def test_unregistering_leaves_what_stood_before() -> None:
    unregister()
    before = standing()
    assert "polyattn" not in before[0] and not is_registered()
    register()
    assert is_registered() and standing() != before
    unregister()
    assert standing() == before and not is_registered()
    unregister()
    assert standing() == before


def test_registering_twice_is_as_once() -> None:
    unregister()
    before = standing()
    register()
    once = standing()
    register()
    assert standing() == once
    unregister()
    assert standing() == before


def test_the_name_of_somebody_else_comes_back() -> None:
    unregister()

    def theirs(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError

    AttentionInterface.register("polyattn", theirs)
    before = standing()
    try:
        register()
        assert vars(AttentionInterface)["_global_mapping"]["polyattn"] is not theirs
        unregister()
        assert standing() == before
        register()
        AttentionInterface.register("polyattn", theirs)  # and one who comes after us stays
        unregister()
        assert standing() == before
    finally:
        vars(AttentionInterface)["_global_mapping"].pop("polyattn", None)


def test_a_model_that_is_still_set_to_it_says_so() -> None:
    model = small("llama")
    model.set_attn_implementation("polyattn")
    unregister()
    with pytest.raises(KeyError, match="polyattn"):
        model(words(1, 4))


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_without_the_library(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unregister()
    before, find = standing(), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == missing else find(name, *a)
    )
    with pytest.raises(MissingDependency, match=f"no package {missing}.*pip install"):
        register()
    assert standing() == before and not is_registered()


@pytest.mark.parametrize("found", ["4.57.6", "5.5.4", "5.24.0", "6.0.0.dev0"])
def test_versions_outside_of_the_tested_range(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unregister()
    before = standing()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(Unsupported, match=f"got transformers {found}, expected 5.6 to 5.23"):
        register()
    assert standing() == before
    if found.startswith(("5.24", "6")):
        register(untested=True)
        assert is_registered()
    else:
        with pytest.raises(Unsupported, match="nothing was changed"):
            register(untested=True)


PROGRAM = """
import sys
from polyattn.integrations.transformers import is_registered, register
register()
assert is_registered() and "torch" not in sys.modules and "transformers" not in sys.modules
assert [type(x).__name__ for x in sys.meta_path].count("OnImport") == 1
import transformers.modeling_utils as modeling
from transformers.masking_utils import AttentionMaskInterface as masks
assert "polyattn" in vars(modeling.AttentionInterface)["_global_mapping"]
assert "polyattn" in vars(masks)["_global_mapping"]
assert type(modeling.__loader__).__name__ == type(modeling.__spec__.loader).__name__
assert type(modeling.__loader__).__name__ == "SourceFileLoader", modeling.__loader__
assert "OnImport" not in [type(x).__name__ for x in sys.meta_path]
print("in place")
"""


@pytest.mark.slow
def test_it_waits_for_transformers_and_imports_nothing_itself() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert ended.stdout == "in place\n", ended.stderr
    given_up = PROGRAM.split("assert [type")[0] + (
        "from polyattn.integrations.transformers import unregister\n"
        "unregister()\nassert not is_registered()\n"
        "import transformers.modeling_utils as modeling\n"
        "assert 'polyattn' not in vars(modeling.AttentionInterface)['_global_mapping']\n"
        "print('left alone')\n"
    )
    ended = subprocess.run([sys.executable, "-c", given_up], capture_output=True, text=True)
    assert ended.stdout == "left alone\n", ended.stderr


def test_models_that_compute_attention_themselves_are_refused() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    falcon = transformers.FalconModel
    with pytest.raises(Unsupported, match="FalconModel, which computes attention of its own"):
        falcon._from_config(transformers.FalconConfig(**sizes), attn_implementation="polyattn")
    stock = falcon._from_config(transformers.FalconConfig(**sizes))
    assert stock.config._attn_implementation in ("sdpa", "eager")
    with pytest.raises(Unsupported, match=r"SamVisionModel.*or picks its classes by the name"):
        transformers.SamVisionModel._from_config(
            transformers.SamVisionConfig(num_hidden_layers=1), attn_implementation="polyattn"
        )


@pytest.mark.skipif(not hasattr(transformers, "Gemma4AudioModel"), reason="an older transformers")
def test_a_part_that_takes_back_what_its_base_says_is_refused_and_may_stay_eager() -> None:
    audio = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1}
    with pytest.raises(Unsupported, match="Gemma4AudioModel, which computes attention of its own"):
        transformers.Gemma4AudioModel._from_config(
            transformers.Gemma4AudioConfig(**audio), attn_implementation="polyattn"
        )
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, audio_config=audio, vision_config=None,
        image_token_id=60, audio_token_id=61, video_token_id=62,
    )  # fmt: skip
    model = transformers.Gemma4Model._from_config(
        config, attn_implementation={"text_config": "polyattn"}
    )
    assert model.audio_tower.config._attn_implementation == "eager"
    with record_selections() as ran, torch.no_grad():
        model(input_ids=words(1, 6))
        model.audio_tower(input_features=torch.randn(1, 40, 128))
    assert len(ran) == 2  # the layers of the text


def test_probabilities_are_refused() -> None:
    model = small("llama")
    model.set_attn_implementation("polyattn")
    with pytest.raises(Unsupported, match=r'output_attentions.*set_attn_implementation."eager"'):
        model(words(1, 4), output_attentions=True)
    with pytest.raises(ValueError, match="eager"):  # transformers' own
        model.config.output_attentions = True


def test_what_transformers_takes_from_a_configuration_of_pictures_is_passed_over() -> None:
    # Molmo2's adapter and DiffusionGemma's decoder hand them to attention with everything else
    model = small("llama")
    plain, _ = ours(model, lambda: model(words(1, 4)).logits)
    given = {"vision_feature_layer": [1, 0], "mm_token_type_ids": torch.ones(1, 4)}
    named, _ = ours(model, lambda: model(words(1, 4), **given).logits)
    assert torch.equal(named, plain)


OF_TOKENIZERS = (
    "token_type_ids", "special_tokens_mask", "offset_mapping", "length", "overflowing_tokens",
    "num_truncated_tokens", "overflow_to_sample_mapping",
)  # fmt: skip
OF_TRAINERS = (
    "labels", "label", "label_ids", "start_positions", "end_positions", "return_loss",
    "num_items_in_batch",
)  # fmt: skip


@pytest.mark.parametrize("make", ["llama", "distilbert", "modernbert"])
def test_what_tokenizers_and_trainers_give_is_passed_over_as_eager_passes_it(make: str) -> None:
    made = {
        "llama": lambda: small("llama").model,
        "distilbert": lambda: transformers.DistilBertModel(
            transformers.DistilBertConfig(vocab_size=96, dim=32, hidden_dim=48, n_layers=1,
                                          n_heads=2)),
        "modernbert": lambda: transformers.ModernBertModel(
            transformers.ModernBertConfig(vocab_size=96, hidden_size=32, intermediate_size=48,
                                          num_hidden_layers=1, num_attention_heads=2,
                                          pad_token_id=0)),
    }  # fmt: skip
    model, ids = made[make]().eval(), words(1, 4)
    given = dict.fromkeys((*OF_TOKENIZERS, *OF_TRAINERS), torch.ones_like(ids))
    with torch.no_grad():
        model(ids, **given)  # eager: what is refused there need not be taken here
        plain, _ = ours(model, lambda: model(ids).last_hidden_state)
        named, ran = ours(model, lambda: model(ids, **given).last_hidden_state)
    assert ran and torch.equal(named, plain)


@pytest.mark.parametrize("given", [{"temperature": 0.7}, {"s_scale": torch.ones(4)}])
def test_a_keyword_that_nobody_knows_is_refused_by_name(given: dict[str, Any]) -> None:
    model = small("llama")
    name = next(iter(given))
    with pytest.raises(Unsupported, match=f"got the keyword {name}="):
        ours(model, lambda: model(words(1, 4), **given))
    for says_nothing in (None, False):
        ours(model, lambda: model(words(1, 4), **{name: says_nothing}))  # noqa: B023


def test_a_mask_of_another_call_is_refused() -> None:
    from polyattn.errors import InvalidProblem
    from polyattn.integrations.transformers.attention_function import polyattn_attention
    from polyattn.integrations.transformers.mask_function import polyattn_mask

    x = torch.randn(1, 2, 6, 8)
    with pytest.raises(InvalidProblem, match="a mask of 5 queries and 5 keys, expected one of 6"):
        polyattn_attention(torch.nn.Module(), x, x, x, polyattn_mask(1, 5, 5))
    with pytest.raises(Unsupported, match="a mask of type str"):
        polyattn_attention(torch.nn.Module(), x, x, x, "causal")
    with pytest.raises(Unsupported, match="got cache=dict"):
        polyattn_attention(torch.nn.Module(), x, x, x, None, cache={"pages": 1})

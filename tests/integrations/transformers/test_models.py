"""Models on polyattn give what they give on transformers' eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn.bench.models.nearness import in_float64
from polyattn.bench.models.transformers_models.examining import exact_run, examine
from tests.integrations.transformers.small_models import (
    TEXT,
    WORDS,
    agree,
    kinds_of,
    masks_of,
    ours,
    padding,
    small,
    words,
)

B, T = 2, 12


@torch.no_grad()
def both(model: Any, valid: torch.Tensor | None = None, **inputs: Any) -> list[Any]:
    """Compare eager with ours on the valid positions; returns what ours selected."""
    got, ran = ours(model, lambda: model(**inputs))
    assert ran, "no attention reached polyattn"
    agree(got, model(**inputs), exact_run(model, inputs), valid)
    return ran


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", TEXT)
def test_texts_padded_and_not(name: str, side: str) -> None:
    mask = padding(B, T, side)
    ran = both(small(name), mask.bool(), input_ids=words(B, T), attention_mask=mask)
    kinds = kinds_of(ran)
    assert len(ran) == 2 and "Causal" in kinds and not kinds & {"Dense", "BlockMap"}
    assert ("LeftPadding" in kinds) == (side == "left")
    assert ("Padding" in kinds) == (side == "right")


def test_what_each_model_asks_arrives() -> None:
    asked = {}
    for name in ("gemma2", "gpt_oss", "mistral", "llama4", "gemma3"):
        ran = both(small(name), input_ids=words(B, T))
        asked[name] = masks_of(ran)
        assert all(one.problem.kv_heads == 2 and one.problem.heads == 4 for one in ran)
        assert (ran[0].problem.softcap is not None) == (name == "gemma2")
        assert bool(ran[0].problem.sinks) == (name == "gpt_oss")
    window = "Window(left=4, right=None) & Causal('top_left')"
    assert asked["mistral"] == {window}
    assert asked["gemma3"] == asked["gemma2"] == asked["gpt_oss"] == {window, "Causal('top_left')"}
    assert asked["llama4"] == {"Chunked(6) & Causal('top_left')", "Causal('top_left')"}


CUTS = ((0, 6), (6, 13), (13, 14))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_packed_position_ids(name: str) -> None:
    model, row = small(name), words(1, 14)
    places = torch.cat([torch.arange(b - a) for a, b in CUTS])[None]
    packed = {"input_ids": row, "position_ids": places, "use_cache": False}
    ran = both(model, **packed)
    assert {"Segments", "Causal"} <= kinds_of(ran) and "Dense" not in kinds_of(ran)
    with torch.no_grad():
        alone = torch.cat([model(row[:, a:b]).logits for a, b in CUTS], 1)
        got, _ = ours(model, lambda: model(**packed).logits)
    agree({"logits": got}, {"logits": alone}, exact_run(model, packed))


def test_rows_without_padding_that_name_their_lengths() -> None:
    """As a collator makes them for flash attention, with position ids that tell the same or not."""
    model, row = small("mistral"), words(1, 14)
    cuts = torch.tensor([0, 6, 13, 14], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 7, "max_length_k": 7}
    places = torch.cat([torch.arange(b - a) for a, b in CUTS])[None]
    packed = {"input_ids": row, "position_ids": places, "use_cache": False}
    with torch.no_grad():
        got, ran = ours(model, lambda: model(**packed, **lengths).logits)
        agree({"logits": got}, {"logits": model(**packed).logits}, exact_run(model, packed))
        assert "Segments" in kinds_of(ran) and "Packed" not in kinds_of(ran)
        got, ran = ours(model, lambda: model(input_ids=row, use_cache=False, **lengths).logits)
    assert masks_of(ran) == {"Packed(q=4, kv=4) & Window(left=4, right=None) & Causal()"}
    # what follows the first sequence does not change it, nor is it seen by the others
    first = {"input_ids": row[:, :6]}
    with torch.no_grad():
        alone = model(**first).logits
    agree({"logits": got[:, :6]}, {"logits": alone}, exact_run(model, first))


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_bidirectional(side: str) -> None:
    mask = padding(B, T, side)
    ran = both(small("bert"), mask.bool(), input_ids=words(B, T), attention_mask=mask)
    assert "Dense" not in kinds_of(ran) and "Causal" not in kinds_of(ran)


def test_pictures_and_texts() -> None:
    picture = torch.randn(B, 3, 16, 16)
    assert masks_of(both(small("vit"), pixel_values=picture)) == {"none"}
    ran = both(small("clip"), input_ids=words(B, T), pixel_values=picture)
    assert masks_of(ran) == {"none", "Causal('top_left')"}


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("side", ["none", "right"])
def test_cross_attention(name: str, side: str) -> None:
    mask = padding(B, T, side)
    ran = both(
        small(name), input_ids=words(B, T), attention_mask=mask, decoder_input_ids=words(B, 7)
    )
    assert len(ran) == 6 and "Dense" not in kinds_of(ran)
    assert any(one.problem.kv_len == T and one.problem.q_len == 7 for one in ran)
    assert any(one.problem.bias is not None for one in ran) == (name == "t5")


def test_speech() -> None:
    ran = both(
        small("whisper"), input_features=torch.randn(B, 8, 24), decoder_input_ids=words(B, 7)
    )
    assert len(ran) == 6 and masks_of(ran) == {"none", "Causal('top_left')"}


def test_a_prefix_that_all_see() -> None:
    """PaliGemma: the picture and the prompt see each other, the answer is causal."""
    model = small("paligemma")
    ids = torch.cat([torch.full((B, 16), WORDS - 1), words(B, 8)], 1)
    kinds = torch.cat([torch.zeros(B, 20, dtype=torch.long), torch.ones(B, 4, dtype=torch.long)], 1)
    ran = both(
        model, input_ids=ids, pixel_values=torch.randn(B, 3, 16, 16), token_type_ids=kinds,
        attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    assert "Causal('top_left') | Segments(q=2x24, kv=2x24)" in masks_of(ran)


def test_masks_of_the_caller_in_four_dims() -> None:
    model = small("llama")
    allowed = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(0)) > 0.4
    allowed |= torch.eye(T, dtype=torch.bool)
    added = {
        "input_ids": words(B, T),
        "attention_mask": torch.where(allowed, 0.0, torch.finfo(torch.float32).min),
    }
    ran = both(model, **added)
    assert "DenseBias" in ran[0].problem.bias
    with torch.no_grad():
        stock = model(**added)
        got, ran = ours(model, lambda: model(words(B, T), attention_mask=allowed))
    agree(got, stock, exact_run(model, added))
    assert kinds_of(ran) == {"Dense"}


def test_parts_of_a_model_by_name() -> None:
    model = small("clip")
    model.set_attn_implementation({"text_config": "polyattn", "vision_config": "sdpa"})
    assert model.text_model.config._attn_implementation == "polyattn"
    assert model.vision_model.config._attn_implementation == "sdpa"
    from polyattn import record_selections

    with torch.no_grad(), record_selections() as ran:
        model(input_ids=words(B, T), pixel_values=torch.randn(B, 3, 16, 16))
    assert masks_of(ran) == {"Causal('top_left')"}


def test_named_while_loading(tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    small("llama").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="polyattn")
    assert model.config._attn_implementation == "polyattn"
    from polyattn import record_selections

    with torch.no_grad(), record_selections() as ran:
        model(words(B, T))
    assert len(ran) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    inputs = {"input_ids": words(B, T)}
    model = small(name).to(dtype)
    exact = exact_run(model, inputs)
    if dtype == torch.float64:  # both are: what they differ by is far below what is looked for
        with torch.no_grad(), in_float64():
            got, ran = ours(model, lambda: model(**inputs))
        agree({"logits": got.logits.float()}, {"logits": exact["logits"].float()}, exact)
    else:
        with torch.no_grad():
            stock = model(**inputs)
            got, ran = ours(model, lambda: model(**inputs))
        agree(got, stock, exact)
    assert len(ran) == 2


def test_autocast() -> None:
    model, inputs = small("llama"), {"input_ids": words(B, T)}
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(**inputs)
        got, ran = ours(model, lambda: model(**inputs))
    assert len(ran) == 2
    agree(got, stock, exact_run(model, inputs))


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_shapes_alone(name: str) -> None:
    """On the meta device a padding mask has no values to read, and eager attention reads none."""
    model = small(name).to("meta")
    inputs = {"input_ids": words(B, T), "attention_mask": padding(B, T, "left")}
    got, ran = ours(model, lambda: model(**{k: x.to("meta") for k, x in inputs.items()}).logits)
    assert got.is_meta and got.shape == (B, T, WORDS) and len(ran) == 2


def test_a_layer_that_is_called_alone_is_causal_as_it_says() -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    model = small("llama")
    layer = model.model.layers[0].self_attn
    assert isinstance(layer, LlamaAttention) and layer.is_causal
    x = torch.randn(B, T, 32)
    turned = model.model.rotary_emb(x, torch.arange(T)[None])
    with torch.no_grad():
        whole, ran = ours(model, lambda: layer(x, turned, None)[0])
        start, _ = ours(model, lambda: layer(x[:, :5], tuple(r[:, :5] for r in turned), None)[0])
    assert masks_of(ran) == {"Causal('top_left')"}
    assert torch.equal(whole[:, :5].isfinite(), start.isfinite())
    off, ulp = (whole[:, :5] - start).abs().max(), torch.finfo(torch.float32).eps
    assert off <= 8 * ulp * start.abs().max()


def test_layers_that_say_causal_in_a_model_that_has_eager_attention_alone() -> None:
    """BridgeTower's layers for pictures say that they are causal, get no mask, and see all."""
    found = examine("bridgetower")
    assert found.outcome == "equal" and "" in found.masks, found.reason


def test_a_model_of_eager_attention_alone_finds_numbers_in_the_mask_that_it_looks_into() -> None:
    """Informer spreads the mask, and adds it to the scores of the queries that it keeps."""
    found = examine("informer")
    assert found.outcome == "equal" and found.calls, found.reason

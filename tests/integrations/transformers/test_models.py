"""Models on polyattn give what they give on transformers' eager attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.transformers.small_models import (
    TEXT,
    WORDS,
    each,
    kinds_of,
    masks_of,
    near,
    ours,
    padding,
    small,
    words,
)

B, T = 2, 12


@torch.no_grad()
def both(model: Any, valid: torch.Tensor | None = None, **inputs: Any) -> list[Any]:
    """Compare eager with ours on the valid positions; returns what ours selected."""
    stock = model(**inputs)
    got, ran = ours(model, lambda: model(**inputs))
    assert ran, "no attention reached polyattn"
    for (name, want), (_, have) in zip(each(stock), each(got), strict=True):
        if valid is not None and want.shape[:2] != valid.shape:
            continue
        near(*((have, want) if valid is None else (have[valid], want[valid]))), name
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


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_packed_position_ids(name: str) -> None:
    model, length = small(name), 14
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 6, 0]])
    ran = both(model, input_ids=words(1, length), position_ids=positions)
    assert {"Segments", "Causal"} <= kinds_of(ran) and "Dense" not in kinds_of(ran)
    apart = [words(1, length)[:, a:b] for a, b in ((0, 6), (6, 13), (13, 14))]
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in apart], 1)
        packed, _ = ours(model, lambda: model(words(1, length), position_ids=positions).logits)
    near(packed, alone)


def test_rows_without_padding_that_name_their_lengths() -> None:
    """As a collator makes them for flash attention; here with no position ids to tell the same."""
    model, length = small("mistral"), 14
    cuts = torch.tensor([0, 6, 13, 14], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 7, "max_length_k": 7}
    parts = [words(1, length)[:, a:b] for a, b in ((0, 6), (6, 13), (13, 14))]
    places = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with torch.no_grad():
        alone = torch.cat([model(part).logits for part in parts], 1)
        for position_ids in (places, None):
            inner = {} if position_ids is None else {"position_ids": position_ids}
            got, ran = ours(model, lambda: model(words(1, length), **inner, **lengths).logits)  # noqa: B023
            if position_ids is None:  # positions go on, so that only what is seen is the same
                assert masks_of(ran) == {"Packed(q=4, kv=4) & Window(left=4, right=None) & Causal()"}
            else:
                near(got, alone)


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
    added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        stock = model(words(B, T), attention_mask=added).logits
        for mask, kind in ((allowed, "Dense"), (added, "DenseBias")):
            got, ran = ours(model, lambda: model(words(B, T), attention_mask=mask).logits)  # noqa: B023
            near(got, stock)
            problem = ran[0].problem
            assert kind in (problem.mask or problem.bias).signature


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
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = small("gemma2").to(dtype)
    with torch.no_grad():
        stock = model(words(B, T)).logits.double()
        exact = small("gemma2").double()(words(B, T)).logits
        got, ran = ours(model, lambda: model(words(B, T)).logits.double())
    room = torch.finfo(dtype if dtype != torch.float64 else torch.float32).eps
    spread = exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (stock - exact).abs().max() + 4 * room * spread
    assert {one.problem.dtype for one in ran} == {str(dtype).removeprefix("torch.")} or ran


def test_autocast() -> None:
    model = small("llama")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(words(B, T)).logits
        got, ran = ours(model, lambda: model(words(B, T)).logits)
    assert len(ran) == 2
    assert (got - stock).abs().max() < 0.1 * stock.abs().max()

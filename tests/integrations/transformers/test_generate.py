"""What models generate on polyattn is what they generate on transformers' own attention."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StaticCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from polyattn.integrations.transformers import packed_sequences
from tests.integrations.transformers.small_models import (
    TEXT,
    kinds_of,
    masks_of,
    ours,
    padding,
    small,
    words,
)

B, T, MORE = 2, 9, 12  # longer together than every window and chunk


def generated(model: Any, side: str = "left", **how: Any) -> torch.Tensor:
    inputs = {"input_ids": words(B, T), "attention_mask": padding(B, T, side)}
    asked = {"max_new_tokens": MORE, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return model.generate(**inputs, **{**asked, **how})


def same(model: Any, **how: Any) -> list[Any]:
    """Generate both ways; returns what ours selected."""
    stock = generated(model, **how)
    got, ran = ours(model, lambda: generated(model, **how))
    assert torch.equal(got, stock) and ran
    return ran


@pytest.mark.parametrize("name", TEXT)
@pytest.mark.parametrize("side", ["none", "left"])
def test_greedily(name: str, side: str) -> None:
    ran = same(small(name), side=side)
    assert len(ran) == 2 * MORE and "Dense" not in kinds_of(ran)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "llama4"])
def test_a_cache_of_fixed_length(name: str) -> None:
    ran = same(small(name), cache_implementation="static", disable_compile=True)
    assert "Dense" not in kinds_of(ran)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("cache", ["offloaded", "offloaded_static"])
def test_offloaded_caches(name: str, cache: str) -> None:
    """transformers keeps them apart by streams of a device."""
    model = small(name).cuda()
    inputs = {"input_ids": words(B, T).cuda(), "attention_mask": padding(B, T, "left").cuda()}
    asked = {"max_new_tokens": MORE, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    asked |= {"cache_implementation": cache, "disable_compile": True}
    stock = model.generate(**inputs, **asked)
    got, ran = ours(model, lambda: model.generate(**inputs, **asked))
    assert torch.equal(got, stock) and "Dense" not in kinds_of(ran)


def test_a_cache_of_fixed_length_keeps_its_shapes() -> None:
    ran = same(small("gemma3"), cache_implementation="static", disable_compile=True)
    steps = {(one.problem.kv_len, one.problem.mask.signature) for one in ran
             if one.problem.q_len == 1}  # fmt: skip
    assert len(steps) <= 3, steps  # full layers; the window's before and after it is full


def test_a_quantised_cache() -> None:
    """Of float8 keys, transformers' own: the others need packages of their own."""
    cache_utils = pytest.importorskip("transformers.cache_utils")
    layer = getattr(cache_utils, "Fp8QuantizedLayer", None)
    if layer is None:
        pytest.skip("this version of transformers has no cache that needs no other package")
    model = small("llama")

    def run() -> torch.Tensor:
        cache = cache_utils.Cache(layers=[layer() for _ in range(2)])
        return generated(model, past_key_values=cache)

    stock = run()
    got, ran = ours(model, run)
    assert torch.equal(got, stock) and len(ran) == 2 * MORE


def test_a_prompt_in_parts() -> None:
    model = small("mistral")
    same(model, prefill_chunk_size=4)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_beams(name: str) -> None:
    same(small(name), num_beams=3, num_return_sequences=2)


def test_sampling_under_one_seed() -> None:
    model = small("llama")

    def run() -> torch.Tensor:
        torch.manual_seed(3)
        return generated(model, do_sample=True, temperature=0.8)

    stock = run()
    got, _ = ours(model, run)
    assert torch.equal(got, stock)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_assisted(name: str) -> None:
    model, assistant = small(name), small(name)
    with torch.no_grad():  # guesses that are right now and then
        for weight in assistant.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02)
    row = words(1, T)
    asked = {"max_new_tokens": MORE, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    stock = model.generate(row, **asked)
    got, ran = ours(model, lambda: model.generate(row, assistant_model=assistant, **asked))
    assert torch.equal(got, stock)
    assert any(1 < one.problem.q_len < one.problem.kv_len for one in ran)
    got, ran = ours(model, lambda: model.generate(row, prompt_lookup_num_tokens=3, **asked))
    assert torch.equal(got, stock)


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_of_an_encoder_and_a_decoder(name: str) -> None:
    model = small(name)
    asked = {"max_new_tokens": MORE, "do_sample": False, "eos_token_id": -1}
    inputs: dict[str, Any] = {"input_ids": words(B, T), "attention_mask": padding(B, T, "right")}
    if name == "whisper":
        inputs = {"input_features": torch.randn(B, 8, 24)}
    for beams in (1, 3):
        stock = model.generate(**inputs, **asked, num_beams=beams)
        got, ran = ours(model, lambda: model.generate(**inputs, **asked, num_beams=beams))  # noqa: B023
        assert torch.equal(got, stock) and ran


def test_a_prompt_in_two_calls_over_a_cache_of_fixed_length() -> None:
    model = small("llama")

    def run() -> torch.Tensor:
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.no_grad():
            parts = [model(words(B, 14)[:, a:b], past_key_values=cache).logits
                     for a, b in ((0, 8), (8, 12), (12, 13), (13, 14))]  # fmt: skip
        return torch.cat(parts, 1)

    with torch.no_grad():
        whole = model(words(B, 14)).logits
    got, ran = ours(model, run)
    assert torch.equal(got.argmax(-1), whole.argmax(-1))
    assert {(one.problem.q_len, one.problem.kv_len) for one in ran} == {(8, 8), (4, 12), (1, 32)}


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The masks of calls in packed rows, in all threads: batches are run in one of their own."""
    calls: list[str] = []
    attend = packed_sequences.attention

    def heard(*arrays: Any, **options: Any) -> Any:
        calls.append(repr(options["mask"]))
        return attend(*arrays, **options)

    monkeypatch.setattr(packed_sequences, "attention", heard)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("spelling", ["polyattn", "paged|polyattn"])
def test_continuous_batching(name: str, spelling: str, packed_calls: list[str]) -> None:
    model = small(name)
    prompts = [words(1, length)[0].tolist() for length in (13, 4, 21, 8, 17)]

    def run(implementation: str) -> list[list[int]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of the second spelling
            model.set_attn_implementation(implementation)
        asked = GenerationConfig(
            max_new_tokens=MORE, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        # small enough that a prompt is cut, and that not all requests fit at once
        pages = ContinuousBatchingConfig(page_size=16, num_blocks=8, max_batch_tokens=16)
        found = model.generate_batch(
            inputs=prompts, generation_config=asked, continuous_batching_config=pages,
            progress_bar=False,
        )  # fmt: skip
        return [found[key].generated_tokens for key in sorted(found)]

    stock = run("sdpa")
    assert all(len(tokens) == MORE for tokens in stock) and not packed_calls
    assert run(spelling) == stock
    windows = [call for call in packed_calls if "Window(left=4" in call]
    assert packed_calls and all("Packed" in call and "Causal()" in call for call in packed_calls)
    assert bool(windows) == (name != "llama")
    assert (len(windows) == len(packed_calls)) == (name == "mistral")


@pytest.mark.slow
def test_compiled_decoding_over_a_cache_of_fixed_length() -> None:
    """As many graphs as on sdpa, and the same tokens."""
    import torch._dynamo as dynamo

    model = small("gemma3")
    stock = generated(model)

    def run() -> torch.Tensor:
        dynamo.reset()
        dynamo.utils.counters.clear()
        model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        try:
            return generated(model, cache_implementation="static")
        finally:
            del model.forward

    graphs = {}
    model.set_attn_implementation("sdpa")
    assert torch.equal(run(), stock)
    graphs["sdpa"] = dynamo.utils.counters["stats"]["unique_graphs"]
    got, ran = ours(model, run)
    assert torch.equal(got, stock)
    graphs["polyattn"] = dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs["polyattn"] <= graphs["sdpa"], graphs
    assert "Dense" not in kinds_of(ran) and len(masks_of(ran)) > 1
    dynamo.reset()

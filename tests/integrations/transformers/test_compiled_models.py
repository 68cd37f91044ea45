"""Whole models under torch.compile and torch.export: one graph, masks as values where possible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo as dynamo

from polyattn import record_selections
from polyattn.bench.models.transformers_models.examining import exact_run
from tests.integrations.transformers.small_models import agree, kinds_of, padding, small, words

pytestmark = pytest.mark.slow
B, T = 2, 12


def inputs_of(name: str, side: str, length: int = T) -> dict[str, Any]:
    if name == "vit":
        return {"pixel_values": torch.randn(B, 3, 16, 16)}
    inputs: dict[str, Any] = {"input_ids": words(B, length)}
    if side != "absent":
        inputs["attention_mask"] = padding(B, length, side)
    return inputs if name in ("bert", "t5") else inputs | {"use_cache": False}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.parametrize("side", ["absent", "left"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral", "bert", "vit"])
def test_one_graph(name: str, side: str) -> None:
    model, inputs = small(name), inputs_of(name, side)
    valid = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
    exact = exact_run(model, inputs)
    with torch.no_grad():
        stock = model(**inputs)
        model.set_attn_implementation("polyattn")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with record_selections() as ran:
            got = compiled(**inputs)
    agree(got, stock, exact, valid)
    assert len(ran) == 2
    if side == "left" and name in ("llama", "mistral"):  # told by a row of each sequence
        assert {"Causal", "Dense"} <= kinds_of(ran)
        assert ("Window" in kinds_of(ran)) == (name == "mistral")


def test_cross_attention_in_one_graph() -> None:
    model = small("t5")
    inputs = {**inputs_of("t5", "right"), "decoder_input_ids": words(B, 7), "use_cache": False}
    exact = exact_run(model, inputs)
    with torch.no_grad():
        stock = model(**inputs)
        model.set_attn_implementation("polyattn")
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(**inputs)
    agree({"logits": got.logits}, {"logits": stock.logits}, exact)


def test_lengths_that_differ_compile_no_oftener_than_on_sdpa() -> None:
    graphs = {}
    model = small("llama")
    for implementation in ("sdpa", "polyattn"):
        dynamo.reset()
        dynamo.utils.counters.clear()
        model.set_attn_implementation(implementation)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            for length in (9, 12, 17, 23, 31):
                compiled(**inputs_of("llama", "left", length))
        graphs[implementation] = dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs["polyattn"] <= graphs["sdpa"], graphs


def test_layers_that_are_compiled_alone() -> None:
    """The mask is made outside, and is an argument of what was compiled."""
    model = small("mistral")
    exact = exact_run(model, inputs_of("mistral", "left"))
    valid = padding(B, T, "left").bool()
    with torch.no_grad():
        stock = model(**inputs_of("mistral", "left"))
        model.set_attn_implementation("polyattn")
        for layer in model.model.layers:
            layer.compile(fullgraph=True, backend="aot_eager")
        with record_selections() as ran:
            got = model(**inputs_of("mistral", "left"))
    agree(got, stock, exact, valid)
    assert "LeftPadding" in kinds_of(ran) and "Dense" not in kinds_of(ran)


def test_inductor() -> None:
    model, inputs = small("llama"), inputs_of("llama", "right")
    exact = exact_run(model, inputs)
    with torch.no_grad():
        stock = model(**inputs)
        model.set_attn_implementation("polyattn")
        got = torch.compile(model, fullgraph=True)(**inputs)
    agree(got, stock, exact, inputs["attention_mask"].bool())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_exported(name: str, strict: bool) -> None:
    model, inputs = small(name), inputs_of(name, "left")
    exact = exact_run(model, inputs)
    with torch.no_grad():
        stock = model(**inputs)
        model.set_attn_implementation("polyattn")
        program = torch.export.export(model, (), inputs, strict=strict).module()
        agree(program(**inputs), stock, exact, inputs["attention_mask"].bool())
        # no value of the padding is in the graph
        other = inputs | {"attention_mask": padding(B, T, "right")}
        found = program(**other)
        model.set_attn_implementation("eager")
        agree(found, model(**other), exact_run(model, other), other["attention_mask"].bool())

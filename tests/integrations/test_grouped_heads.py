"""Models of transformers whose calls bring masks: key heads are not repeated while routed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo

from polyattn.bench.models.transformers_models.examining import exact_run
from polyattn.integrations import grouped_heads
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.selection import Selection
from tests.integrations.transformers.small_models import agree, padding, small, words

sdpa_attention = pytest.importorskip("transformers.integrations.sdpa_attention")
HELD = [sdpa_attention.use_gqa_in_sdpa]  # a name of its own would be routed, too


class Heard:
    """A listener that keeps what ran."""

    def __init__(self) -> None:
        self.ran_on: list[Selection] = []

    def ran(self, selection: Selection, call: Any) -> None:
        self.ran_on.append(selection)

    def passed(self, reason: str, call: Any) -> None:
        raise AssertionError(reason)

    @property
    def heads(self) -> set[tuple[int, int]]:
        problems = [selection.problem for selection in self.ran_on]
        return {(p.heads, p.kv_heads) for p in problems if p is not None}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.slow
def test_compiled_steps_on_a_padded_text_keep_their_heads_grouped() -> None:
    model = small("llama")
    inputs = {
        "input_ids": words(2, 12), "attention_mask": padding(2, 12, "left"), "use_cache": False,
    }  # fmt: skip
    exact = exact_run(model, inputs)
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        stock = model(**inputs)
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        heard = Heard()
        with route_sdpa(heard):
            got = compiled(**inputs)
        assert heard.heads == {(4, 2)}
        agree(got, stock, exact, inputs["attention_mask"].bool())
        again = compiled(**inputs)  # what was compiled under the routing is not used outside
    agree(again, stock, exact, inputs["attention_mask"].bool())


@pytest.mark.slow
def test_generation_on_a_static_cache_gives_the_same_text() -> None:
    model = small("llama")
    model.set_attn_implementation("sdpa")
    options: dict[str, Any] = {
        "input_ids": words(2, 9), "attention_mask": padding(2, 9, "left"), "max_new_tokens": 8,
        "do_sample": False, "cache_implementation": "static", "eos_token_id": None,
    }  # fmt: skip
    stock = model.generate(**options, disable_compile=True)
    forward = model.forward
    model.forward = torch.compile(forward, backend="aot_eager")
    heard = Heard()
    with route_sdpa(heard):
        assert torch.equal(model.generate(**options), stock)
    assert (4, 2) in heard.heads and (4, 4) not in heard.heads


@pytest.mark.parametrize("training", [False, True])
def test_eager_calls_on_a_padded_text_keep_their_heads_grouped(training: bool) -> None:
    model = small("llama")
    inputs = {
        "input_ids": words(2, 12), "attention_mask": padding(2, 12, "left"), "use_cache": False,
    }  # fmt: skip
    model.set_attn_implementation("sdpa")
    model.train(training)
    found, heard = [], Heard()
    for routing in (contextlib.nullcontext(), route_sdpa(heard)):
        with routing, torch.set_grad_enabled(training):
            logits = model(**inputs).logits[inputs["attention_mask"].bool()]
        grads = (
            torch.autograd.grad(logits.square().sum(), list(model.parameters())) if training else ()
        )
        found.append((logits, *grads))
    assert heard.heads == {(4, 2)}
    for got, stock in zip(*reversed(found), strict=True):
        torch.testing.assert_close(
            got, stock, rtol=1e-3, atol=1e-4 * float(stock.abs().max()) + 1e-6
        )


def test_steps_of_one_query_and_other_devices_are_asked_of_transformers_itself() -> None:
    key, mask = torch.zeros(1, 2, 8, 4), torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with route_sdpa():
        stand_in = sdpa_attention.use_gqa_in_sdpa
        assert stand_in is not HELD[0]
        assert stand_in(mask, key, key) is False and stand_in(None, key, key) is True
        many = mask.expand(1, 1, 3, 8)
        assert stand_in(many, key, key) is True
        assert stand_in(many.to("meta"), key.to("meta"), key.to("meta")) is False
    assert sdpa_attention.use_gqa_in_sdpa is HELD[0]

    def asked(x: Any) -> Any:
        return x + 1 if grouped_heads._is_grouped(mask, x, x) else x - 1

    with route_sdpa():
        on_meta = torch.compile(asked, backend="eager", fullgraph=True)(key.to("meta"))
        on_cpu = torch.compile(asked, backend="eager", fullgraph=True)(key)
    assert on_meta.is_meta and torch.equal(on_cpu, key + 1)


class Asks(torch.nn.Module):
    """A module that does one thing where heads are grouped, and another where they are not."""

    def forward(self, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return key + 1 if sdpa_attention.use_gqa_in_sdpa(mask, key, key) else key - 1


@pytest.mark.parametrize("strict", [True, False])
def test_what_is_exported_is_transformers_own(strict: bool) -> None:
    key, mask = torch.zeros(1, 2, 8, 4), torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with route_sdpa():
        program = torch.export.export(Asks(), (key, mask), strict=strict)
    assert torch.equal(program.module()(key, mask), key - 1)


LATE = """
from polyattn.integrations.grouped_heads import _is_grouped
from polyattn.integrations.sdpa_patch import route_sdpa
import sys
assert "transformers" not in sys.modules
with route_sdpa():
    with route_sdpa():
        from transformers.integrations import sdpa_attention
        assert sdpa_attention.use_gqa_in_sdpa is _is_grouped
assert sdpa_attention.use_gqa_in_sdpa.__module__ == sdpa_attention.__name__
with route_sdpa():
    assert sdpa_attention.use_gqa_in_sdpa is _is_grouped
from polyattn.integrations.on_import import OnImport
assert not any(isinstance(one, OnImport) for one in sys.meta_path)
"""


def test_a_library_that_is_imported_while_calls_are_routed_is_seen_to() -> None:
    subprocess.run([sys.executable, "-c", LATE], check=True, timeout=300)

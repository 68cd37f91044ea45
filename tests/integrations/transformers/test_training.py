"""Gradients, dropout and checkpointing of models on polyattn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn.bench.models.nearness import compare, in_float64
from tests.integrations.transformers.small_models import masks_of, ours, padding, small, words

B, T = 2, 12


def gradients(model: Any, loss: Callable[[Any], torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss(model).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def agree(got: Any, stock: Any, exact: Any) -> None:
    """Compare all gradients at once, each in units of its own size.

    Those of the keys' biases are left out: they are zero, but for rounding, as what is added to
    all scores of a query changes nothing.
    """
    names = [name for name in stock if not name.endswith("k_proj.bias")]
    assert got.keys() == stock.keys()

    def joined(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = [exact[name].pow(2).mean().sqrt().clamp(min=1e-30) for name in names]
        parts = [found[name].double() / size for name, size in zip(names, sizes, strict=True)]
        whole = torch.cat([part.flatten() for part in parts])
        return {"gradients": whole.to(found[names[0]].dtype)}

    compared = compare(joined(got), joined(stock), joined(exact))
    assert compared.excess is None, compared


def of_text(model: Any) -> torch.Tensor:
    mask = padding(B, T, "left")
    after = mask.bool() & mask.roll(1, 1).bool()  # what stands behind padding is told by nothing
    labels = torch.where(after, words(B, T), -100)
    return model(input_ids=words(B, T), attention_mask=mask, labels=labels).loss


def of_pairs(model: Any) -> torch.Tensor:
    mask = padding(B, T, "right")
    return model(input_ids=words(B, T), attention_mask=mask, labels=words(B, 7)).loss


LOSSES = {
    "llama": of_text, "gemma2": of_text, "gpt_oss": of_text, "mistral": of_text,
    "llama4": of_text, "t5": of_pairs, "bart": of_pairs,
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    """Of sinks and of position biases, too."""
    model, loss = small(name), LOSSES[name]
    stock = gradients(model, loss)
    with in_float64():
        exact = gradients(copy.deepcopy(model).double(), loss)
    got, ran = ours(model, lambda: gradients(model, loss))
    assert ran
    agree(got, stock, exact)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    model = small("gemma2").train()
    stock, ran = ours(model, lambda: gradients(model, of_text))
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    got, again = ours(model, lambda: gradients(model, of_text))
    assert len(ran) == 2 and len(again) == 4  # the forward, and once more in the backward
    assert masks_of(again) == masks_of(ran)
    assert all(torch.equal(got[name], stock[name]) for name in stock)


def test_dropout_only_while_training_and_by_the_seed() -> None:
    model = small("llama")
    model.config.attention_dropout = 0.3
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            return model(words(B, T)).logits

    calm, ran = ours(model, lambda: run(1))
    assert all(one.problem.dropout_p == 0 for one in ran)
    model.train()
    first, ran = ours(model, lambda: run(1))
    assert all(one.problem.dropout_p == 0.3 for one in ran)
    again, _ = ours(model, lambda: run(1))
    other, _ = ours(model, lambda: run(2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert not torch.equal(first, calm)


def test_dropout_means_what_it_means_on_eager() -> None:
    """The mean over many draws is that of eager, as near as that many draws tell."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaConfig

    draws, p = 2000, 0.25
    config = LlamaConfig(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        attention_dropout=p, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    layer = LlamaAttention(config, 0).train()
    x = torch.randn(1, 5, 16).expand(draws, -1, -1)
    flat = torch.ones(1, 5, 8), torch.zeros(1, 5, 8)
    with torch.no_grad():
        found = {}
        for name in ("eager", "polyattn"):
            layer.config._attn_implementation = name
            torch.manual_seed(4)
            found[name] = layer(x, flat, None, is_causal=False)[0]
    spread = found["eager"].std(0) / draws**0.5
    apart = (found["polyattn"].mean(0) - found["eager"].mean(0)).abs()
    assert (apart <= 6 * spread).all()
    ratio = found["polyattn"].std(0) / found["eager"].std(0)
    assert ((ratio - 1).abs() < 6 / draws**0.5).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_compiled_training(name: str) -> None:
    model = small(name)
    stock = gradients(model, of_text)
    with in_float64():
        exact = gradients(copy.deepcopy(model).double(), of_text)

    def run() -> dict[str, torch.Tensor]:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        model.zero_grad()
        of_text(compiled).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    got, ran = ours(model, run)
    torch._dynamo.reset()
    assert ran
    agree(got, stock, exact)

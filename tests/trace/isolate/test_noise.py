"""Isolate's thresholds come from the noise of a module's own arithmetic, where that is large."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyattn.hooks import compare, isolate
from polyattn.trace import read
from polyattn.trace.compare.thresholds import NOISE
from polyattn.trace.isolate.rounding import ROUNDINGS, moved

BF16, SPACING = torch.bfloat16, 2.0**-7

Core = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """As libraries write it: scores, their sum with the bias and weights rounded to bfloat16."""
    scores = q @ k.transpose(-1, -2) + bias
    return scores.float().softmax(-1).to(q.dtype) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)


class Attention(nn.Module):
    """T5's: no scale, so that scores are large, a bias of positions, causal."""

    def __init__(self, core: Core, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in "qkvo")
        self.bias = nn.Parameter(torch.randn(heads, 1, 1))
        self.core, self.heads = core, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        return self.o(self.core(q, k, v, self.mask(q, k)).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def mask(self, q: Tensor, k: Tensor) -> Tensor:
        at = torch.arange(k.shape[-2])
        apart = at - at[:, None]
        return (self.bias * apart).masked_fill(apart > 0, -torch.inf).to(q.dtype)


def attention(core: Core, seed: int) -> tuple[Attention, Tensor]:
    torch.manual_seed(seed)
    made = Attention(core).eval()
    with torch.no_grad():
        for part in (made.q, made.k):
            part.weight.mul_(3.0)
    return made.to(BF16), torch.randn(2, 24, 64).to(BF16)


def port_of(model: Attention, core: Core) -> Attention:
    port = copy.deepcopy(model)
    port.core = core
    return port


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("one", "other"), [(eager, fused), (fused, eager)])
def test_another_kernel_is_the_same_though_scores_are_large(
    one: Core, other: Core, seed: int
) -> None:
    model, x = attention(one, seed)
    verdict = isolate(port_of(model, other), model, x)
    errors = {row.module: row.error_in or 0.0 for row in verdict.rows}
    assert errors["o"] > SPACING  # more than a rounding of what is fed
    assert verdict.equal is True, str(verdict)
    assert any("measured noise" in note for note in verdict.notes)


def scaled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def swapped(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    out = fused(q, k, v, bias)
    return out.flatten(1, 2).unflatten(1, (out.shape[2], out.shape[1])).transpose(1, 2)


def off_by_one(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    allowed = torch.ones_like(bias[0], dtype=torch.bool).tril(1)
    finite = torch.where(bias.isinf(), 0.0, bias)
    return fused(q, k, v, finite.masked_fill(~allowed, -torch.inf))


def unbiased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return fused(q, k, v, torch.where(bias.isinf(), bias, 0.0))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", [scaled, swapped, off_by_one, unbiased])
def test_a_fault_in_such_a_module_is_named(fault: Core, seed: int) -> None:
    model, x = attention(eager, seed)
    verdict = isolate(port_of(model, fault), model, x)
    assert verdict.equal is False, str(verdict)
    assert verdict.culprit is not None
    assert (verdict.culprit.module, verdict.culprit.at) == ("", "o")
    assert verdict.culprit.error > 2 * verdict.culprit.threshold


def test_a_fault_beside_another_kernel_is_named(tmp_path: Path) -> None:
    model, x = attention(eager, 0)
    port = port_of(model, fused)
    port.o.forward = lambda y: F.linear(y, port.o.weight) * 1.03  # type: ignore[method-assign]
    verdict = isolate(port, model, x, path=tmp_path / "port.jsonl")
    assert verdict.culprit is not None and verdict.culprit.module == "o"
    kinds = {row.module: row.verdict for row in verdict.rows}
    assert {one for name, one in kinds.items() if name not in ("o", "")} == {"same"}


def test_the_noise_is_kept_in_the_trace(tmp_path: Path) -> None:
    model, x = attention(eager, 0)
    with torch.no_grad():
        from polyattn.hooks import trace

        with trace(model, tmp_path / "reference.jsonl", tensors=""):
            model(x)
    before = torch.get_rng_state()
    port = port_of(model, fused)
    verdict = isolate(port, tmp_path / "reference.jsonl", x, path=tmp_path / "port.jsonl")
    assert verdict.equal is True
    assert torch.equal(torch.get_rng_state(), before)
    noise = {(r.module, r.phase): r.noise for r in read(tmp_path / "port.jsonl").records}
    assert noise["o", "in"] is not None and noise["q", "out"] is not None
    assert noise["o", "in"] > 2 * noise["q", "out"]  # a softmax of large scores multiplies it
    again = compare(tmp_path / "reference.jsonl", tmp_path / "port.jsonl")
    assert (again.equal, again.notes) == (verdict.equal, verdict.notes)
    raised = next(note for note in again.notes if "measured noise" in note)
    assert f"{NOISE * max(value for value in noise.values() if value):.1e}" in raised


class Fickle(nn.Module):
    """Takes another way where its input is moved ever so little."""

    def __init__(self, known: Tensor) -> None:
        super().__init__()
        self.first, self.usual, self.other = (nn.Linear(64, 64) for _ in "abc")
        self.known = known

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.usual if torch.equal(x, self.known) else self.other)(x)  # type: ignore[no-any-return]


def test_where_noise_cannot_be_measured_that_is_said() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64).to(BF16)
    model = Fickle(x).to(BF16).eval()
    model.known = model.first(x).detach()
    port = copy.deepcopy(model)
    port.usual.forward = lambda y: F.linear(y, port.usual.weight)  # type: ignore[method-assign]
    verdict = isolate(port, model, x)
    assert verdict.culprit is not None and verdict.culprit.module == "usual"
    assert verdict.culprit.threshold == SPACING
    assert any("could not be measured" in note and "'usual'" in note for note in verdict.notes)


def t5(implementation: str, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=100,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        initializer_factor=2.5,
    )
    config._attn_implementation = implementation
    torch.manual_seed(seed)
    model = transformers.T5Model(config).eval().bfloat16()
    tokens = torch.randint(0, 100, (2, 40))
    allowed = torch.ones(2, 24, dtype=torch.long)
    allowed[1, 20:] = 0
    return model, {
        "input_ids": tokens[:, :24],
        "attention_mask": allowed,
        "decoder_input_ids": tokens[:, 24:],
    }


@pytest.mark.parametrize("seed", range(3))
def test_a_t5_whose_eager_attention_became_sdpa_is_the_same(seed: int) -> None:
    (model, inputs), (port, _) = t5("eager", seed), t5("sdpa", seed)
    port.load_state_dict(model.state_dict())
    verdict = isolate(port, model, inputs)
    assert max(row.error_in or 0.0 for row in verdict.rows) > SPACING
    assert verdict.equal is True, str(verdict)


@pytest.mark.parametrize("fault", ["scale", "mask", "heads", "bias"])
def test_a_t5_with_sdpa_and_a_fault_is_not(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (model, inputs), (port, _) = t5("eager", 0), t5("sdpa", 0)
    bias: Any = model.get_submodule("encoder.block.0.layer.0.SelfAttention.relative_attention_bias")
    with torch.no_grad():
        bias.weight.mul_(10.0)
    port.load_state_dict(model.state_dict())
    wrong: Any = port.get_submodule("encoder.block.1.layer.0.SelfAttention")
    stock, inside = F.scaled_dot_product_attention, [False]

    def broken(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not inside[0]:
            return stock(q, k, v, **options)
        mask = options["attn_mask"]
        if fault == "scale":
            options["scale"] = q.shape[-1] ** -0.5
        elif fault == "mask":
            options["attn_mask"] = mask.roll(1, -1)
        elif fault == "bias":
            options["attn_mask"] = torch.where(mask < -1e4, mask, 0.0)
        out = stock(q, k, v, **options)
        return out.flip(1) if fault == "heads" else out

    monkeypatch.setattr(F, "scaled_dot_product_attention", broken)
    wrong.register_forward_pre_hook(lambda *_: inside.__setitem__(0, True))
    wrong.register_forward_hook(lambda *_: inside.__setitem__(0, False))
    verdict = isolate(port, model, inputs)
    assert verdict.culprit is not None, str(verdict)
    assert verdict.culprit.module == "encoder.block.1.layer.0.SelfAttention"
    assert verdict.culprit.others == ()


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64])
def test_what_is_moved_is_moved_by_a_rounding(dtype: torch.dtype) -> None:
    t = torch.tensor([[1.0, -3.0, 0.0, torch.inf], [-torch.inf, torch.nan, 1e-3, 250.0]]).to(dtype)
    t[0, 2] = torch.finfo(dtype).min
    names = [f"run {n}" for n in range(16)]
    found = torch.stack([moved(t, name) for name in names])
    finite = t.isfinite()
    assert torch.equal(found.isfinite(), finite.expand_as(found))  # the least number stays one
    apart = ((found - t) / t)[:, finite].double().abs()
    assert 0 < float(apart.max()) <= 1.2 * ROUNDINGS * torch.finfo(dtype).eps
    assert torch.equal(moved(t, "x"), moved(t, "x")) or bool(t.isnan().any())
    assert torch.equal(moved(torch.zeros(3, dtype=dtype), "x"), torch.zeros(3, dtype=dtype))


def test_what_is_not_rounded_is_not_moved() -> None:
    for t in (torch.arange(4), torch.tensor([True, False]), torch.empty(0, 3)):
        assert torch.equal(moved(t, "x"), t)
    assert moved(torch.tensor(2.0), "x").shape == ()
    assert not torch.equal(moved(torch.ones(64, dtype=torch.complex64), "x"), torch.ones(64) + 0j)

"""Isolate: which modules of a port differ by themselves, each on the reference's tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyattn.errors import TraceError
from polyattn.hooks import ModuleHookManager, isolate, trace, trace_step
from polyattn.trace import read

BF16 = torch.bfloat16


class Block(nn.Module):
    """Norm, two linear layers and a residual; `act` is what a port may get wrong."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.act: Callable[[Tensor], Tensor] = F.gelu

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 4, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(3)
    return Model().eval().to(BF16)


def named(verdict: Any) -> tuple[str, str]:
    assert verdict.culprit is not None, str(verdict)
    return verdict.culprit.module, verdict.culprit.kind


def halves(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    """A matmul summed in two parts: another rounding, no fault."""
    k = module.in_features // 2

    def forward(x: Tensor) -> Tensor:
        first = F.linear(x[..., :k], module.weight[:, :k])
        return first + F.linear(x[..., k:], module.weight[:, k:]) + module.bias

    return forward


def test_a_clean_port_that_rounds_otherwise_is_the_same(model: Model) -> None:
    port = copy.deepcopy(model)
    for module in port.modules():
        if isinstance(module, nn.Linear):
            module.forward = halves(module)  # type: ignore[method-assign]
    verdict = isolate(port, model, TOKENS)
    assert verdict.equal is True, str(verdict)
    errors = [row.error_out for row in verdict.rows if row.error_out]
    assert errors and max(errors) < 2**-7  # it did round otherwise, in many places


@pytest.mark.parametrize("layer", range(4))
def test_code_between_two_children_is_blamed_in_low_precision(model: Model, layer: int) -> None:
    port = copy.deepcopy(model)
    port.blocks[layer].act = lambda x: F.gelu(x) * 1.02  # type: ignore[union-attr]
    verdict = isolate(port, model, TOKENS)
    assert named(verdict) == (f"blocks.{layer}", "input")
    assert verdict.culprit is not None and verdict.culprit.others == ()


def test_every_fault_is_named_and_nothing_is_inherited(model: Model) -> None:
    port = copy.deepcopy(model)
    for at in (0, 2):
        norm = port.blocks[at].norm  # type: ignore[union-attr]
        norm.eps = 0.5
    verdict = isolate(port, model, TOKENS)
    assert named(verdict) == ("blocks.0.norm", "output")
    assert verdict.culprit is not None and verdict.culprit.others == ("blocks.2.norm",)
    kinds = {row.module: row.verdict for row in verdict.rows}
    assert kinds["blocks.0.norm"] == "culprit" and kinds["blocks.2.norm"] == "differs"
    assert {one for name, one in kinds.items() if "norm" not in name} == {"same"}


def test_a_missing_residual_is_the_blocks_own_output(model: Model) -> None:
    port = copy.deepcopy(model)

    class NoResidual(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(self.act(self.up(self.norm(x))))
            return out

    port.blocks[1].__class__ = NoResidual
    assert named(isolate(port, model, TOKENS)) == ("blocks.1", "output")


def test_from_a_trace_and_kept_as_one(model: Model, tmp_path: Path) -> None:
    with torch.no_grad(), trace(model, tmp_path / "reference.jsonl", tensors=".*"):
        model(TOKENS)
    port = copy.deepcopy(model)
    port.blocks[3].act = F.silu  # type: ignore[union-attr]
    verdict = isolate(port, tmp_path / "reference.jsonl", TOKENS, path=tmp_path / "port.jsonl")
    assert named(verdict) == ("blocks.3", "input")
    kept = read(tmp_path / "port.jsonl")
    assert kept.header.selection["isolated"] is True and kept.ended
    assert kept.header.weights == read(tmp_path / "reference.jsonl").header.weights
    assert all(record.forced for record in kept.records)
    from polyattn.hooks import compare

    again = compare(tmp_path / "reference.jsonl", tmp_path / "port.jsonl")
    assert again.culprit == verdict.culprit  # what is in the file says all of it
    with pytest.raises(TraceError, match="holds"):
        isolate(port, tmp_path / "reference.jsonl", TOKENS, path=tmp_path / "port.jsonl")


def test_other_inputs_are_replaced_and_said(model: Model, tmp_path: Path) -> None:
    with torch.no_grad(), trace(model, tmp_path / "reference.jsonl", tensors=""):
        model(TOKENS)
    verdict = isolate(copy.deepcopy(model), tmp_path / "reference.jsonl", TOKENS + 1)
    assert verdict.equal is True, str(verdict)
    assert verdict.guards["inputs"].holds is False
    assert "in its place" in verdict.guards["inputs"].said


def test_where_only_blocks_were_kept_whole(model: Model, tmp_path: Path) -> None:
    """Errors add up inside a block, so that fewer things can be decided there, but none wrongly."""
    with torch.no_grad(), trace(model, tmp_path / "r.jsonl", tensors=r"blocks\.\d+$"):
        model(TOKENS)
    clean = copy.deepcopy(model)
    for module in clean.modules():
        if isinstance(module, nn.Linear):
            module.forward = halves(module)  # type: ignore[method-assign]
    assert isolate(clean, tmp_path / "r.jsonl", TOKENS).equal is not False
    port = copy.deepcopy(model)
    port.blocks[2].act = F.silu  # type: ignore[union-attr]
    verdict = isolate(port, tmp_path / "r.jsonl", TOKENS)
    assert named(verdict)[0] == "blocks.2", str(verdict)
    assert verdict.culprit is not None and verdict.culprit.others == ()


def test_it_goes_deeper_by_itself(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    port = copy.deepcopy(model)
    port.blocks[1].norm.eps = 0.5  # type: ignore[union-attr]
    verdict = isolate(port, model, TOKENS, budget=1)
    assert named(verdict) == ("blocks.1.norm", "output")


def test_a_fused_port_without_counterparts(model: Model) -> None:
    """Linear layers in one: nothing is fed to them, and what comes after is."""

    class Fused(nn.Module):
        def __init__(self, block: Block) -> None:
            super().__init__()
            self.first = nn.Sequential(block.norm, block.up)
            self.down = block.down

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + self.down(F.gelu(self.first(x)))
            return out

    port = copy.deepcopy(model)
    port.blocks = nn.ModuleList(Fused(block) for block in copy.deepcopy(model.blocks))  # type: ignore[arg-type]
    assert isolate(port, model, TOKENS).equal is True
    port.blocks[2].down = nn.Sequential(port.blocks[2].down, nn.Sigmoid())
    verdict = isolate(port, model, TOKENS)
    assert verdict.culprit is not None and verdict.culprit.module.startswith("blocks.2")


def test_upcast_tells_rounding_from_another_computation(model: Model) -> None:
    port = copy.deepcopy(model)
    port.blocks[0].act = lambda x: F.gelu(x) + 64 - 64  # type: ignore[union-attr]
    assert isolate(port, model, TOKENS).equal is False  # it cancels in bfloat16
    kept = {name: one.data_ptr() for name, one in port.named_parameters()}
    verdict = isolate(port, model, TOKENS, upcast=torch.float64)
    assert verdict.equal is True, str(verdict)
    assert {name: one.data_ptr() for name, one in port.named_parameters()} == kept
    assert {one.dtype for one in port.parameters()} == {BF16}
    port.blocks[0].act = F.silu  # type: ignore[union-attr]
    assert named(isolate(port, model, TOKENS, upcast=torch.float32)) == ("blocks.0", "input")
    with pytest.raises(TraceError, match="upcast"):
        isolate(port, model, TOKENS, upcast=torch.int8)


def test_steps_and_loops(model: Model) -> None:
    """Of a loop each call is fed its own; what is wrong in one step only is named there."""

    def decode(one: nn.Module) -> Tensor:
        tokens = TOKENS
        for step in range(3):
            with trace_step(step):
                best = one(tokens)[:, -1].argmax(-1, keepdim=True)
                tokens = torch.cat([tokens[:, 1:], best], 1)
        return tokens

    port = copy.deepcopy(model)
    assert isolate(port, model, decode).equal is True
    calls = iter(range(99))
    port.blocks[1].act = lambda x: F.gelu(x) * (1.1 if next(calls) % 3 == 1 else 1)  # type: ignore[union-attr]
    verdict = isolate(port, model, decode)
    assert named(verdict) == ("blocks.1", "input")
    assert verdict.culprit is not None and verdict.culprit.step == 1


class Pair(NamedTuple):
    first: Tensor
    second: Tensor | None


@dataclasses.dataclass(frozen=True)
class Frozen:
    state: Tensor
    note: str


class Nested(nn.Module):
    """Takes and returns containers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.pairs, self.frozen, self.tables = Pairs(), Freeze(), Tables()

    def forward(self, x: Tensor) -> Tensor:
        pair = self.pairs(self.a(x))
        frozen = self.frozen({"pair": pair, "n": 3})
        out: Tensor = self.c(self.tables(states=[self.b(frozen.state), None])["last"][0])
        return out


class Pairs(nn.Module):
    def forward(self, x: Tensor) -> Pair:
        return Pair(x.tanh(), None)


class Freeze(nn.Module):
    def forward(self, given: dict[str, Any]) -> Frozen:
        return Frozen(given["pair"].first * given["n"], "note")


class Tables(nn.Module):
    def forward(self, states: list[Tensor | None]) -> dict[str, Any]:
        assert states[0] is not None
        return {"last": (states[0].relu(), "text"), "none": None}


class Twice(Freeze):
    def forward(self, given: dict[str, Any]) -> Frozen:
        return Frozen(given["pair"].first * given["n"] * 1.05, "note")


def test_nested_arguments_and_outputs() -> None:
    torch.manual_seed(0)
    reference = Nested().to(BF16)
    port = copy.deepcopy(reference)
    x = torch.randn(8, 32, dtype=BF16)
    assert isolate(port, reference, {"x": x}).equal is True
    port.frozen.__class__ = Twice
    verdict = isolate(port, reference, (x,))
    assert verdict.culprit is not None and verdict.culprit.module == "frozen"
    assert verdict.culprit.others == ()  # what came after got the reference's


class InPlace(nn.Module):
    """Changes what it is given and returns nothing, as its caller relies on."""

    def forward(self, x: Tensor) -> None:
        x.mul_(2)


class Relies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.twice, self.b = nn.Linear(16, 16), InPlace(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        self.twice(x)
        out: Tensor = self.b(x)
        return out


def test_changes_in_place_reach_the_caller() -> None:
    torch.manual_seed(0)
    reference = Relies().to(BF16)
    assert isolate(copy.deepcopy(reference), reference, torch.randn(4, 16, dtype=BF16)).equal


def test_shared_and_recursive_modules() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(32, 32)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.inner(x).tanh()
            return x if depth == 0 else self(x, depth - 1)

    torch.manual_seed(0)
    reference = Again().to(BF16)
    port = copy.deepcopy(reference)
    x = torch.randn(8, 32, dtype=BF16)
    assert isolate(port, reference, x).equal is True
    assert isolate(reference, reference, x).equal is True  # one model as both


def test_nothing_stays_behind(model: Model) -> None:
    port = copy.deepcopy(model)
    before = [dict(module.__dict__) for module in port.modules()]
    state = torch.get_rng_state()
    isolate(port, model, TOKENS)
    assert torch.equal(torch.get_rng_state(), state)
    for one in (model, port):
        assert not any(ModuleHookManager.of(module).names for module in one.modules())
    for module, was in zip(port.modules(), before, strict=True):
        assert module.__dict__.keys() == was.keys()

    class Stop(Exception): ...

    def fails(x: Tensor) -> Tensor:
        raise Stop

    port.blocks[3].act = fails  # type: ignore[union-attr]
    with pytest.raises(Stop):
        isolate(port, model, TOKENS)
    assert not any(ModuleHookManager.of(module).names for module in port.modules())


def test_compiled_ports_run_eagerly(model: Model) -> None:
    port = copy.deepcopy(model)
    port.blocks[1].norm.eps = 0.5  # type: ignore[union-attr]
    compiled = torch.compile(port, backend="aot_eager")
    assert named(isolate(compiled, model, TOKENS)) == ("blocks.1.norm", "output")


def test_what_is_no_reference(model: Model, tmp_path: Path) -> None:
    with torch.no_grad(), trace(model, tmp_path / "stats.jsonl"):
        model(TOKENS)
    with pytest.raises(TraceError, match=r"kept no whole tensors.*--tensors"):
        isolate(model, tmp_path / "stats.jsonl", TOKENS)
    with torch.no_grad(), trace(model, tmp_path / "whole.jsonl", tensors=".*"):
        model(TOKENS)
    other = nn.Sequential(nn.Conv1d(3, 3, 3))
    with pytest.raises(TraceError, match="counterpart"):
        isolate(other, tmp_path / "whole.jsonl", torch.randn(1, 3, 9))
    with pytest.raises(TraceError, match="inputs"):
        isolate(model, model, 3)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="dropout"):
        isolate(nn.Sequential(nn.Dropout(0.5)), model, TOKENS)
    files = sorted((tmp_path / "whole.tensors").iterdir())
    files[3].write_bytes(files[3].read_bytes()[:-7])
    with pytest.raises(TraceError, match=r"\.safetensors.*cannot be read"):
        isolate(model, tmp_path / "whole.jsonl", TOKENS)
    files[3].write_bytes(files[0].read_bytes())
    with pytest.raises(TraceError, match="expected"):
        isolate(model, tmp_path / "whole.jsonl", TOKENS)
    files[3].unlink()
    with pytest.raises(TraceError, match="not there"):
        isolate(model, tmp_path / "whole.jsonl", TOKENS)
    elsewhere = tmp_path / "elsewhere.safetensors"
    elsewhere.write_bytes(files[0].read_bytes())
    away = tmp_path / "in" / "away"
    away.mkdir(parents=True)
    (tmp_path / "whole.jsonl").rename(away / "whole.jsonl")
    (tmp_path / "whole.tensors").rename(away / "whole.tensors")
    (away / "whole.tensors" / files[3].name).symlink_to(elsewhere)
    with pytest.raises(TraceError, match="leads out"):
        isolate(model, away / "whole.jsonl", TOKENS)

"""The plan: what fits, what streams, what is predicted; and as a file."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from polyattn.errors import OffloadError
from polyattn.hooks import OffloadPlan, enable_layerwise_offload, offload
from polyattn.hooks.layerwise_offload import (
    Facts,
    make_plan,
    offload_model,
    settling,
    without_weights,
)
from polyattn.hooks.layerwise_offload.asked import Asked
from polyattn.hooks.layerwise_offload.hook import PassHook
from polyattn.hooks.layerwise_offload.partition import candidates
from polyattn.hooks.layerwise_offload.predict import Step, predict
from polyattn.hooks.layerwise_offload.sizes import read_bytes
from tests.hooks.layerwise_offload.small_models import frozen, inputs

X = inputs()


def facts(count: int = 8, **given: Any) -> Facts:
    return Facts([(f"blocks.{i}", 100) for i in range(count)], **given)


def test_what_fits_stays() -> None:
    plan = make_plan(facts(outside_bytes=10), device="cuda", budget=810, tier="host")
    assert not plan.streamed
    assert plan.peak_bytes == 810
    assert "nothing is moved" in str(plan)


def test_residents_are_spread_and_the_first_unit_is_one() -> None:
    plan = make_plan(facts(), device="cuda", budget=600, tier="host", depth=1)
    assert plan.streamed == ("blocks.1", "blocks.3", "blocks.5", "blocks.7")
    assert plan.peak_bytes == 600


def test_a_budget_that_nothing_fits_in_says_what_would() -> None:
    with pytest.raises(OffloadError, match="expected at least 260 B: 50 B of weights outside"):
        make_plan(
            facts(outside_bytes=50, activation_bytes=10),
            device="cuda",
            budget=150,
            tier="host",
            depth=1,
        )


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    outside=st.integers(0, 500),
    budget=st.integers(1, 30_000),
    depth=st.sampled_from([None, 1, 2, 4]),
)
def test_no_plan_passes_its_budget(
    sizes: list[int], outside: int, budget: int, depth: int | None
) -> None:
    known = Facts([(str(i), n) for i, n in enumerate(sizes)], outside_bytes=outside)
    try:
        plan = make_plan(known, device="cpu", budget=budget, tier="disk", depth=depth)
    except OffloadError:
        assert outside + sum(sizes) > budget
        return
    assert plan.peak_bytes <= budget
    stays = sum(unit.nbytes for unit in plan.units if unit.tier == "resident")
    slots = (plan.depth + 1) * plan.slot_bytes if plan.streamed else 0
    assert plan.peak_bytes == outside + stays + slots
    assert OffloadPlan.from_json(plan.to_json()) == plan


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20),
    st.integers(1, 4),
)
def test_no_prediction_beats_the_bound(steps: list[tuple[float, float]], depth: int) -> None:
    found = predict([Step(*step) for step in steps], depth)
    assert found.pass_s >= found.bound_s * (1 - 1e-9)
    assert found.pass_s <= (found.compute_s + found.copy_s) * (1 + 1e-9)
    assert predict([Step(*step) for step in steps], depth + 1).pass_s <= found.pass_s * (1 + 1e-9)


def test_a_measured_plan_is_the_fastest_of_those_that_fit() -> None:
    known = facts(compute_s=[1.0] * 8, rates={"host": 50.0})
    plan = make_plan(known, device="cuda", budget=600, tier="host")
    assert plan.pass_s is not None
    assert plan.slowdown == pytest.approx(plan.pass_s / 8)
    for depth in (1, 2, 3):
        other = make_plan(known, device="cuda", budget=600, tier="host", depth=depth)
        assert other.pass_s >= plan.pass_s


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "polyattn.offload.plan/0"},
        {"units": [{"name": "a"}]},
        {"units": [{"name": "a", "nbytes": 1, "tier": "cloud"}]},
        {"depth": -1},
        {"depth": "one"},
        {"depth": 0},
        {"depth": True},
        {"device": None},
        {"peak_bytes": 1.5},
        {"budget_bytes": "x"},
        {"pass_s": "x"},
        {"pass_s": -1},
        {"compute_s": [1]},
        {"rates": []},
        {"rates": {"host": "x"}},
        {"rates": {"host": 0}},
        {"order": ["x"]},
        {"order": [99]},
        {"order": 1},
        {"beside_held": 1},
        {"readers": -1},
        {"readers": "two"},
        {"readers": 1000},
        {"units": {}},
        {"units": [{"name": 1, "nbytes": 1, "tier": "host"}]},
        {"units": [{"name": "a", "nbytes": True, "tier": "host"}]},
        {"units": [{"name": "a", "nbytes": 1 << 70, "tier": "host"}]},
        {"units": [{"name": "a", "nbytes": 1, "tier": "host"}] * 2},
        {"units": [{"name": "a", "nbytes": 1, "tier": "host", "copy_s": "x"}]},
        {"unknown": 1},
    ],
)
def test_a_foreign_plan_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    plan = make_plan(facts(), device="cuda", budget=600, tier="host")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(plan.to_json()), **change}))
    with pytest.raises(OffloadError, match=r"no plan of this version|cannot be read"):
        OffloadPlan.load(path)
    path.write_bytes(b"\xff\xfe no json")
    with pytest.raises(OffloadError, match=r"no plan|cannot be read"):
        OffloadPlan.load(path)


def test_bytes_are_read_as_they_are_written() -> None:
    assert read_bytes("8GiB") == 8 << 30
    assert read_bytes("1.5 GB") == 1_500_000_000
    assert read_bytes("25GB/s") == 25_000_000_000
    for wrong in ("8 XB", "", "GiB", -1, None, True, "1e99GB" * 9, "1e400", "0e9x", "9e18GB"):
        with pytest.raises(OffloadError, match="expected a number of bytes"):
            read_bytes(wrong)  # type: ignore[arg-type]


def test_a_plan_is_measured_stored_and_followed(tmp_path: Path) -> None:
    model, want = frozen(), frozen()(X)
    with offload(model, device="cpu", disk=tmp_path / "w", sample=X) as handle:
        plan = handle.plan
        assert plan.pass_s is not None
        assert plan.rates["disk"] > 0
        assert plan.order == (0, 1, 2, 3, 4, 5)
        assert torch.equal(model(X), want)
        assert handle.report().predicted_s == plan.pass_s
        json.loads(handle.report().to_json())
    plan.save(tmp_path / "plan.json")
    for stored in (plan, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        with offload(model, device="cpu", disk=tmp_path / "w", plan=stored) as handle:
            assert handle.plan == plan
            assert torch.equal(model(X), want)


@pytest.mark.parametrize("given", [{}, {"budget": "10GiB"}])
def test_a_sample_of_a_model_that_stays_measures_nothing(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    """Two slots hold two blocks: where weights come from files the plan is made all the same."""
    files = pytest.importorskip("safetensors.torch")
    model, want = frozen(blocks=2), frozen(blocks=2)(X)
    files.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with without_weights():
        empty = frozen(blocks=2)
    for each, where in (
        (model, {"disk": tmp_path / "w"}),
        (empty, {"weights": tmp_path / "model.safetensors"}),
    ):
        with offload(each, device="cpu", sample=X, **where, **given) as handle:
            assert not handle.plan.streamed
            assert torch.equal(each(X), want)
        assert torch.equal(each(X), want)


def test_a_plan_of_another_model_is_an_error(tmp_path: Path) -> None:
    plan = make_plan(facts(), device="cpu", budget=600, tier="disk")
    with pytest.raises(OffloadError, match=r"for 8 units.*the 6 of this model"):
        offload(frozen(), device="cpu", disk=tmp_path, plan=plan)
    assert list(tmp_path.iterdir()) == []


def test_a_budget_below_what_the_process_holds_is_the_models_own(tmp_path: Path) -> None:
    model, want = frozen(), frozen()(X)
    with offload(model, 600_000, "cpu", disk=tmp_path) as handle:
        plan = handle.plan
        assert plan.beside_held
        assert "beside what is held" in str(plan)
        assert plan.weight_bytes <= 600_000
        assert plan.peak_bytes == plan.weight_bytes + plan.other_bytes
        assert 0 < len(plan.resident) < 6
        assert torch.equal(model(X), want)
    with pytest.raises(OffloadError, match=r"budget of 48\.8 KiB, expected at least"):
        offload(model, 50_000, "cpu", disk=tmp_path)


def test_what_stays_stays(tmp_path: Path) -> None:
    model, want = frozen(), frozen()(X)
    with offload(model, device="cpu", disk=tmp_path / "w") as handle:
        least = handle.plan
    units = [
        unit if index % 2 else type(unit)(unit.name, unit.nbytes, "resident")
        for index, unit in enumerate(least.units)
    ]
    plan = type(least)(**{**vars(least), "units": tuple(units)})
    with offload(model, device="cpu", disk=tmp_path / "w", plan=plan) as handle:
        assert handle.units == ("blocks.1", "blocks.3", "blocks.5")
        model.blocks[0].up.weight.data.mul_(1.0)
        assert torch.equal(model(X), want)
        assert "blocks.0" not in {row.name for row in handle.report().units}
    assert torch.equal(model(X), want)


def test_finer_units_where_blocks_are_too_large(tmp_path: Path) -> None:
    model, want = frozen(blocks=3), frozen(blocks=3)(X)
    names = r"blocks\.\d+\.(up|down)"
    with offload(model, device="cpu", disk=tmp_path, units=names) as handle:
        assert len(handle.units) == 6
        assert torch.equal(model(X), want)
    with pytest.raises(OffloadError, match=r"name of no module.*'blocks\.0'"):
        offload(model, device="cpu", disk=tmp_path, units="layers")


class Attends(torch.nn.Module):
    """Parts outside lists that read their children's weights themselves, or are read by others."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(64, 4, batch_first=True)
        self.layer = torch.nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
        self.read = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2))

    def forward(self, x: Any) -> Any:
        x = self.layer(self.attention(x, x, x, need_weights=False)[0])
        for block in self.blocks:
            x = block(x)
        for block in self.read:
            x = torch.nn.functional.linear(x, block.weight, block.bias)
        return x


def test_what_is_called_whole_is_a_unit_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Attends().eval().requires_grad_(False)
    reference = copy.deepcopy(model)
    names = [each.name for each in candidates(model, 1)]
    assert names[:2] == ["attention", "layer"]
    assert not any("proj" in name or "linear" in name for name in names)
    with offload(model, device="cpu", disk=tmp_path, units=names) as handle:
        assert torch.equal(model(X), reference(X))
        uses = {row.name: row.uses for row in handle.report().units}
        assert all(count for name, count in uses.items() if not name.startswith("read"))


def test_units_that_no_call_reaches_stay_on_the_device() -> None:
    """Somebody may read their weights without a call, as a sample shows."""
    model = Attends().eval().requires_grad_(False)
    known = Facts(
        [(str(index), 100) for index in range(8)], order=[0, 1, 2, 4, 5], compute_s=[1.0] * 8
    )
    asked = Asked(None, 750, 1)
    plan = settling._planned(asked, known, torch.device("cuda"), "host")
    assert {"3", "6", "7"} <= set(plan.resident)
    assert plan.streamed
    least = settling._planned(Asked(None, 250, 1), known, torch.device("cuda"), "host")
    assert len(least.streamed) == 8  # there is no room for them
    hook = PassHook([Hints()], "model")
    error = RuntimeError("Expected all tensors to be on the same device")
    hook.failed(model, error)
    assert error.__notes__ == ["a hint"]


class Hints:
    def hint(self) -> str:
        return "a hint"

    def end(self, *, failed: bool) -> None:
        assert failed


def test_wrong_arguments(tmp_path: Path) -> None:
    model = frozen()
    for wrong, message in (
        ({"depth": 0}, "depth=0"),
        ({"budget": "much"}, "budget='much'"),
        ({"budget": 1000}, "expected at least"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"depth": True}, "depth=True"),
        ({"plan": tmp_path / "none.json"}, "cannot be read"),
        ({"plan": 3}, "plan=3, expected an OffloadPlan"),
        ({"plan": {}}, r"plan=\{\}, expected an OffloadPlan"),
        ({"plan": tmp_path / "none.json", "budget": 1}, "budget=1 beside plan="),
        ({"units": "("}, r"units='\(', which is no regular expression"),
        ({"units": 3}, "units=3, expected a regular expression"),
        ({"units": []}, r"units=\[\], expected a regular expression"),
        ({"disk": 3}, "disk=3, expected the path of a folder"),
        ({"disk": ""}, "disk='', expected the path of a folder"),
        ({"weights": 3}, "weights=3, expected the path of a safetensors"),
        ({"weights": []}, r"weights=\[\], expected the path of a safetensors"),
        ({"resident": ["blocks.0"]}, r"'blocks\.0' in resident=, expected modules"),
        ({"resident": [torch.nn.ReLU()]}, "ReLU in resident=, expected modules"),
        ({"resident": 3}, "resident=3, expected modules"),
    ):
        with pytest.raises(OffloadError, match=message):
            offload(model, **{"device": "cpu", "disk": tmp_path / "w", **wrong})
    with pytest.raises(OffloadError, match=r"expected a torch\.nn\.Module"):
        offload(3)  # type: ignore[arg-type]
    with pytest.raises(OffloadError, match="without modules that hold weights"):
        offload(torch.nn.ReLU(), device="cpu", disk=tmp_path)
    assert torch.equal(model(X), frozen()(X))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "cuda"}, "a plan for cuda, expected one for cpu"),
        ({"tier": "host"}, "streams from the host, expected the disk: leave out disk="),
        ({"nbytes": 1}, r"blocks\.0 has 1 B, expected 130 KiB"),
    ],
)
def test_a_plan_for_something_else_is_an_error(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = frozen()
    with offload(model, device="cpu", disk=tmp_path) as handle:
        plan = handle.plan
    inner = {key: value for key, value in change.items() if key != "device"}
    plan = replace(
        plan,
        device=change.get("device", "cpu"),
        units=tuple(replace(unit, **inner) for unit in plan.units),
    )
    with pytest.raises(OffloadError, match=message):
        offload(model, device="cpu", disk=tmp_path, plan=plan)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(model(X), frozen()(X))


def test_replacing_an_offload_that_is_no_offload_keeps_it(tmp_path: Path) -> None:
    model = frozen()
    with offload(model, device="cpu", disk=tmp_path) as handle:
        with pytest.raises(OffloadError, match="expected disk="):
            enable_layerwise_offload(model, is_replace=True)
        assert handle.attached
        assert torch.equal(model(X), frozen()(X))


@pytest.mark.parametrize("kept", [0, 20_000])
def test_a_plan_that_passes_its_budget_gives_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """A peak that turns out higher than was planned: less stays, until it is not.

    `kept`: what the C library may keep beyond what was seen; it is planned for.
    """
    model, limit = frozen(blocks=12), 41_200_000
    monkeypatch.setattr(offload_model, "held", lambda device: 41_500_000)
    monkeypatch.setattr(settling, "held", lambda device: 40_000_000)
    seen: list[int] = []

    def confirmed(engine: Any, run: Any) -> tuple[float, int]:
        run()
        seen.append(len(engine.units))
        return 0.25, limit + (200_000 if len(seen) < 3 else -100_000)

    monkeypatch.setattr(settling, "confirmed", confirmed)
    monkeypatch.setattr(settling, "_MARGIN", 100_000)
    monkeypatch.setattr(settling, "kept_bytes", lambda device: kept)
    monkeypatch.setattr(settling, "measured", lambda engine, run, facts, tier: facts)
    with offload(model, limit, "cpu", disk=tmp_path, sample=X) as handle:
        assert seen == sorted(set(seen))  # each streams more than the one before
        assert len(seen) == 3
        assert handle.plan.pass_s == 0.25
        assert handle.plan.peak_bytes == limit - 100_000 + kept
        assert len(handle.units) == seen[-1]
        for _ in range(2):
            assert torch.equal(model(X), frozen(blocks=12)(X))
    assert torch.equal(model(X), frozen(blocks=12)(X))


def test_other_movers_are_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = frozen()
    accelerate.disk_offload(model, str(tmp_path / "theirs"), execution_device="cpu")
    with pytest.raises(OffloadError, match="accelerate"):
        offload(model, device="cpu", disk=tmp_path / "ours")

"""The plan: what fits, what streams, what is predicted; and as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from polyattn.errors import OffloadError
from polyattn.hooks import OffloadPlan, offload
from polyattn.hooks.layerwise_offload import Facts, make_plan
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
    for wrong in ("8 XB", "", "GiB", -1, None, True, "1e99GB" * 9):
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


def test_wrong_arguments(tmp_path: Path) -> None:
    model = frozen()
    for wrong, message in (
        ({"depth": 0}, "depth=0"),
        ({"budget": "much"}, "budget='much'"),
        ({"budget": 1000}, "expected at least"),
        ({"device": "nowhere"}, "device='nowhere'"),
        ({"plan": tmp_path / "none.json"}, "cannot be read"),
    ):
        with pytest.raises(OffloadError, match=message):
            offload(model, **{"device": "cpu", "disk": tmp_path / "w", **wrong})
    with pytest.raises(OffloadError, match=r"expected a torch\.nn\.Module"):
        offload(3)  # type: ignore[arg-type]
    with pytest.raises(OffloadError, match="without modules that hold weights"):
        offload(torch.nn.ReLU(), device="cpu", disk=tmp_path)
    assert torch.equal(model(X), frozen()(X))


def test_other_movers_are_refused(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = frozen()
    accelerate.disk_offload(model, str(tmp_path / "theirs"), execution_device="cpu")
    with pytest.raises(OffloadError, match="accelerate"):
        offload(model, device="cpu", disk=tmp_path / "ours")

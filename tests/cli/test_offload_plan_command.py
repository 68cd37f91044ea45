"""``polyattn offload plan``: from a checkpoint to a plan that is followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file

from polyattn.cli import main
from polyattn.hooks import OffloadPlan, offload
from tests.hooks.layerwise_offload.small_models import frozen, inputs


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    values = {name: value.clone() for name, value in frozen().state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_plan_is_printed_stored_and_followed(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = weights.with_name("plan.json")
    arguments = ["offload", "plan", str(weights), "--budget", "600KiB", "--tokens", "64"]
    arguments += ["--device", "cpu"]
    assert main([*arguments, "--tflops", "1", "--rate", "1GB/s", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "stream from disk to cpu" in printed
    assert "x all resident" in printed
    plan = OffloadPlan.load(out)
    assert plan.peak_bytes <= 600 << 10
    model = frozen()
    with offload(model, device="cpu", weights=weights, plan=out) as handle:
        assert handle.units == plan.streamed
        assert torch.equal(model(inputs()), frozen()(inputs()))


def test_json_and_a_rate_that_is_measured(
    weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["offload", "plan", str(weights.parent), "--budget", "600KiB", "--device", "cpu"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"]["disk"] > 0
    assert OffloadPlan.from_json(json.dumps(found)).streamed


PLAN = ("offload", "plan", "{}", "--budget", "600KiB")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["offload", "plam"], "Did you mean 'plan'"),
        (["offload", "plan", "{}", "--budget", "1KiB"], "expected at least"),
        (["offload", "plan", "{}", "--budget", "lots"], "expected a number of bytes"),
        ([*PLAN, "--depth", "0"], "got '0', expected an integer from 1"),
        ([*PLAN, "--depth=-3"], "expected an integer from 1"),
        ([*PLAN, "--tokens=-5"], "expected an integer from 1"),
        ([*PLAN, "--tflops", "nan"], "expected TFLOP/s: a number"),
        ([*PLAN, "--tflops=-1"], "expected TFLOP/s: a number"),
        ([*PLAN, "--rate", "0"], "got --rate='0', expected bytes a second"),
        ([*PLAN, "--rate", "fast"], "--rate='fast'"),
        ([*PLAN, "--device", "foo"], "invalid choice: 'foo'"),
        ([*PLAN, "--out", "/missing/x"], "cannot be written (No such file"),
        (["offload", "plan", "nothing.safetensors", "--budget", "1GiB"], "cannot be opened"),
    ],
)
def test_what_is_wrong_is_said(
    weights: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([each.format(weights) for each in arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_names_without_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file({"weight": torch.ones(4)}, tmp_path / "a.safetensors")
    assert main(["offload", "plan", str(tmp_path), "--budget", "1GiB"]) == 2
    assert "without numbered blocks" in capsys.readouterr().err

"""``polyattn bench offload``: its parts run, and a fault is seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.bench import main
from polyattn.bench.offload import bench_offload
from polyattn.bench.offload.disk_run import Stack, measure, write_weights
from polyattn.bench.offload.situations import SITUATIONS, tried
from polyattn.hooks.layerwise_offload import slots, unit
from tests.hooks.layerwise_offload.small_models import frozen, inputs


def test_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offload", "--quick", "--only", "schedules", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kind"] == "offload"
    assert record["rows"][0]["wrong"] == []


def test_every_situation(tmp_path: Path) -> None:
    found = tried(frozen(), {"x": inputs()}, tmp_path)
    assert found == dict.fromkeys((*SITUATIONS, "quantised", "adapters train"), "same")


@pytest.mark.parametrize("fault", [lambda self, unit, soon: self._one_more(unit), None])
def test_memory(
    fault: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that are taken anew for every use are too many."""
    if fault is not None:
        monkeypatch.setattr(slots.Slots, "for_soon", fault)
        monkeypatch.setattr(bench_offload, "_PEAK_SLACK", 0)
    assert main(["offload", "--only", "memory", "--json"]) == (0 if fault is None else 1)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["host memory"]["met"]
    assert rows["device weights"]["met"] is (fault is None)


def test_a_fault_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where changes at home go unseen, what was merged is lost."""
    monkeypatch.setattr(unit.Unit, "was_counted", lambda self: False)
    monkeypatch.setattr(
        "polyattn.hooks.layerwise_offload.mapped.Mapping.is_changed", lambda _: False
    )
    found = tried(frozen(), {"x": inputs()}, tmp_path)
    assert found["plain"] == "same"
    assert found["merged by .data"] == "differs"


@pytest.mark.slow
def test_a_model_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    nbytes = write_weights(path, 6)
    assert nbytes > sum(p.numel() * 4 for p in Stack(6).parameters())
    found = measure(path, 6, str(220 << 20), tokens=2, passes=2)  # the model's own
    assert 2 < found["streamed"] <= 6
    assert found["predicted_s"] > 0
    assert {"pass_s", "compute_s", "read_s", "both_s", "peak_bytes"} == set(found["rounds"][0])
    assert min(found["rounds"][0].values()) > 0
    least = measure(path, 6, str(160 << 20), tokens=2, passes=1)  # nothing stays
    assert least["streamed"] == 6 and least["both_s"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "mixtral"])
def test_architectures(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from polyattn.bench.offload.architectures import built

    found = tried(*built(f"transformers/{name}"), tmp_path)
    assert set(found.values()) == {"same"}
    assert set(found) - {"two lists"} == {
        *SITUATIONS, "quantised", "adapters train", "checkpointing"
    }  # fmt: skip
    assert ("two lists" in found) is (name == "t5")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "UNet2DConditionModel"])
def test_architectures_of_diffusers(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from polyattn.bench.offload.architectures import built

    assert set(tried(*built(f"diffusers/{name}"), tmp_path).values()) == {"same"}

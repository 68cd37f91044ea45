"""One schema of the trace's statistics: what is made of it is up to date, and C++ says the same."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from polyattn.errors import MissingDependency
from polyattn.native import module
from polyattn.trace import Record
from polyattn.trace.statistics import extension, schema

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "statistics_schema.py"


def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("statistics_schema", SCRIPT)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_what_is_made_of_it_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_file_that_was_changed_is_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    made = script()
    for name, text in made.made().items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(made, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["statistics_schema.py"])
    assert made.main() == 0
    for name in made.made():
        (path := tmp_path / name).write_text(
            path.read_text(encoding="utf-8").replace("mean", "mien").replace("rows", "rose"),
            encoding="utf-8",
        )
        assert made.main() == 1
        assert f"{name}: run python scripts/statistics_schema.py --write" in capsys.readouterr().out
        monkeypatch.setattr(sys, "argv", ["statistics_schema.py", "--write"])
        assert made.main() == 0
        monkeypatch.setattr(sys, "argv", ["statistics_schema.py"])
    assert made.main() == 0


def test_rows_stand_in_the_order_that_places_rest_on() -> None:
    kinds = ("fact", "count", "moment", "samples", "sketch")
    order = [kinds.index(row.kind) for row in schema.SCHEMA]
    assert order == sorted(order) and {order.count(kinds.index(k)) for k in kinds[3:]} == {1}
    assert schema.COUNTS[0] == "n"
    at = 0
    for row in schema.SCHEMA:
        assert row.about and (row.parts or row.kind in ("fact", "samples")), row.name
        if row.width:
            assert schema.PLACES[row.name] == at
            at += row.width
    assert schema.WIDTH == at == schema.SKETCH.stop
    assert list(schema.PLACES)[: schema.SAMPLES.start] == list(schema.FIELDS)


def test_a_record_has_every_statistic_in_the_middle_of_its_plain_data() -> None:
    values: dict[str, Any] = dict.fromkeys(schema.STATISTICS, 1) | {"shape": (1,), "dtype": "x"}
    found = Record(seq=0, module="", phase="in", tensor="x", same=0, **values)
    names = [name for name in found.to_dict() if name in schema.STATISTICS]
    assert names == list(schema.STATISTICS)
    assert [*found.to_dict()][:4] == ["seq", "module", "phase", "tensor"]
    assert [*found.to_dict()][-1] == "same"


def test_the_schema_needs_no_numpy() -> None:
    code = "import sys, polyattn.trace.format.record; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(
    not hasattr(module._import(), "build"), reason="the native kernels are not built here"
)
def test_the_extension_was_built_with_it() -> None:
    built = extension.load().build()
    assert built["statistics"] == schema.LAYOUT
    assert built["statistics_width"] == schema.WIDTH


@pytest.mark.parametrize(
    "built",
    [
        {},
        {"statistics": schema.LAYOUT.replace("l2:1", "l3:1"), "trace_protocol": "as it is"},
        {"statistics": schema.LAYOUT, "trace_protocol": "another"},
    ],
)
def test_an_extension_of_another_schema_is_none(
    built: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "load", lambda: SimpleNamespace(build=lambda: built))
    extension.load.cache_clear()
    try:
        with (
            caplog.at_level(logging.WARNING, "polyattn.trace"),
            pytest.raises(MissingDependency, match=r"other sources.*expected.*To have them: "),
        ):
            extension.load("as it is")
        assert "built from other sources" in caplog.text
        if built.get("statistics") == schema.LAYOUT:
            assert extension.load().build() is built  # who hands over no events needs no more
    finally:
        extension.load.cache_clear()


def test_a_trace_goes_on_without_an_extension_of_another_schema(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
import sys, torch
from types import SimpleNamespace
from polyattn.native import module
module.load = lambda: SimpleNamespace(build=lambda: {"statistics": "n:1"})
from polyattn.hooks import trace
with trace(torch.nn.Identity(), sys.argv[1]) as run:
    run.model(torch.ones(3))
assert run.recorder._quickly is None
"""
    path = tmp_path / "run.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("built from other sources") == 1
    from polyattn.trace import read

    assert read(path).records[0].l1 == 3

"""What Python and native code hand each other is what `native_protocol` names."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from polyattn.hooks import trace
from polyattn.trace import JsonlSink
from polyattn.trace.recorders.torch import native_protocol as protocol
from polyattn.trace.recorders.torch.device_rows import RowPool, Rows
from polyattn.trace.recorders.torch.full_tensors import Saving
from polyattn.trace.recorders.torch.lines import Lines
from polyattn.trace.recorders.torch.per_thread import Lane
from polyattn.trace.recorders.torch.tensor_statistics import native_module, recording

NATIVE = pytest.mark.skipif(native_module() is None, reason="the extension is not built")
SOURCES = Path(__file__).resolve().parents[4] / "native" / "src"

KINDS: dict[str, Any] = {
    "seq": int, "head": str, "call": int, "step": int | None, "phase": str, "path": str,
    "shape": torch.Size | None, "dtype": torch.dtype | str | None, "rows": Rows | None,
    "slot": int, "same": int | None, "extra": dict | None, "saving": Saving | None,
}  # fmt: skip


def check(event: tuple[Any, ...]) -> dict[str, Any]:
    """The event by its names, each of which has what it is to have."""
    assert type(event) is tuple
    found = dict(zip(protocol.EVENT, event, strict=True))
    for name, value in found.items():
        assert isinstance(value, KINDS[name]), (name, value)
    assert found["head"].startswith('"module":') and found["phase"] in ("in", "out")
    assert (found["same"] is None) == (found["shape"] is not None)
    return found


class Passes(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize("tensors", [None, ""])
def test_events_that_python_makes(
    tensors: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tensors is not None:
        pytest.importorskip("safetensors")
    seen: list[dict[str, Any]] = []

    def noted(of: Any) -> Any:
        def made(self: Lines, events: Any, rows: Any) -> Any:
            events = list(events)
            seen.extend(map(check, events))
            return of(self, events, rows)

        return made

    monkeypatch.setattr(Lines, "now", noted(Lines.now))
    monkeypatch.setattr(Lines, "of", noted(Lines.of))
    model, x = Passes(), torch.ones(2, 3)
    odd = [x, x, x.to_sparse(), torch.empty(2, device="meta"), nn.Parameter(torch.ones(3))]
    with trace(model, tmp_path / "run.jsonl", tensors=tensors) as run, torch.no_grad():
        run.recorder._quickly = None
        model(odd)
        model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert len(seen) == 12 and len(get_args(protocol.Event)) == len(protocol.EVENT)
    given = {name: sum(one[name] is not None for one in seen) for name in protocol.EVENT}
    assert given["same"] and given["rows"] and given["extra"]
    assert bool(given["saving"]) == (tensors is not None)


@NATIVE
def test_events_that_native_code_makes() -> None:
    rows = RowPool().take(torch.device("cpu"))
    lane = Lane()
    lane.rows[torch.device("cpu")] = rows
    made = recording(itertools.count(7).__next__, None, None)
    x, y = torch.ones(2, 3), torch.ones(4)
    assert made.record(lane, [("a", x), ("b", y), ("c", x)], '"module":""', 5, 3, "in", False) == 3
    a, b, c = map(check, lane.events)
    assert [(one["seq"], one["call"], one["step"], one["path"]) for one in (a, b, c)] == [
        (7, 5, 3, "a"), (8, 5, 3, "b"), (9, 5, 3, "c"),
    ]  # fmt: skip
    assert (a["shape"], a["dtype"], a["rows"], a["slot"]) == (x.shape, x.dtype, rows, 0)
    assert (b["slot"], rows.used, c["same"]) == (1, 2, 7)
    entry = dict(zip(protocol.SEEN, lane.seen[id(x)], strict=True))
    assert entry == {"tensor": entry["tensor"], "version": x._version, "seq": 7, "file": None}
    assert entry["tensor"]() is x


def test_what_python_keeps_of_a_tensor_native_code_takes(tmp_path: Path) -> None:
    held: list[Any] = []

    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            held.extend(run.recorder.lane().seen.values())
            return x

    with trace(Looks(), tmp_path / "run.jsonl") as run:
        run.recorder._quickly = None
        run.model(torch.ones(3))
    ((tensor, version, seq, file),) = held
    assert len(protocol.SEEN) == 4 and isinstance(tensor(), Tensor | None)
    assert (type(version), seq, file) == (int, 0, None)


def test_attributes_are_those_of_the_classes(tmp_path: Path) -> None:
    with JsonlSink(tmp_path / "lines.jsonl") as sink:
        of = {"Lane": Lane(), "Rows": RowPool().take(torch.device("cpu")), "JsonlSink": sink,
              "Tensor": torch.ones(1)}  # fmt: skip
        assert of.keys() == protocol.ATTRIBUTES.keys()
        for name, attributes in protocol.ATTRIBUTES.items():
            for one, about in attributes.items():
                value = getattr(of[name], one)
                assert callable(value) == about.startswith("called"), (name, one)
    names = [one for attributes in protocol.ATTRIBUTES.values() for one in attributes]
    assert len({name.lstrip("_") for name in names}) == len(names)


def test_native_code_reads_all_that_is_named_and_nothing_else() -> None:
    code = {path.name: path.read_text(encoding="utf-8") for path in SOURCES.glob("trace_*.cpp")}
    text = "".join(code.values())
    named = {one.lstrip("_") for attributes in protocol.ATTRIBUTES.values() for one in attributes}
    assert set(re.findall(r"\bnames_\.(\w+)", text)) == named
    assert not re.findall(r"attr\(\"|InternFromString", text)
    assert not re.findall(r"\b(?:known|block)\[\d", text)


@NATIVE
def test_the_extension_was_built_with_it() -> None:
    assert native_module().build()["trace_protocol"] == protocol.PROTOCOL

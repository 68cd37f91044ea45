"""Tracing by environment variables: off is off, on is what they say."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

from polyattn.errors import SettingsError
from polyattn.settings import Settings, steps_of
from polyattn.trace import read

OFF = """
    import sys, torch
    from polyattn.hooks import attach_activation_trace, detach_activation_trace, trace_step
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = [dict(vars(m)) for m in model.modules()]
    assert attach_activation_trace(model) is None
    with trace_step(0):
        model(torch.ones(1, 2))
    detach_activation_trace(model)
    assert [vars(m) for m in model.modules()] == before
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    loaded = {name for name in sys.modules if name.startswith("polyattn.")}
    print(sorted(n for n in loaded if "trace" in n and not n.endswith(
        ("polyattn.trace", ".recorders", ".recorders.torch", ".environment", ".step"))))
    loaded = {n for n in loaded if not n.startswith("polyattn.torch.internals")}
    print(any(name.startswith(("polyattn.torch.", "polyattn.native")) for name in loaded))
"""

ON = """
    import torch
    from polyattn.hooks import attach_activation_trace, detach_activation_trace, trace_step
    first, second = torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear(2, 2)
    run = attach_activation_trace(first)
    assert attach_activation_trace(first) is run
    other = attach_activation_trace(second) if {second} else None
    for step in range(3):
        with trace_step(step):
            second(first(torch.ones(1, 2)))
    if {second}:
        detach_activation_trace(second)
        assert not second._forward_hooks
"""


def run(code: str, folder: Path, **variables: str) -> str:
    environ = {**os.environ, **{f"POLYATTN_TRACE_{k}": v for k, v in variables.items()}}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environ,
        cwd=folder,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("value", [None, "0", "false", "No", "OFF", " ", ""])
def test_off_is_no_hook_and_no_import(tmp_path: Path, value: str | None) -> None:
    variables = {} if value is None else {"ACTIVATIONS": value}
    assert run(OFF, tmp_path, OUTPUT="run.jsonl", **variables) == "[]\nFalse\n"
    assert list(tmp_path.iterdir()) == []


def test_on(tmp_path: Path) -> None:
    run(
        ON.replace("{second}", "False"),
        tmp_path,
        ACTIVATIONS="1",
        LAYERS="^0$",
        STATS="abs_mean, max",
        STEPS="0,2",
        OUTPUT="here/run.jsonl",
    )
    found = read(tmp_path / "here" / "run.jsonl")
    assert {(r.module, r.step) for r in found.records} == {("0", 0), ("0", 2)}
    record = found.records[0]
    assert record.abs_mean is not None and record.max is not None and record.min is None
    assert found.ended  # by the end of the process
    assert found.header.selection["steps"] == [0, 2]


def test_a_second_model_has_a_file_of_its_own(tmp_path: Path) -> None:
    run(ON.replace("{second}", "True"), tmp_path, ACTIVATIONS="yes")
    first, second = tmp_path / "polyattn-trace.jsonl", tmp_path / "polyattn-trace.Linear.jsonl"
    assert {r.module for r in read(first).records} == {"", "0"}
    assert {r.cls for r in read(second).records} == {"Linear"}


def test_a_pattern_that_matches_nothing_is_said(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"TraceError.*matches none"):
        run(ON.replace("{second}", "False"), tmp_path, ACTIVATIONS="1", LAYERS="decoder")


def test_values_that_mean_nothing() -> None:
    with pytest.raises(SettingsError, match="POLYATTN_TRACE_ACTIVATIONS='maybe'"):
        Settings.parse({"POLYATTN_TRACE_ACTIVATIONS": "maybe"})
    with pytest.raises(SettingsError, match="POLYATTN_TRACE_STEPS='1;2'"):
        Settings.parse({"POLYATTN_TRACE_STEPS": "1;2"})
    assert not Settings.parse({}).trace_activations
    assert Settings.parse({"POLYATTN_TRACE_ACTIVATIONS": "True"}).trace_activations
    assert Settings.parse({"POLYATTN_TRACE_STATS": "max, l2,"}).trace_stats == ("max", "l2")
    assert steps_of("0, 5-7,6") == {0, 5, 6, 7}

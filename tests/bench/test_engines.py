"""Engines of others beside ours: right before fast, and whatever happens to them is said."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")

from polyattn import MissingDependency
from polyattn.bench import main
from polyattn.bench.cpu import engines
from polyattn.bench.cpu.bench_cpu import Options, timed_case
from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import Case, Size
from polyattn.bench.cpu.engines import Engines, chosen_engines, known_engines
from polyattn.bench.cpu.ways import Unable, Way
from polyattn.native import module
from polyattn.selection.registry import Available

built_only = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
SMALL = Size(2, 4, 4, 40, 40, 16)
CASES = [
    Case("small", SMALL),
    Case("small", SMALL, "bfloat16"),
    Case("small", SMALL, "bfloat16", layout="BTNH"),
    Case("causal", SMALL, mask="causal"),
    Case("window", SMALL, mask="window"),
    Case("half padding", SMALL, mask="padding"),
    Case("grouped", Size(2, 4, 2, 1, 64, 16), layout="BTNH"),
]

ENGINE = """
import os
import numpy as np
from polyattn_peers.call import Prepared

def versions():
    return {"made": "here"}

def prepare(call):
    if call.layout == "BTNH":
        os.abort()
    call.need(call.mask == "none", "it knows no masks")
    print("what an engine says is no answer")
    return Prepared(lambda: np.zeros(call.q.shape, np.float32), lambda out: out)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose engines run in the environment of the tests."""
    peers = tmp_path / "benchmarks" / "peers"
    shutil.copytree(engines.PEERS, peers)
    (peers / "polyattn_peers" / "engines" / "zeros.py").write_text(ENGINE)
    (peers / "requirements" / "zeros.txt").write_text("numpy\n")
    for name in ("jax", "zeros"):
        python = tmp_path / ".peers" / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
    monkeypatch.setattr(engines, "ROOT", tmp_path)
    monkeypatch.setattr(engines, "PEERS", peers)
    return tmp_path


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs jax")
@built_only
@pytest.mark.slow
def test_an_engine_is_right_and_timed(checkout: Path) -> None:
    with Engines(["jax"], 2) as running:
        assert running.about()["jax"]["versions"]["jax"]
        for case in CASES:
            row = timed_case(case, Options(repeats=2, block_s=0.001), engines=running)
            jax = row["peers"]["jax"]
            if "unable" in jax:  # far behind, in a process that has just started
                assert "times as long" in jax["unable"]
            else:
                assert not jax["wrong"] and jax["ms"]["median"] > 0, case.name
                assert jax["error"]["out"] < (2e-6 if case.dtype == "float32" else 1e-2)


@built_only
def test_what_is_wrong_or_crashes_or_cannot_is_said(checkout: Path) -> None:
    plain, aside, causal = (Inputs.of(CASES[i]) for i in (0, 2, 3))
    with Engines(["zeros", "ncnn"], 2) as running:
        about = running.about()
        assert about["zeros"] == {"versions": {"made": "here"}}
        assert "scripts/peers ncnn" in about["ncnn"]["unable"]
        (way, other), *more = running.parties(plain)
        assert not more
        assert isinstance(way, Way) and way.timed is not None and isinstance(other, Unable)
        assert way.timed(3)[0] > 0 and not way.call(plain.q, plain.k, plain.v).any()
        assert [w.why for w in next(running.parties(causal)) if isinstance(w, Unable)] == [
            "it knows no masks", "not installed; scripts/peers ncnn",
        ]  # fmt: skip
        crashed, _ = next(running.parties(aside))
        assert isinstance(crashed, Unable) and "crashed (SIGABRT)" in crashed.why
        again, _ = next(running.parties(plain))  # in a new process
        assert isinstance(again, Way)
        row = timed_case(CASES[0], Options(repeats=2, block_s=0.001), engines=running)
        assert row["peers"]["zeros"]["wrong"] and not row["wrong"]


@built_only
def test_engines_that_do_not_fit_together_take_turns(checkout: Path, monkeypatch) -> None:
    home = checkout / ".peers"
    shutil.copytree(home / "zeros", home / "zeros_again")
    code = checkout / "benchmarks" / "peers" / "polyattn_peers" / "engines"
    shutil.copy(code / "zeros.py", code / "zeros_again.py")
    with Engines(["zeros", "zeros_again", "ncnn"], 2) as running:
        full = lambda case, times: "no room" if running.processes() else ""  # noqa: E731
        monkeypatch.setattr(engines, "lacking", full)
        assert running.about() and running.processes()  # as of a case before, which hold its memory
        held = [
            ([way.name for way in party], len(running.processes()))
            for party in running.parties(Inputs.of(CASES[0]))
        ]
        assert held == [(["zeros"], 1), (["zeros_again"], 1), (["ncnn"], 0)]
        row = timed_case(CASES[0], Options(repeats=2, block_s=0.001), engines=running)
        assert row["peers"]["zeros"]["ratio"] and row["peers"]["zeros_again"]["ratio"]
        monkeypatch.setattr(engines, "lacking", lambda case, times: "no room")
        (party,) = running.parties(Inputs.of(CASES[0]))
        assert [way.why for way in party] == ["no room"] * 3


def test_no_process_is_left(checkout: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Engines(["zeros"], 2) as running:
        running.about()
        (process,) = running.processes()
        os.kill(process, 0)
        raise KeyboardInterrupt
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert running.processes() == []


def test_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen_engines("all") == tuple(known_engines()) and "openvino" in known_engines()
    assert chosen_engines("ncnn,jax") == ("ncnn", "jax")
    files = {path.stem for path in (engines.PEERS / "polyattn_peers" / "engines").glob("[a-z]*.py")}
    assert files == set(known_engines())
    if isinstance(module.status(), Available):
        assert main(["cpu", "--peers", "abacus"]) == 2
        assert "got --peers abacus, expected all or some of ggml" in capsys.readouterr().err
    monkeypatch.setattr(engines, "PEERS", Path("/nowhere"))
    with pytest.raises(MissingDependency, match="expected a checkout"):
        chosen_engines("all")


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent on Linux")
def test_a_stopped_engine_ends_with_a_bench_that_is_killed(checkout: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from polyattn.bench.cpu import engines; "
        "engines.ROOT = Path(sys.argv[1]); engines.PEERS = engines.ROOT / 'benchmarks' / 'peers'; "
        "running = engines.Engines(['zeros'], 1); running.about(); "
        "print(*running.processes(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(checkout)], capture_output=True, text=True, check=False
    )
    worker = int(done.stdout)
    until = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        if Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            break  # ended, and not yet collected by whoever inherited it
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{worker}").exists()

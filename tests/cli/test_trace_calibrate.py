"""`polyattn trace calibrate` that runs the program again itself, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest

from polyattn.cli import main
from polyattn.cli.trace_reruns import recording_options
from polyattn.errors import TraceError
from polyattn.trace import Header, TraceWriter, read

PROGRAM = """
import sys
import torch
from torch import nn
from polyattn.hooks import trace_step

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.act(self.up(x)) * (1.1 if "--wrong" in sys.argv else 1))

torch.manual_seed(0)
first, net = nn.Sequential(nn.Linear(8, 8)), Net()
with torch.no_grad():
    for step in range(3):
        with trace_step(step):
            net(first(torch.randn(4, 8)))
print("said by the program", sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trace(capsys, *arguments):
    """Exit code, stdout, stderr of `polyattn trace ...`."""
    code = main(["trace", *map(str, arguments)])
    return code, *capsys.readouterr()


def write(path, noise=0.0, **selection):
    """A trace of one module."""
    random = np.random.default_rng(selection.get("perturb", 0))
    with TraceWriter(path, Header.new(selection=selection)) as run:
        run.add("up", "in", "args[0]", np.ones(64, np.float32), cls="Linear")
        y = 1 + noise * random.uniform(-1, 1, 64)
        run.add("up", "out", "out", y.astype(np.float32), cls="Linear")
    return path


def test_the_program_is_run_again(folder, capsys, monkeypatch, tmp_path_factory):
    pytest.importorskip("torch")
    temporary = tmp_path_factory.mktemp("temporary")
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    Path("program.py").write_text(PROGRAM)
    options = ("--steps", "0,2", "--layers", "^(up|down|)$", "--stats", "l2,sketch,mean")
    assert trace(capsys, "record", "--out", "a.jsonl", *options, "program.py", "x")[0] == 0
    code, out, err = trace(
        capsys, "calibrate", "--runs", "2", "--out", "floor.json", "a.Net.jsonl", "--",
        "program.py", "x",
    )  # fmt: skip
    assert code == 0, err
    assert "relative noise of 2 reruns" in out
    assert "said by the program" not in out
    assert "rerun 1 of 2: 12 records" in err
    assert "the model's inputs differ by up to" in err  # which the first model makes
    assert "rerun 2 of 2: 12 records" in err
    floor = json.loads(Path("floor.json").read_text())
    assert floor["errors"].keys() == {"", "up", "down"}
    assert 0 < floor["errors"]["down"]["out:out"] < 1e-5
    assert not list(temporary.iterdir())
    assert trace(capsys, "record", "--out", "b.jsonl", *options, "program.py", "--wrong")[0] == 0
    verdict = trace(capsys, "diff", "a.Net.jsonl", "b.Net.jsonl", "--floor", "floor.json")
    assert verdict[0] == 1
    assert "'down'" in verdict[1].splitlines()[0]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; sys.exit('no such weights')", "got exit code 1 of rerun 1 of program.py"),
        ("import torch; torch.nn.Sequential(torch.nn.ReLU())(torch.ones(2))", "none with the ref"),
        ("print(1)", "called 0 models"),
    ],
)
def test_a_program_that_is_another(folder, capsys, program, said):
    pytest.importorskip("torch")
    Path("program.py").write_text(program)
    header = Header.new(framework="torch", modules={"": "Net"}, selection={})
    with TraceWriter("a.jsonl", header) as run:
        run.add("", "out", "out", np.ones(4))
    code, out, err = trace(capsys, "calibrate", "--out", "f.json", "a.jsonl", "--", "program.py")
    assert (code, out) == (2, "")
    assert said in err
    assert ("no such weights" in err) == ("sys.exit" in program)
    assert not Path("f.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a.jsonl"], "got no reruns"),
        (["a.jsonl", "--"], "got no program"),
        (["a.jsonl", "--", "none.py"], "does not exist"),
        (["a.jsonl", "--", "-"], "which can be read once"),
        (["a.jsonl", "b.jsonl", "--", "a.jsonl"], "expected one of both"),
        (["a.jsonl", "--runs", "0", "--", "a.jsonl"], "got --runs 0"),
        (["p.jsonl", "b.jsonl"], "which was recorded with --perturb"),
        (["a.jsonl", "p.jsonl", "q.jsonl"], "the same --perturb 1 as p.jsonl"),
        (["a.jsonl", "--", "a.jsonl"], "got a reference of numpy"),
    ],
)
def test_what_cannot_be_meant(folder, capsys, arguments, said):
    write("a.jsonl")
    write("b.jsonl", 1e-6)
    write("p.jsonl", 1e-6, perturb=1)
    write("q.jsonl", 1e-6, perturb=1)
    code, out, err = trace(capsys, "calibrate", "--out", "floor.json", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert not Path("floor.json").exists()


def test_other_inputs_are_refused_though_weights_were_perturbed(folder, capsys):
    for name, scale, selection in (("a", 1.0, {}), ("b", 1.5, {"perturb": 1})):
        with TraceWriter(f"{name}.jsonl", Header.new(selection=selection)) as run:
            x = np.full(64, scale, np.float32)
            run.add("", "in", "args[0]", x)
            run.add("", "out", "out", x)
    code, _, err = trace(capsys, "calibrate", "--out", "f.json", "a.jsonl", "b.jsonl")
    assert code == 2
    assert "args[0] (in) of the model is not as in the reference; expected the same inputs" in err


def test_reruns_with_several_seeds(folder, capsys):
    files = write("a.jsonl"), *(write(f"{n}.jsonl", 1e-6, perturb=n) for n in (1, 2, 3))
    assert trace(capsys, "calibrate", "--out", "floor.json", *files)[0] == 0


@pytest.mark.parametrize(
    ("selection", "options"),
    [
        ({}, []),
        ({"layers": None, "steps": None, "gradients": False}, []),
        ({"layers": r"\.\d$", "steps": [0, 2]}, ["--steps", "0,2", "--layers", r"\.\d$"]),
        ({"layers": ["a.b", "c"]}, ["--layers", r"^(?:a\.b|c)$"]),
        ({"layers": ["^a", "c$"]}, ["--layers", "(?:^a)|(?:c$)"]),
        ({"stats": ["l2", "mine"], "parameters": True}, ["--parameters", "--stats", "l2"]),
        ({"layers": "function chosen"}, "chosen by a function chosen"),
        ({"layers": {"x": "\x1b"}}, "expected a regular expression"),
    ],
)
def test_how_a_trace_was_recorded(tmp_path, selection, options):
    modules = {"a.b": "Linear", "c": "Linear"}
    header = Header.new(framework="torch", modules=modules, selection=selection)
    with TraceWriter(tmp_path / "run.jsonl", header) as run:
        run.add("c", "out", "out", np.ones(4))
    reference = read(tmp_path / "run.jsonl")
    if isinstance(options, str):
        with pytest.raises(TraceError, match=options):
            recording_options(reference)
    else:
        assert recording_options(reference) == options

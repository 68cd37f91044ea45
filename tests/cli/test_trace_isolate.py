"""``polyattn trace isolate``: an unchanged program, fed the reference's tensors."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from polyattn.cli import main
from polyattn.trace import read

PROGRAM = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))) * FACTOR)

class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x)

FACTOR = 1.03 if "--port" in sys.argv else 1.0
Other()(torch.ones(1, 4)) if "--other-first" in sys.argv else None
torch.manual_seed(0)
model = nn.Sequential(*[Block() for _ in range(3)]).bfloat16()
with torch.no_grad():
    out = model(torch.randn(8, 64).bfloat16())
print("the program's own", tuple(out.shape))
if "--fails" in sys.argv:
    sys.exit(7)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    assert main(["trace", "record", "--tensors", "", "--out", "ref.jsonl", "program.py"]) == 0
    return "program.py"


def isolate(*arguments: str) -> int:
    return main(["trace", "isolate", "--reference", "ref.jsonl", *arguments])


def test_the_fault_is_named_and_a_clean_program_is_the_same(
    program: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    assert isolate(program, "--port") == 1
    said = capfd.readouterr()
    assert "the code of '0' itself" in said.out and "'0.down'" in said.out
    assert said.out.count("the program's own") == 1  # what it prints in its first run is not shown
    assert "these differ too" in said.out and "1, 2" in said.out
    assert isolate(program) == 0


def test_json_the_kept_trace_and_a_trace_of_the_port(
    program: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "record", "--out", "port.jsonl", program, "--port"]) == 0
    capfd.readouterr()
    code = isolate("--json=v.json", "--port", "port.jsonl", "--out", "fed.jsonl", program, "--port")
    assert code == 1
    found = json.loads(Path("v.json").read_text())
    assert found["culprit"]["module"] == "0" and found["port"] == "fed.jsonl"
    assert found["program_exit_code"] == 0
    assert read("fed.jsonl").header.selection["isolated"] is True
    capfd.readouterr()
    assert main(["trace", "diff", "ref.jsonl", "fed.jsonl"]) == 1
    assert "the code of '0' itself" in capfd.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("caught", [False, True])
def test_told_to_end_while_the_program_runs(
    caught: bool, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = "except SystemExit" if caught else "finally"
    end = f"import signal\ntry: signal.raise_signal(signal.SIGTERM)\n{way}: pass\n"
    Path("told.py").write_text(PROGRAM + end)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert isolate("--port", "ref.jsonl", "told.py") == 128 + signal.SIGTERM
    assert not list((tmp_path / "scratch").glob("polyattn-*"))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_in_a_wider_dtype(program: str) -> None:
    assert isolate("--upcast", "float32", program) == 0
    assert isolate("--upcast", "float32", program, "--port") == 1


def test_the_model_is_found_among_others(program: str, tmp_path: Path) -> None:
    record = ["trace", "record", "--out", "port.jsonl", program, "--other-first"]
    assert main(record) == 0
    ports = "port.Sequential.jsonl"
    assert Path(ports).is_file()
    assert isolate("--port", ports, program, "--other-first") == 0
    assert isolate("--port", ports, program, "--other-first", "--port") == 1


ENCODED_FIRST = """
import sys
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.one, self.two, self.factor = nn.Linear(32, 32), nn.Linear(32, 32), factor

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)) * self.factor)

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = Part(1.05 if "--encoder" in sys.argv else 1.0)
        self.decoder = Part(1.05 if "--decoder" in sys.argv else 1.0)

    def forward(self, x, encoded=None):
        return self.decoder(x + (self.encoder(x) if encoded is None else encoded))

torch.manual_seed(0)
model, x = Both().bfloat16(), torch.randn(8, 32).bfloat16()
with torch.no_grad():
    encoded = model.encoder(x)
    model(model(x, encoded))
"""


@pytest.mark.parametrize("wrong", ["", "encoder", "decoder"])
def test_a_part_that_is_called_before_the_model(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls of the model's trace go on after those of the part, and so does what is fed."""
    monkeypatch.chdir(tmp_path)
    Path("first.py").write_text(ENCODED_FIRST)
    assert main(["trace", "record", "--tensors", "", "--out", "ref.jsonl", "first.py"]) == 0
    options = ["--json=v.json", "--out", "fed.jsonl", "first.py"]
    assert isolate(*options, f"--{wrong}") == int(bool(wrong))
    if wrong:
        found = json.loads(Path("v.json").read_text())["culprit"]
        assert (found["module"], found["at"], found["others"]) == (wrong, f"{wrong}.two", [])
    fed = [
        (r.call, r.forced)
        for r in read("fed.jsonl").records
        if (r.module, r.phase) == ("encoder.two", "out")
    ]
    assert fed == [(0, False), (1, True)]


def test_a_program_that_fails_is_said(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert isolate(program, "--fails") == 2
    assert "exit code 7" in capfd.readouterr().err
    assert isolate(program, "--fails", "--port") == 1


def test_what_cannot_be_isolated(program: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "record", "--out", "stats.jsonl", program]) == 0
    capfd.readouterr()
    assert main(["trace", "isolate", "--reference", "stats.jsonl", program]) == 2
    said = capfd.readouterr()
    assert "kept no whole tensors" in said.err and "first run" not in said.err
    Path("empty.py").write_text("print(3)")
    assert isolate("empty.py") == 2
    assert "recorded nothing" in capfd.readouterr().err
    assert isolate("--out", "ref.jsonl", program) == 2
    assert "ref.jsonl, which is there already" in capfd.readouterr().err
    assert isolate("nowhere.py") == 2
    assert main(["trace", "record", "--out", "port.jsonl", program]) == 0
    Path("other.py").write_text("import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))")
    capfd.readouterr()
    assert isolate("--port", "port.jsonl", "other.py") == 2
    assert "did not call the model" in capfd.readouterr().err


NOISY = """
import sys
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in "qkvo")

    def forward(self, x):
        parts = (part(x).unflatten(-1, (4, 16)) for part in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        if "--fused" in sys.argv:
            out = nn.functional.scaled_dot_product_attention(q, k, v, scale=1.0)
        else:
            out = (q @ k.mT).float().softmax(-1).to(q.dtype) @ v
        return self.o(out.transpose(1, 2).flatten(2))

torch.manual_seed(0)
model = Attention()
with torch.no_grad():
    for part in (model.q, model.k):
        part.weight.mul_(8.0)
    model.bfloat16()(torch.randn(2, 24, 64).bfloat16())
"""


def test_noise_is_measured_where_something_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noisy.py").write_text(NOISY)
    assert main(["trace", "record", "--tensors", "", "--out", "ref.jsonl", "noisy.py"]) == 0
    assert isolate("--no-noise", "noisy.py", "--fused") == 1
    capfd.readouterr()
    assert isolate("--out", "kept.jsonl", "noisy.py", "--fused") == 0
    assert "measured noise" in capfd.readouterr().out
    assert any(record.noise for record in read("kept.jsonl").records)

"""``polyattn trace isolate`` of a program of several ranks: each is judged on its own tensors."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from polyattn.cli import main

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs torch.distributed with gloo",
)

PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
FACTOR = 1.03 if "--port" in sys.argv and rank == 1 else 1.0


class Block(nn.Module):
    # its hidden dimension is split over the ranks
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        part = self.down(nn.functional.gelu(self.up(self.norm(x))) * FACTOR)
        dist.all_reduce(part)
        return x + part / world


torch.manual_seed(rank)
model = nn.Sequential(Block(), Block()).bfloat16()
torch.manual_seed(9)
with torch.no_grad():
    out = model(torch.randn(8, 32).bfloat16())
dist.destroy_process_group()
"""


def free_port() -> int:
    """A port that is free, and the next one too."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def in_ranks(*arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of `polyattn trace ...` in each of two ranks."""
    shared = {
        "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "polyattn", "trace", *arguments],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(os.environ) | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        said = [one.communicate(timeout=300)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    return [(one.returncode, text) for one, text in zip(started, said, strict=True)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    return tmp_path


def verdict(rank: int) -> Any:
    return json.loads(Path(f"v.rank{rank}.json").read_text())


def test_the_rank_that_is_wrong_is_named(folder: Path) -> None:
    done = in_ranks("record", "--tensors", "", "--out", "ref.jsonl", "program.py")
    assert [code for code, _ in done] == [0, 0], done
    assert Path("ref.rank0.jsonl").is_file() and Path("ref.rank1.jsonl").is_file()
    options = ["--reference", "ref.jsonl", "--json=v.json", "--out", "fed.jsonl"]
    done = in_ranks("isolate", *options, "program.py", "--port")
    assert [code for code, _ in done] == [0, 1], done
    assert verdict(0)["equal"] is True and verdict(0)["coverage"]["compared"] == 9
    found = verdict(1)["culprit"]
    assert (found["module"], found["at"], found["others"]) == ("0", "0.down", ["1"])
    assert Path("fed.rank0.jsonl").is_file() and Path("fed.rank1.jsonl").is_file()


@pytest.mark.slow
def test_under_torchrun_no_rank_is_ended_before_its_verdict(folder: Path) -> None:
    """torchrun ends all ranks when one exits with 1, and both runs meet in its store."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr",
        "127.0.0.1", "--master-port", str(free_port()), "-m", "polyattn", "trace",
    ]  # fmt: skip
    env = dict(os.environ) | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}

    def run(*arguments: str) -> int:
        return subprocess.run([*command, *arguments], env=env, timeout=300).returncode

    assert run("record", "--tensors", "", "--out", "ref.jsonl", "program.py") == 0
    options = ["--reference", "ref.jsonl", "--json=v.json"]
    assert run("isolate", *options, "program.py", "--port") == 1
    assert verdict(0)["equal"] is True and verdict(1)["culprit"]["at"] == "0.down"


def test_what_there_is_no_file_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    Path("plain.py").write_text("import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))")
    assert main(["trace", "record", "--tensors", "", "--out", "one.jsonl", "plain.py"]) == 0
    os.link("one.jsonl", "other.rank1.jsonl")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    capsys.readouterr()
    assert main(["trace", "isolate", "--reference", "one.jsonl", "plain.py"]) == 2
    said = capsys.readouterr().err
    assert "there is no one.rank1.jsonl" in said and "first run" not in said
    assert main(["trace", "isolate", "--reference", "other.jsonl", "plain.py"]) == 2
    assert "of rank 0 of 1 in rank 1 of 2" in capsys.readouterr().err


def test_a_program_that_makes_itself_a_rank(folder: Path, capsys: Any) -> None:
    Path("own.py").write_text(
        "import os, torch\nos.environ.update(RANK='0', WORLD_SIZE='2')\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))"
    )
    Path("plain.py").write_text("import torch; torch.nn.Linear(2, 2)(torch.ones(1, 2))")
    assert main(["trace", "record", "--tensors", "", "--out", "ref.jsonl", "plain.py"]) == 0
    capsys.readouterr()
    assert main(["trace", "isolate", "--reference", "ref.jsonl", "own.py"]) == 2
    said = capsys.readouterr().err
    assert "makes itself one of several ranks" in said and "torchrun" in said

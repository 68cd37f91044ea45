"""Where commands write to: said early where that cannot be, closed streams, full devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn.cli import main
from polyattn.outputs import check_output

pytest.importorskip("torch")

ASKS = """
import shutil, sys
import torch, torch.nn.functional as F
q = torch.randn(1, 2, 8, 8)
F.scaled_dot_product_attention(q, q, q, is_causal=True)
shutil.rmtree("there", ignore_errors=True)
open("there", "w").close()
sys.exit(int(sys.argv[1]))
"""
EXPLAIN = "explain --q 1,8,2,8"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one, with a program in it that removes the folder `there`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "program.py").write_text(ASKS)
    return tmp_path


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell in which `polyattn` is this Python's."""
    line = line.replace("polyattn", f"{sys.executable} -m polyattn", 1)
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("command", ["run", "tune"])
@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("--json=no/folder/r", "no folder"),
        ("--json=there", "a folder"),
        ("--record=no/folder/r", "no folder"),
        ("--record=there", "a folder"),
        ("--html=there", "a folder"),
        ("--html=program.py/r", "no folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_runs(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, output: str, why: str
) -> None:
    if command == "tune" and output.startswith("--html"):
        pytest.skip("tune makes no page")
    (folder / "program.py").write_text("open('ran', 'w')\n")
    assert main([command, output, "program.py"]) == 2
    said = capsys.readouterr().err
    assert f"got {output}, which cannot be written" in said and why in said
    assert not (folder / "ran").exists()


def test_pipes_and_what_is_there_are_taken(folder: Path) -> None:
    (folder / "r.json").write_text("before")
    for path in ("-", "/dev/stdout", "r.json", "r.html", "new/r.html"):
        check_output("--json", path, makes_folders=True)


@pytest.mark.parametrize("code", [0, 3])
def test_an_output_that_fails_at_the_end_loses_neither_the_others_nor_the_exit_code(
    folder: Path, code: int
) -> None:
    outputs = "--json=there/r.json --record=r.jsonl --html=r.html"
    done = shell(f"polyattn run {outputs} program.py {code}")
    assert done.returncode == (code or 2), done.stderr
    assert "got --json=there/r.json, which cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert (folder / "r.jsonl").exists() and (folder / "r.html").exists()


def test_a_page_that_fails_at_the_end_leaves_the_report(folder: Path) -> None:
    done = shell("polyattn run --html=there/r.html --record=there/r.jsonl program.py 0")
    assert done.returncode == 2
    assert done.stderr.count("cannot be written") == 2
    assert "1 attention call" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="closed as a POSIX shell closes them")
class TestStreams:
    @pytest.mark.parametrize("command", ["--version", "--help", EXPLAIN, "doctor sdpa_math --json"])
    @pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
    def test_closed_ones(self, command: str, closed: str) -> None:
        done = shell(f"polyattn {command} {closed}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_a_program_starts_and_finds_them_closed(self, folder: Path) -> None:
        (folder / "looks.py").write_text(
            "import sys\nopen('said', 'w').write(f'{sys.stdout} {sys.stderr}')\nsys.exit(5)\n"
        )
        done = shell("polyattn run --json=r.json looks.py >&- 2>&-")
        assert done.returncode == 5
        assert (folder / "said").read_text() == "None None"
        assert json.loads((folder / "r.json").read_text())["exit_code"] == 5

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
    @pytest.mark.parametrize("command", ["--version", EXPLAIN, f"{EXPLAIN} --json"])
    def test_a_full_device_is_said_in_a_sentence(self, command: str) -> None:
        done = shell(f"polyattn {command} >/dev/full")
        assert done.returncode == 2
        assert done.stderr.startswith("polyattn: got a standard output that cannot be written")
        assert len(done.stderr.splitlines()) == 1

"""The page's file: whole or not at all, over nothing but a page, and from the command line."""

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from polyattn.cli import main
from polyattn.errors import TraceError
from polyattn.report.verdict import page, write_page
from polyattn.trace import TraceWriter
from tests.report.verdict.verdicts import different, hostile, same

needs_rights = pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)


def record(path, factor=1.0):
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    with TraceWriter(path) as run:
        run.add("up", "in", "args[0]", x, cls="Linear")
        run.add("up", "out", "out", x * np.float32(factor), cls="Linear")
    return str(path)


def test_file_is_the_page_and_replaces_one(tmp_path):
    path = tmp_path / "made" / "diff.html"
    assert write_page(different(), path) == path
    assert path.read_text(encoding="utf-8") == page(different())
    write_page(same(), str(path), rows=2)
    assert path.read_text(encoding="utf-8") == page(same(), rows=2)
    assert [one.name for one in path.parent.iterdir()] == ["diff.html"]
    write_page(hostile(), path)


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX")
def test_mode_is_that_of_a_new_file_and_links_stay(tmp_path):
    plain, link = tmp_path / "plain", tmp_path / "link.html"
    plain.touch()
    link.symlink_to(tmp_path / "real.html")
    write_page(same(), link)
    assert link.is_symlink()
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (plain, tmp_path / "real.html")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize("begins", ['{"polyattn.trace": {"schema": 1}}\n', "x", "<!doctype html>"])
def test_what_is_no_page_stays(tmp_path, begins):
    path = tmp_path / "run.jsonl"
    path.write_text(begins)
    with pytest.raises(TraceError, match="holds something else than such a page"):
        write_page(same(), path)
    assert path.read_text() == begins
    path.write_text("")
    write_page(same(), path)  # an empty file, as of mktemp, is nobody's


@pytest.mark.parametrize("path", ["", "folder", "file/below.html", "nul\0.html", "x" * 300])
def test_what_cannot_be_written_says_so(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    with pytest.raises(TraceError, match="cannot be written"):
        write_page(same(), path)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


@needs_rights
def test_a_folder_without_rights(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TraceError, match="cannot be written"):
        write_page(same(), tmp_path / "diff.html")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_says_so():
    with pytest.raises(TraceError, match="cannot be written"):
        write_page(same(), "/dev/full")


def test_a_write_that_fails_leaves_the_page_that_was(tmp_path, monkeypatch):
    path = write_page(same(), tmp_path / "diff.html")
    before = path.read_bytes()
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(TraceError, match="full"):
        write_page(different(), path)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["diff.html"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a FIFO")
def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_page(same(), pipe)
    reader.join()
    assert read == [page(same()).encode()]
    assert pipe.is_fifo()


class TestCommand:
    def test_page_beside_the_report(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        a, b = record("a.jsonl"), record("b.jsonl", 1.5)
        assert main(["trace", "diff", a, b, "--html", "d.html"]) == 1
        out, err = capsys.readouterr()
        assert out.startswith("different: the output of 'up'")
        assert "d.html" in err
        assert "different: the output of " in Path("d.html").read_text(encoding="utf-8")
        assert main(["trace", "diff", a, a, "--html", "d.html", "--json"]) == 0
        assert capsys.readouterr().out.startswith("{")
        assert "same: no module" in Path("d.html").read_text(encoding="utf-8")

    @pytest.mark.parametrize("target", ["a.jsonl", "b.jsonl", "./a.jsonl", "link.jsonl"])
    def test_a_trace_is_never_written_over(self, tmp_path, monkeypatch, capsys, target):
        monkeypatch.chdir(tmp_path)
        a, b = record("a.jsonl"), record("b.jsonl", 1.5)
        Path("link.jsonl").symlink_to("b.jsonl")
        before = [Path(one).read_bytes() for one in (a, b)]
        assert main(["trace", "diff", a, b, "--html", target]) == 2
        out, err = capsys.readouterr()
        assert out.startswith("different")  # the verdict is not lost
        assert "holds something else than such a page, as a trace" in err
        assert [Path(one).read_bytes() for one in (a, b)] == before

    def test_a_pipe_that_closes_does_not_cost_the_page(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        a, b = record("a.jsonl"), record("b.jsonl", 1.5)
        code = "from polyattn.cli import main; main()"
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-c", code, "trace", "diff", a, b, "--html", "d.html"]
        with open(write, "wb") as closed:
            subprocess.run(command, stdout=closed, stderr=subprocess.DEVNULL, check=False)
        assert "different" in Path("d.html").read_text(encoding="utf-8")

    def test_a_place_that_cannot_be_written(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        a = record("a.jsonl")
        assert main(["trace", "diff", a, a, "--html", "a.jsonl/d.html"]) == 2
        assert "cannot be written" in capsys.readouterr().err
        assert main(["trace", "diff", a, a, "--html="]) == 2
        assert "cannot be written" in capsys.readouterr().err

"""A program that a command runs as a step of its own ends with the command."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from polyattn.cli import main
from polyattn.cli.supervise import run_child

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")

_COMMAND = """
import sys, tempfile
from pathlib import Path
from polyattn.cli.supervise import run_child

with tempfile.TemporaryDirectory(dir=sys.argv[1], prefix="scratch-"):
    child = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w')); time.sleep(60)"
    run_child([sys.executable, "-c", child, sys.argv[1] + "/child"])
"""


def _there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_ends_its_child(number: signal.Signals, tmp_path: Path) -> None:
    one = subprocess.Popen([sys.executable, "-c", _COMMAND, str(tmp_path)])
    try:
        told = tmp_path / "child"
        until = time.monotonic() + 60
        while not (told.exists() and told.read_text().endswith("\n")):
            assert time.monotonic() < until
            time.sleep(0.01)
        child = int(told.read_text())
        assert _there(child)
        one.send_signal(number)
        assert one.wait(60) == 128 + number
        assert not _there(child)
        assert not list(tmp_path.glob("scratch-*"))
    finally:
        one.kill()
        one.wait()


def test_a_bench_that_is_told_to_end_takes_its_scratch_files_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(arguments: list[str]) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(signal.SIGTERM)
        return 0

    def unhandled(number: int, frame: object) -> None:
        raise AssertionError("it would end the process as it is")

    monkeypatch.setattr("polyattn.bench.main", measured)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert main(["bench"]) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
    before = signal.signal(signal.SIGTERM, unhandled)
    try:
        with pytest.raises(AssertionError, match="as it is"):
            main(["bench"])  # somebody handles it already
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_child_s_end_is_told_and_handlers_are_left_as_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    program = "import sys; print('said'); sys.exit(7)"
    done = run_child([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (7, "said\n")
    assert signal.getsignal(signal.SIGTERM) is before
    ended = run_child([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    assert ended.returncode == -9


_DEAF = """
import os, signal, sys, time
from polyattn.cli.supervise import scratch_folder, told_to_end

first, second = (getattr(signal, name) for name in sys.argv[1:])
with told_to_end(), scratch_folder("scratch-") as folder:
    for each in range(20):
        (folder / str(each)).touch()
    remove = os.unlink
    def unlink(*given, **options):
        signal.raise_signal(second)
        remove(*given, **options)
    os.unlink = unlink
    try:
        signal.raise_signal(first)
    finally:
        if second != signal.SIGINT:
            signal.raise_signal(second)  # amid the ending, at once: it is the same request
"""


@pytest.mark.parametrize("second", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("first", ["SIGTERM", "SIGHUP"])
def test_a_second_signal_at_once_does_not_break_the_ending_off(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", _DEAF, first, second], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 128 + getattr(signal, first), done.stderr
    assert not list(tmp_path.iterdir())
    assert done.stderr == ""

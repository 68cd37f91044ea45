"""How a command of its own process ends: at once, by its exit code, and without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

_COMMAND = """
import atexit, signal, sys
from polyattn.cli import commands, main

commands._dispatch = lambda arguments: exec("signal.raise_signal(signal.SIGINT)")
sys.argv = ["polyattn", "doctor"]
code = main()
if "twice" in sys.orig_argv:
    atexit.register(signal.raise_signal, signal.SIGINT)
sys.exit(code)
"""


def ended(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_within_code_that_is_executed_gives_130() -> None:
    """Imports of frameworks run such code; the interpreter would end by SIGINT for it."""
    assert ended() == (130, "interrupted\n")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_second_interrupt_while_the_interpreter_ends_prints_nothing() -> None:
    assert ended("twice") == (-signal.SIGINT, "interrupted\n")


@pytest.mark.parametrize("command", [["fuzz", "--help"], ["fuzz", "--problems", "none"]])
def test_fuzz_reads_its_arguments_before_it_imports_a_framework(command: list[str]) -> None:
    code = (
        "import sys; from polyattn.cli import main; "
        f"code = main({command!r}); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert done.returncode == (0 if "--help" in command else 2), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
@pytest.mark.parametrize("printing", ["polyattn.bench.report", "polyattn.cli.printing"])
def test_a_reader_that_is_gone_gives_141(printing: str) -> None:
    """And not 1, which says that something was found, or is slower."""
    code = (
        "import sys; from polyattn.cli import commands, main; "
        f"from {printing} import console; "
        "commands._dispatch = lambda arguments: console().print('x' * 100_000) or 0; "
        "sys.exit(main(['fuzz']))"
    )
    receiver, sender = os.pipe()
    os.close(receiver)
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=sender,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    os.close(sender)
    assert (done.returncode, done.stderr) == (141, b"")

"""A program started as Python would start it, waited for, and handed what signals come.

The program has this process's terminal, files and group. What the terminal sends, as Ctrl-C, it
gets like everybody in the group, and it is waited for all the same; a signal that somebody sends to
this process alone is passed on.

`run_child` is for runs of a program that are a step of a command of ours: they end when it does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from polyattn.errors import PolyattnError

__all__ = [
    "interpreter_options", "run_child", "run_supervised", "scratch_folder", "told_to_end",
]  # fmt: skip

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_OF_SOMEBODY = 0
"""The code of a signal that a process has sent (SI_USER); the terminal's has another."""
_ENDING = ("SIGTERM", "SIGHUP")
_PATIENCE_S = 5.0
_ONE_S = 0.5
"""Within which signals are one request: a shell and the terminal both send SIGHUP."""


def run_child(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command to its end, with the options of Popen; what ends this process ends it, too.

    SIGTERM and SIGHUP raise SystemExit(128 + N) meanwhile, so that the caller's files go as well.
    """
    with told_to_end(), subprocess.Popen(command, **options) as child:
        try:
            said, errors = child.communicate()
        except BaseException:
            child.terminate()
            try:
                child.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
    return subprocess.CompletedProcess(command, child.returncode, said, errors)


@contextmanager
def told_to_end() -> Iterator[list[int]]:
    """Have SIGTERM and SIGHUP raise SystemExit(128 + N) where nobody handles or ignores them.

    Children and files of what runs within go then as they do after Ctrl-C. Yields the list of the
    exit codes that were raised, for where somebody else's code may have caught them.
    """
    held: list[signal.Signals] = []
    codes: list[int] = []
    here, first = os.getpid(), 0.0

    def told(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now, ours = time.monotonic(), os.getpid() == here  # of a forked child: its parent's files
        if ours and codes and now - first < _ONE_S:
            return
        if codes or not ours:  # a second one, amid the ending, ends it as ever
            for one in held:
                signal.signal(one, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        first = now
        codes.append(128 + number)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
        held = [one for one in numbers if signal.getsignal(one) is signal.SIG_DFL]
    try:
        for one in held:
            signal.signal(one, told)
        yield codes
    finally:
        for one in held:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def scratch_folder(prefix: str) -> Iterator[Path]:
    """Give a folder that is gone afterwards; no signal breaks its removal off."""
    made = tempfile.TemporaryDirectory(prefix=prefix)
    try:
        yield Path(made.name)
    finally:
        with _deaf():
            made.cleanup()


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore what interrupts and ends, for a moment."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in ("SIGINT", *_ENDING) if hasattr(signal, name)]
        before = {one: signal.signal(one, signal.SIG_IGN) for one in numbers}
    try:
        yield
    finally:
        for one, handler in before.items():
            if handler is not None:  # one that C code has set cannot be put back
                signal.signal(one, handler)


def run_supervised(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run ``python PROGRAM`` to its end; returns its exit code, 128 + N if signal N ended it.

    Raises PolyattnError where this Python was started so that it reads no environment.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise PolyattnError(
            "got a Python started with -I, -E or -S, expected one that reads PYTHONPATH, by which "
            "a program and its processes are reached; run polyattn without these options."
        )
    command = [sys.executable, *interpreter_options(sys.orig_argv), *program]
    sys.stdout.flush()
    sys.stderr.flush()
    if not hasattr(signal, "pthread_sigmask") or not hasattr(os, "posix_spawn"):
        return _code(subprocess.call(command, env=dict(environment)))  # Windows
    return _code(_waited_for(command, environment))


def interpreter_options(argv: Sequence[str]) -> list[str]:
    """Return the options of Python itself in a command line.

    >>> interpreter_options(["python", "-O", "-W", "error", "-m", "polyattn", "run", "x.py"])
    ['-O', '-W', 'error']
    >>> interpreter_options(["python", "-Xdev", "-um", "polyattn", "run", "x.py"])
    ['-Xdev', '-u']
    """
    found: list[str] = []
    at = 1
    while at < len(argv) and argv[at].startswith("-") and argv[at] != "-":
        token = argv[at]
        if token in ("-W", "-X", "--check-hash-based-pycs"):
            found += argv[at : at + 2]
            at += 2
            continue
        if not token.startswith(("--", "-W", "-X")):
            ends = [token.find(letter) for letter in "cm" if letter in token]
            if ends:
                return [*found, *([token[: min(ends)]] if min(ends) > 1 else [])]
        found.append(token)
        at += 1
    return found


def _waited_for(command: list[str], environment: Mapping[str, str]) -> int:
    """Start it and wait, with signals held back so that none is missed; -N if signal N ended it."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # or nobody would hear that it ended
    passed_on = {getattr(signal, name) for name in _PASSED_ON if hasattr(signal, name)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, passed_on | {signal.SIGCHLD})
    try:
        pid = os.posix_spawn(
            command[0],
            command,
            environment,
            setsigmask=before,
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # which Python ignores for itself
        )
        while True:
            number, sent = _signal(passed_on | {signal.SIGCHLD})
            if number == signal.SIGCHLD:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    return os.waitstatus_to_exitcode(status)
            elif sent:
                os.kill(pid, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal(awaited: set[signal.Signals]) -> tuple[int, bool]:
    """Wait for a signal; returns it, and whether somebody sent it to this process alone."""
    if hasattr(signal, "sigwaitinfo"):
        info = signal.sigwaitinfo(awaited)
        return info.si_signo, info.si_code <= _OF_SOMEBODY
    number = signal.sigwait(awaited)  # macOS does not say who sent it
    return number, not (number in (signal.SIGINT, signal.SIGQUIT) and _in_front())


def _in_front() -> bool:
    """Whether a terminal sends its signals to this process."""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno()) == os.getpgrp() if sys.__stdin__ else False
    except (OSError, ValueError):
        return False


def _code(returned: int) -> int:
    return 128 - returned if returned < 0 else returned

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
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from polyattn.errors import PolyattnError

__all__ = ["interpreter_options", "run_child", "run_supervised", "told_to_end"]

_PASSED_ON = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
_OF_SOMEBODY = 0
"""The code of a signal that a process has sent (SI_USER); the terminal's has another."""
_ENDING = ("SIGTERM", "SIGHUP")
_PATIENCE_S = 5.0


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
def told_to_end() -> Iterator[None]:
    """Have SIGTERM and SIGHUP raise SystemExit(128 + N) where nobody handles or ignores them.

    Children and files of what runs within go then as they do after Ctrl-C.
    """
    held: list[signal.Signals] = []
    here = os.getpid()

    def told(number: int, frame: FrameType | None) -> None:
        for one in held:  # a second one, amid the ending, ends it as ever
            signal.signal(one, signal.SIG_DFL)
        if os.getpid() != here:  # a forked child: the files are its parent's
            os.kill(os.getpid(), number)
        raise SystemExit(128 + number)

    if threading.current_thread() is threading.main_thread():
        numbers = [getattr(signal, name) for name in _ENDING if hasattr(signal, name)]
        held = [one for one in numbers if signal.getsignal(one) is signal.SIG_DFL]
    try:
        for one in held:
            signal.signal(one, told)
        yield
    finally:
        for one in held:
            signal.signal(one, signal.SIG_DFL)


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

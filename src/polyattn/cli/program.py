"""Runs a program as ``python SCRIPT ARGS`` or ``python -m MODULE ARGS`` would, in this process.

``-c CODE ARGS`` and ``- ARGS``, a program from standard input, are taken too.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import importlib.machinery
import io
import os
import re
import runpy
import shutil
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from polyattn.errors import PolyattnError

__all__ = ["check_program", "run_program"]

_LOOK_EVERY_S = 0.1


def check_program(program: Sequence[str], again: bool = False) -> None:
    """Raise for a program that cannot be there, before anything heavy is imported.

    `again`: it is run several times.
    """
    if not program or program in (["-m"], ["-c"]):
        raise PolyattnError("got no program, expected SCRIPT [ARGS] or -m MODULE [ARGS].")
    if program[0] == "-" and again:
        raise PolyattnError(
            "got a program from standard input, which can be read once, expected a file: the "
            "program is run several times."
        )
    if program[0] not in ("-m", "-c", "-") and not Path(program[0]).exists():
        raise PolyattnError(
            f"got the program {program[0]!r}, which does not exist, expected a Python file, a "
            f"folder with a __main__.py, or -m MODULE{_advice(program[0])}."
        )


def _advice(name: str) -> str:
    """Say what to do about a command of the system in the place of a program."""
    path = shutil.which(name)
    if path is None:
        return ""
    if re.fullmatch(r"python[\d.]*", name):
        return f"; leave {name!r} out: this Python runs the program"
    return f"; {name!r} is a command: if it is one of Python, name its file, {path}, or its module"


def run_program(program: Sequence[str]) -> int:
    """Run it and return its exit code.

    ``sys.argv``, ``sys.path``, ``__main__`` and the current folder are put back: files that were
    named before it ran are meant from there. The program's threads that are no daemons are waited
    for, as the interpreter would.
    """
    saved = sys.argv, list(sys.path), sys.modules["__main__"]
    ours, folder = frozenset(threading.enumerate()), _current_folder()
    try:
        return _exit_code(_starter(list(program)), ours)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved
        with contextlib.suppress(OSError):
            os.chdir(folder)


def _current_folder() -> str:
    """Return where this process is; the same by its short name where it is deleted."""
    try:
        return os.getcwd()
    except OSError:
        return os.curdir


def _starter(program: list[str]) -> Callable[[], object]:
    if program[0] == "-m":
        module = program[1]
        sys.argv, sys.path[:1] = [module, *program[2:]], [os.getcwd()]
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    path = program[0]
    if path in ("-", "-c"):
        sys.argv, sys.path[:1] = [path, *program[1 if path == "-" else 2 :]], [""]
        name, text = ("<stdin>", _typed()) if path == "-" else ("<string>", program[1])
        return lambda: _run_code(text, name)
    sys.argv = program
    if Path(path).is_dir() or (not path.endswith((".py", ".pyw")) and _is_archive(path)):
        sys.path[:1] = []  # runpy puts the folder or archive first
        return lambda: runpy.run_path(path, run_name="__main__")
    sys.path[:1] = [str(Path(path).resolve().parent)]
    return lambda: _run_script(path)


def _is_archive(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _typed() -> str | bytes:
    """Return all of standard input; bytes say by themselves how they are encoded."""
    return getattr(sys.stdin, "buffer", sys.stdin).read()  # type: ignore[no-any-return]


def _run_script(path: str) -> None:
    whole = os.path.abspath(path)  # as Python names it: the program may go to another folder
    loader = importlib.machinery.SourceFileLoader("__main__", whole)
    with io.open_code(whole) as file:
        _run_code(file.read(), whole, file=whole, cached=None, loader=loader)


def _run_code(text: str | bytes, name: str, **told: object) -> None:
    """Execute a text as ``__main__``, in a module that stays alive for the program's threads."""
    main = types.ModuleType("__main__")
    main.__dict__.update({f"__{key}__": value for key, value in told.items()})
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    code = compile(text, name, "exec", dont_inherit=True)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _exit_code(start: Callable[[], object], ours: frozenset[threading.Thread]) -> int:
    try:
        try:
            start()
        finally:
            _await_threads(ours)
    except SystemExit as leave:
        if leave.code is None or isinstance(leave.code, int):
            return leave.code or 0
        print(leave.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        return _shown(error, 130)
    except BaseException as error:
        return _shown(error, 1)
    return 0


def _shown(error: BaseException, code: int) -> int:
    """Print the traceback as the interpreter would, without the frames of this module."""
    error.__traceback__ = _own_frames_cut(error)
    sys.excepthook(type(error), error, error.__traceback__)
    return code


def _await_threads(ours: frozenset[threading.Thread]) -> None:
    """Wait for what the program started; threads that were there before are not its own.

    The threads of an executor that nobody has shut down wait for more work, and end only with the
    interpreter: those are waited for until they have nothing to do.
    """
    started = [each for each in threading.enumerate() if each not in ours and not each.daemon]
    idle_before: set[threading.Thread] = set()
    while started:
        idle = {each for each in started if _waits_for_work(each)}
        started = [each for each in started if each.is_alive() and each not in idle & idle_before]
        idle_before = idle
        for each in started:
            each.join(_LOOK_EVERY_S / len(started))


def _waits_for_work(thread: threading.Thread) -> bool:
    """Whether this is an executor's thread, of `concurrent.futures`, without work at present."""
    pending = getattr(thread, "pending_work_items", None)  # of an executor of processes
    if pending is not None:
        return not pending
    queue = concurrent.futures.thread._threads_queues.get(thread)
    frame = sys._current_frames().get(thread.ident or 0)
    if queue is None or frame is None or not queue.empty():
        return False
    return frame.f_code.co_filename == concurrent.futures.thread.__file__  # not in a task


def _own_frames_cut(error: BaseException) -> types.TracebackType | None:
    """Show the program's frames only, as if it had been started directly."""
    trace = error.__traceback__
    first = trace
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name not in (__file__, "<frozen runpy>"):
            return trace
        trace = trace.tb_next
    return first

"""Runs a program as ``python SCRIPT ARGS`` or ``python -m MODULE ARGS`` would, in this process."""

from __future__ import annotations

import concurrent.futures.thread
import io
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path

from polyattn.errors import PolyattnError

__all__ = ["check_program", "run_program"]

_LOOK_EVERY_S = 0.1


def check_program(program: Sequence[str]) -> None:
    """Raise for a program that cannot be there, before anything heavy is imported."""
    if not program or program == ["-m"]:
        raise PolyattnError("got no program, expected SCRIPT [ARGS] or -m MODULE [ARGS].")
    if program[0] != "-m" and not Path(program[0]).exists():
        raise PolyattnError(
            f"got the program {program[0]!r}, which does not exist, expected a Python file, a "
            "folder with a __main__.py, or -m MODULE."
        )


def run_program(program: Sequence[str]) -> int:
    """Run it and return its exit code; ``sys.argv``, ``sys.path``, ``__main__`` are put back.

    The program's threads that are no daemons are waited for, as the interpreter would.
    """
    saved = sys.argv, list(sys.path), sys.modules["__main__"]
    ours = frozenset(threading.enumerate())
    try:
        return _exit_code(_starter(list(program)), ours)
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved


def _starter(program: list[str]) -> Callable[[], object]:
    if program[0] == "-m":
        module = program[1]
        sys.argv, sys.path[:1] = [module, *program[2:]], [os.getcwd()]
        return lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)
    path = program[0]
    sys.argv = program
    if Path(path).is_dir() or (not path.endswith((".py", ".pyw")) and _is_archive(path)):
        sys.path[:1] = []  # runpy puts the folder or archive first
        return lambda: runpy.run_path(path, run_name="__main__")
    sys.path[:1] = [str(Path(path).resolve().parent)]
    return lambda: _run_script(path)


def _is_archive(path: str) -> bool:
    import zipfile

    return zipfile.is_zipfile(path)


def _run_script(path: str) -> None:
    """Execute a file as ``__main__``, in a module that stays alive for the program's threads."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = __builtins__  # type: ignore[attr-defined]
    with io.open_code(str(Path(path).resolve())) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
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

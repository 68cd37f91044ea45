"""Which step of a loop runs now: denoising, decoding, training. It imports nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident

__all__ = ["current_step", "trace_step"]


class _Begun:
    """A step that has begun; `loop`: the thread whose event loop it began in, None outside one."""

    __slots__ = ("loop", "number", "over")

    def __init__(self, number: int | None) -> None:
        self.number, self.over = number, False
        self.loop = get_ident() if _in_event_loop() else None


_own: ContextVar[tuple[_Begun, ...]] = ContextVar("polyattn_steps", default=())
"""The steps that this thread, or task of asyncio, is in; some may be over."""
_all: list[_Begun] = []
"""The steps that anybody is in, the one begun last at the end: for threads in none of theirs."""


@contextmanager
def trace_step(step: int | None) -> Iterator[None]:
    """Give the records of the calls inside the step `step`, and the outer one after it.

    A task of asyncio is in the steps that it begins, and in those in which it was started until
    they end. Threads that are in no step of their own, as those a step starts, are in the one begun
    last. A generator shares the steps of who runs it: where two are inside of steps by turns, both
    are in the one begun last. Where nothing is traced it costs next to nothing. Raises TraceError
    for what is no integer.

    >>> with trace_step(3):
    ...     current_step()
    3
    >>> current_step() is None
    True
    """
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        from polyattn.errors import TraceError

        raise TraceError(f"got the step {step!r}, expected an integer or None.")
    outer = _open()  # first, for torch.compile ends its graph here, and asks nothing of asyncio
    begun = _Begun(None if step is None else step.__index__())
    _own.set((*outer, begun))
    _all.append(begun)
    try:
        yield
    finally:
        # not put back by value: steps of tasks, generators and threads may end in any order, and
        # in another context than they began in
        begun.over = True
        _all.remove(begun)
        _own.set(_open())


def current_step() -> int | None:
    """Return the step that a call here and now belongs to, or None."""
    if not _all:
        return None
    for begun in reversed(_own.get()):
        if not begun.over:
            return begun.number
    here = get_ident()
    for begun in reversed(_all.copy()):
        if begun.loop != here:  # else it is of another task in this thread
            return begun.number
    return None


def _open() -> tuple[_Begun, ...]:
    return tuple(begun for begun in _own.get() if not begun.over)


def _in_event_loop() -> bool:
    asyncio = sys.modules.get("asyncio")  # where nobody has loaded it, no loop runs
    if asyncio is None:
        return False
    try:
        asyncio.get_running_loop()
    except (RuntimeError, AttributeError):  # none; asyncio is being imported just now
        return False
    return True

"""Which step of a loop runs now: denoising, decoding, training. It imports nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["current_step", "trace_step"]


class _Own(threading.local):
    steps: tuple[int | None, ...] = ()


_own = _Own()
_all: list[list[int | None]] = []
"""The steps that any thread is in, the one begun last at the end: for threads in none of theirs."""


@contextmanager
def trace_step(step: int | None) -> Iterator[None]:
    """Give the records of the calls inside the step `step`, and the outer one after it.

    Threads that are in no step of their own, as those a step starts, are in the one begun last.
    Where nothing is traced it costs next to nothing. Raises TraceError for what is no integer.

    >>> with trace_step(3):
    ...     current_step()
    3
    >>> current_step() is None
    True
    """
    if step is not None and (isinstance(step, bool) or not hasattr(step, "__index__")):
        from polyattn.errors import TraceError

        raise TraceError(f"got the step {step!r}, expected an integer or None.")
    number = None if step is None else step.__index__()
    outer, entry = _own.steps, [number]
    _own.steps = (*outer, number)
    _all.append(entry)
    try:
        yield
    finally:
        _own.steps = outer
        # by identity: steps of several threads may end in any order
        for place in reversed(range(len(_all))):
            if _all[place] is entry:
                del _all[place]
                break


def current_step() -> int | None:
    """Return the step that a call in this thread now belongs to, or None."""
    if not _all:
        return None
    if own := _own.steps:
        return own[-1]
    try:
        return _all[-1][0]
    except IndexError:  # another thread's last step has just ended
        return None

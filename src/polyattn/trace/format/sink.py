"""JsonlSink: the lines of a trace, from any thread into one file, behind the program's back.

What a sink promises:

- `write` and `extend` never raise because of the file, so a full disk never ends a model's forward.
  The first failure is logged at once, everything after it is dropped and counted, and `close`
  raises it as a TraceError. What was written before stays a valid trace.
- Memory is bounded: when `limit` records wait for the disk, a writer waits too.
- Lines are whole, and with the operating system when `write` returns, so a killed process loses
  only the one being written. Work that is to be done later, such as waiting for a device, comes as
  a generator: a thread walks it (the default), and what is written meanwhile queues behind it.
- A forked child writes nothing to its parent's file.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polyattn.errors import TraceError
from polyattn.trace.format.output import Output
from polyattn.trace.format.record import line_of

__all__ = ["JsonlSink"]

logger = logging.getLogger("polyattn.trace")

Line = Mapping[str, Any] | str | bytes
_BATCH = 1 << 16
"""Bytes of lines that are handed over at once."""

_open: set[JsonlSink] = set()


def _encoded(record: Line) -> bytes:
    if isinstance(record, bytes):
        return record
    text = record if isinstance(record, str) else line_of(record)
    return text.encode("utf-8") + b"\n"


class JsonlSink:
    r"""Thread-safe writer of lines of JSON into a file that is this run's alone.

    `overwrite`: replace a file that holds something; otherwise that is an error. `background`:
    walk generators in a thread. `limit`: records that may wait for that thread. `last`: called at
    the end for the last line, also when the interpreter exits without `close`. Use it as a context
    manager.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "lines.jsonl")
    >>> with JsonlSink(path) as sink:
    ...     sink.write({"seq": 0, "mean": float("nan")})
    >>> path.read_text()
    '{"seq":0,"mean":null}\n'
    """

    def __init__(
        self,
        path: str | Path,
        *,
        overwrite: bool = False,
        background: bool = True,
        limit: int = 20_000,
        last: Callable[[], Line | None] | None = None,
    ) -> None:
        if type(limit) is not int or limit < 1:
            raise TraceError(f"got limit={limit!r}, expected how many records may wait, 1 or more.")
        self._output = Output(path, overwrite=overwrite)
        self.path = self._output.path
        self.direct_to = -1
        self.error: TraceError | None = None
        self.dropped = 0
        self._limit = limit
        self._last = last
        self._raised = self._closed = self._ending = False
        self._begin()
        self._thread: threading.Thread | None = None
        _open.add(self)
        if background:
            self._thread = threading.Thread(target=self._run, name="polyattn-trace", daemon=True)
            self._thread.start()
        self._settle()

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._writing = threading.RLock()  # a signal's handler may close what it interrupts
        self._writers, self._writer = 0, 0
        self._settling = threading.RLock()
        self._waiting: deque[tuple[Iterable[Line], int]] = deque()
        self._pending = 0

    @property
    def closed(self) -> bool:
        """Whether nothing more is taken: it was closed, or this is a forked child."""
        return self._closed

    def write(self, record: Line) -> None:
        """Take one record, a line of JSON as text without its newline, or bytes of whole lines."""
        self.extend((record,), 1)

    def extend(self, records: Iterable[Line], count: int | None = None) -> None:
        """Take several records, in order and without others between them.

        A generator is walked in the writing thread, so its work is done there; say then how many
        it yields (`count`), for the bound on what waits.
        """
        made = isinstance(records, list | tuple)
        if count is None:
            count = len(records) if isinstance(records, list | tuple) else 1
        if self._thread is None or (made and not self._waiting):
            self._write_now(records, count)
            return
        if self._pending >= self._limit and self._mine():
            self._drain()
        with self._changed:
            while self._pending >= self._limit and not (self.error or self._closed):
                self._changed.wait()
            if self.error or self._closed:
                self.dropped += count
                return
            with self._settling:
                self._waiting.append((records, count))
                self._settle()
            self._pending += count
            self._changed.notify_all()

    def direct(self, made: Callable[[], bytes], count: int) -> bool:
        """Write the whole lines that `made` returns, in this thread.

        False, and `made` is not called, if something waits: that is to be written before it.
        """
        if self._waiting:
            return False
        with self._turn():
            if self.error or self._closed:
                self.dropped += count
                return True
            try:
                self._output.append(made())
            except Exception as error:  # the model goes on, whatever is wrong with its trace
                self._fail(error, count)
        return True

    def _settle(self) -> None:
        """Set `direct_to`: the file descriptor to which whole lines may be written as they are.

        Only by who holds the interpreter's lock from reading it until that is done, so in native
        code, which calls `cut_off` if it fails. -1 while something waits, another thread writes,
        or nothing more is taken.
        """
        with self._settling:
            taken = self._waiting or self._writers or self._closed or self.error
            self.direct_to = -1 if taken else self._output.descriptor

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Let one thread write; it may begin a second time inside the first, in a handler."""
        with self._writing:
            self._writers, self._writer = self._writers + 1, threading.get_ident()
            self.direct_to = -1
            try:
                yield
            finally:
                self._writers -= 1
                self._settle()

    def _mine(self) -> bool:
        """Whether this runs in a handler that has interrupted this thread's turn."""
        return self._writers > 0 and self._writer == threading.get_ident()

    def cut_off(self, number: int, data: bytes, taken: int) -> None:
        """Take note that `taken` bytes of whole lines were written, and then error `number` came.

        Lines that were not taken wholly are removed. Never raises.
        """
        with self._turn():
            with contextlib.suppress(OSError):
                self._output.cut(data, self._output.size() - taken)
            self._fail(OSError(number, os.strerror(number)), data[taken:].count(b"\n"))

    def _write_now(self, records: Iterable[Line], count: int) -> None:
        with self._turn():
            if self.error or self._closed:
                self.dropped += count
            else:
                self._put(records, count)

    def _put(self, records: Iterable[Line], count: int) -> None:
        lines, done = bytearray(), 0
        try:
            try:
                for record in records:
                    data = _encoded(record)
                    lines += data
                    done += data.count(b"\n")
                    if len(lines) >= _BATCH:
                        whole, lines = bytes(lines), bytearray()
                        self._output.append(whole)
            finally:  # a record that is none takes no earlier one with it
                self._output.append(bytes(lines))
        except Exception as error:  # the model goes on, whatever is wrong with its trace
            self._fail(error, max(count - done, 1))

    def _fail(self, error: Exception, lost: int) -> None:
        self.dropped += lost
        if self._output.closed:  # a handler closed it in the middle of this
            return
        disk = isinstance(error, OSError)
        self.error = TraceError(
            f"got an error while writing the trace {self.path} ({type(error).__name__}: {error}); "
            "it ends there, and what was written before it is whole. "
            + ("Make room or name another file, and run again." if disk else "Correct what it got.")
        )
        self.error.__cause__ = error
        logger.error("%s", self.error)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
            self._write_first()

    def _write_first(self) -> None:
        """Write what waits longest, if anything does; it counts as waiting until it is written."""
        with self._turn():
            if not self._waiting:
                return
            records, count = self._waiting[0]
            if self.error is not None:
                self.dropped += count
            else:
                self._put(records, count)
            del records
            with self._changed:
                self._waiting.popleft()
                self._pending -= count
                self._changed.notify_all()

    def _drain(self) -> None:
        while self._waiting:
            self._write_first()

    def flush(self) -> None:
        """Wait until everything taken so far is with the operating system. Never raises."""
        if self._mine():
            self._drain()
        with self._changed:
            while self._waiting and self._thread is not None and self._thread.is_alive():
                self._changed.wait(1.0)

    def close(self) -> None:
        """Write what waits and the last line, and close; again does nothing.

        Raises TraceError, once, if something could not be written.
        """
        self._finish()
        if self.error is not None and not self._raised:
            self._raised = True
            raise self.error

    def _finish(self) -> None:
        with self._changed:
            if self._ending or self._closed:
                return
            self._ending = True
        try:
            self._end()
        except BaseException:  # an interrupt: it can be closed again, at exit at the latest
            self._ending = False
            raise
        with self._changed:
            self._closed = True
            self._settle()
            self._changed.notify_all()
        if self._thread is not None and not self._mine():
            self._thread.join()
        with self._writing:
            self._output.close()
        _open.discard(self)

    def _end(self) -> None:
        if self._last is not None and self.error is None:
            line, self._last = self._last(), None
            self.extend((one for one in (line,) if one is not None), 0)
        if self._mine():
            self._drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:  # the error of the block is the one to see; the trace's own was logged
            self._finish()

    def _forget(self) -> None:
        """In a forked child: the file, the thread and its locks are the parent's."""
        self._begin()
        self.direct_to = -1
        self._output.forget()
        self._thread = None
        self._closed = self._raised = True


@atexit.register
def _close_all() -> None:
    for sink in list(_open):
        sink._finish()


def _forget_all() -> None:
    for sink in list(_open):
        sink._forget()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)

"""TraceWriter: a trace from any program that has NumPy arrays.

MLX, TensorFlow, C++ through a binding, a paper's reference in plain NumPy: whatever can hand over
arrays can be compared with a traced torch or JAX model.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from polyattn.errors import TraceError
from polyattn.trace.format.field_checks import LONGEST_TEXT
from polyattn.trace.format.header import Header
from polyattn.trace.format.output import rank_path
from polyattn.trace.format.record import PHASES
from polyattn.trace.format.sink import JsonlSink
from polyattn.trace.statistics.schema import REMEMBERED, STATISTICS

__all__ = ["TraceWriter"]

_UNSET: Any = object()


class TraceWriter:
    """Writes one run's trace; a context manager, safe to use from several threads.

    `header`: a :class:`~polyattn.trace.Header`, or its fields as arguments (`framework`, `rank`,
    `world`, `seed`, ...); `weights` may map parameters' names to arrays or to their fingerprints.
    In a world of several ranks the file is `path` with the rank in its name. A line is with the
    operating system when `add` returns. Raises TraceError if the file cannot be written or holds a
    trace already (`overwrite=True` replaces it). If the disk is full later, the log says so at once
    and `close` raises; `add` never does because of the file.

    >>> import tempfile
    >>> import numpy as np
    >>> path = Path(tempfile.mkdtemp(), "reference.jsonl")
    >>> with TraceWriter(path, framework="numpy", seed=0) as trace:
    ...     for step in range(2):
    ...         with trace.step(step):
    ...             x = np.ones((2, 4), np.float32)
    ...             _ = trace.add("blocks.0", "in", "args[0]", x, cls="Block")
    ...             _ = trace.add("blocks.0", "out", "out", 3 * x, cls="Block")
    >>> from polyattn.trace import read
    >>> [(r.module, r.call, r.step, r.phase, r.mean) for r in read(path).records]
    [('blocks.0', 0, 0, 'in', 1.0), ('blocks.0', 0, 0, 'out', 3.0),
     ('blocks.0', 1, 1, 'in', 1.0), ('blocks.0', 1, 1, 'out', 3.0)]
    """

    def __init__(
        self,
        path: str | Path,
        header: Header | None = None,
        *,
        overwrite: bool = False,
        weights: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        if header is not None and (fields or weights is not None):
            raise TraceError(f"got a header and its fields {sorted(fields)}, expected one of them.")
        if header is None:
            prints = {name: _fingerprint(one) for name, one in (weights or {}).items()}
            try:
                header = Header.new(weights=prints, **fields)
            except TypeError as error:
                raise TraceError(f"got fields that no header has: {error}.") from error
        if not 0 <= header.rank < header.world:
            raise TraceError(f"got rank {header.rank} of a world of {header.world}.")
        for kind, names in (("module", header.modules), ("weight", header.weights)):
            for name in names:
                _check_names(**{kind: name})
        self.header = header
        self._lock = threading.Lock()
        self._step: int | None = None
        self._next = 0
        self._calls: dict[tuple[str, bool], _Calls] = {}
        self._seen: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self.sink = JsonlSink(
            rank_path(path, header.rank, header.world),
            overwrite=overwrite,
            background=False,
            last=self._end,
        )
        self.path = self.sink.path
        self.sink.write(header.line())

    @contextmanager
    def step(self, index: int | None) -> Iterator[None]:
        """Give what is added inside, from any thread, the step `index`; the outer one after it."""
        if index is not None and type(index) is not int:
            raise TraceError(f"got the step {index!r}, expected an integer or None.")
        outer, self._step = self._step, index
        try:
            yield
        finally:
            self._step = outer

    def add(
        self,
        module: str,
        phase: str,
        tensor: str,
        value: Any,
        *,
        cls: str = "",
        call: int | None = None,
        step: int | None = _UNSET,
        global_shape: Sequence[int] | None = None,
        start: Sequence[int] | None = None,
        partial: bool = False,
        **extra: Any,
    ) -> int | None:
        """Record a tensor and return its `seq`, or None where the file takes nothing more.

        `phase`: in, out, grad_in, grad_out or param. `tensor`: which of them, as ``args[0]`` or
        ``out``. `value`: an array, or its statistics as ``trace.statistics.statistics`` gives them.
        `call`: which call of the module it is; by default a new one begins when a tensor comes
        again, or an input after an output. `global_shape`, `start`: the whole tensor's shape and
        this box's place in it, where ranks hold parts; `partial`: this rank's term of a sum over
        ranks. Raises TraceError for a value or a name that no record can have.
        """
        if self.sink.closed or self.sink.error is not None:
            return None
        if phase not in PHASES or not isinstance(module, str) or not isinstance(tensor, str):
            raise TraceError(
                f"got {module!r}, {phase!r}, {tensor!r}, expected a module's name, a phase of "
                f"{', '.join(PHASES)}, and a tensor's path."
            )
        _check_names(module=module, tensor=tensor, cls=cls)
        found = _statistics(value, global_shape, start)
        if partial:
            found["partial"] = True
        with self._lock:
            calls = self._calls.setdefault((module, phase.startswith("grad")), _Calls())
            seq = self._next
            record: dict[str, Any] = {
                "seq": seq, "module": module, "cls": cls,
                "call": calls.number(phase, tensor) if call is None else calls.given(call),
                "step": self._step if step is _UNSET else step,
            }  # fmt: skip
            if self.header.rank:
                record["rank"] = self.header.rank
            record |= {"phase": phase, "tensor": tensor, **self._same(found), **extra}
            self._next += 1
            self.sink.write(record)
        return seq

    def add_lines(
        self, tensors: Sequence[tuple[str, str, str]], made: Callable[[int, list[int], Any], bytes]
    ) -> None:
        """Record (module, phase, tensor) each, whose lines another makes.

        `made` gets the first `seq`, the call that each is of, and the step; it returns whole lines.
        """
        if self.sink.closed or self.sink.error is not None:
            return
        with self._lock:
            calls = [
                self._calls.setdefault((module, phase.startswith("grad")), _Calls()).number(
                    phase, tensor
                )
                for module, phase, tensor in tensors
            ]
            first, self._next = self._next, self._next + len(tensors)
            self.sink.extend((made(first, calls, self._step),), len(tensors))

    def _same(self, found: dict[str, Any]) -> dict[str, Any]:
        """`found`, or the seq of the latest record that has the very same of everything."""
        if found.get("sketch") is None:
            return found
        names = (*STATISTICS, "global_shape", "start", "partial")
        values = (found.get(name) for name in names)
        key = tuple(tuple(one) if isinstance(one, list) else one for one in values)
        if (earlier := self._seen.get(key)) is not None:
            self._seen.move_to_end(key)
            return {"same": earlier}
        self._seen[key] = self._next
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return found

    def _end(self) -> dict[str, Any]:
        calls = sum(c.count for (_, grad), c in self._calls.items() if not grad)
        return {"end": {"records": self._next, "calls": calls}}

    def flush(self) -> None:
        """Wait until everything added is with the operating system."""
        self.sink.flush()

    def close(self) -> None:
        """Write the last line and close; again does nothing. Raises TraceError if lines were lost.

        Done at the interpreter's exit too.
        """
        self.sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.sink.__exit__(kind, error, traceback)


class _Calls:
    """Counts the calls of one module from what is recorded of them."""

    def __init__(self) -> None:
        self.count = 0
        self._of_this: set[tuple[str, str]] = set()

    def number(self, phase: str, tensor: str) -> int:
        begun = phase == "in" and any(one == "out" for one, _ in self._of_this)
        if not self.count or begun or (phase, tensor) in self._of_this:
            self.count += 1
            self._of_this.clear()
        self._of_this.add((phase, tensor))
        return self.count - 1

    def given(self, call: int) -> int:
        if type(call) is not int or call < 0:
            raise TraceError(f"got call={call!r}, expected the number of a call, 0 or more.")
        self.count = max(self.count, call + 1)
        return call


def _check_names(**names: Any) -> None:
    """Raise TraceError for a name that would make the trace one that nobody can read."""
    for what, name in names.items():
        if not isinstance(name, str) or len(name) > LONGEST_TEXT:
            got = f"{name!r:.60}"
            if isinstance(name, str):
                got += f"... of {len(name)} characters"
            raise TraceError(
                f"got the {what} {got}, expected a text of at most {LONGEST_TEXT} characters."
            )


def _statistics(
    value: Any, global_shape: Sequence[int] | None, start: Sequence[int] | None
) -> dict[str, Any]:
    if isinstance(value, Mapping):
        if missing := {"shape", "dtype"} - value.keys():
            raise TraceError(f"got statistics without {sorted(missing)}, expected them always.")
        place = {"global_shape": global_shape, "start": start}
        return dict(value) | {name: list(one) for name, one in place.items() if one is not None}
    from polyattn.trace.statistics.definition import (
        statistics,  # NumPy is loaded with the first array
    )

    return statistics(value, global_shape=global_shape, start=start)


def _fingerprint(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    from polyattn.trace.fingerprints import fingerprint

    return fingerprint(value)

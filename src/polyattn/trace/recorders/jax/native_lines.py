"""Lines of records from the native kernel's rows, made by native code: a tenth of Python's time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyattn.trace.format.jsonline import quoted
from polyattn.trace.format.record import WIDE, line_of
from polyattn.trace.recorders.jax.active_trace import Tapped
from polyattn.trace.recorders.jax.host_statistics import WORDS
from polyattn.trace.recorders.jax.received import fields_of
from polyattn.trace.recorders.numpy import TraceWriter
from polyattn.trace.statistics import extension
from polyattn.trace.statistics.schema import DEFAULT_STATISTICS, FIELDS, PLACES

__all__ = ["NativeLines", "is_row"]

_BYTES = 4 * WORDS
_SHAPED = ("shape", "dtype")


def is_row(numbers: bytes) -> bool:
    """Whether these are a row of the native kernel."""
    return len(numbers) == _BYTES


class NativeLines:
    """Adds records to a writer, many at once."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._heads: dict[Tapped, tuple[str, str]] = {}
        fields = [(name, PLACES[name]) for name in DEFAULT_STATISTICS if name in FIELDS]
        self._lines: Any = extension.load().TraceLines(
            fields, True, True, "", frozenset(WIDE), quoted, _unusual
        )

    def add(self, told: Sequence[tuple[Tapped, bytes]]) -> None:
        """Record the rows, in order."""
        rows = b"".join(numbers for _, numbers in told)
        address = np.frombuffer(rows, np.uint8).ctypes.data

        def made(first: int, calls: list[int], step: int | None) -> bytes:
            events = [
                (
                    first + at, *self._head(tapped, call), step, tapped.phase, tapped.tensor,
                    tapped.shape, self._heads[tapped][1], rows, at, None, None, None,
                )
                for at, ((tapped, _), call) in enumerate(zip(told, calls, strict=True))
            ]  # fmt: skip
            lines: bytes = self._lines.of(events, [(rows, address, len(told))])
            return lines

        self._writer.add_lines([(t.module, t.phase, t.tensor) for t, _ in told], made)

    def _head(self, tapped: Tapped, call: int) -> tuple[str, int]:
        found = self._heads.get(tapped)
        if found is None:
            head = f'"module":{quoted(tapped.module)},"cls":{quoted(tapped.cls)}'
            found = self._heads[tapped] = head, np.dtype(tapped.dtype).name
        return found[0], call


def _unusual(dtype: str, row: bytes) -> str:
    """Return what a line says from the dtype on, of a row that native code leaves to Python."""
    found = fields_of((1,), np.dtype(dtype), np.frombuffer(row, np.int32))
    return line_of({name: value for name, value in found.items() if name != "shape"})[1:-1]

"""From rows of numbers to lines of JSON, in the writing thread.

What `polyattn.trace.line_of` does for any record is done here for whole batches, several times as
fast: the writer holds the interpreter's lock meanwhile, so its time is the model's time.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from operator import itemgetter
from typing import Any, cast

import numpy as np
import torch

from polyattn.trace.format.jsonline import quoted
from polyattn.trace.format.record import WIDE, line_of
from polyattn.trace.recorders.torch.device_rows import RowPool, Rows
from polyattn.trace.recorders.torch.native_protocol import EVENT, Event
from polyattn.trace.recorders.torch.tensor_statistics import native_module, record_fields
from polyattn.trace.recorders.torch.user_statistics import plain_fields, said
from polyattn.trace.statistics.schema import (
    BUCKETS,
    COUNTS,
    FIELDS,
    LEAST_PLAIN,
    MOST_PLAIN,
    PLACES,
    REMEMBERED,
    SAMPLED,
    SAMPLES,
    SKETCH,
)

__all__ = ["Lines", "head_of"]

_ROWS, _EXTRA, _SAVING = (list(EVENT).index(name) for name in ("rows", "extra", "saving"))
_WIDE = frozenset(getattr(torch, name) for name in WIDE if hasattr(torch, name))
_SKETCH_BYTES = 4 * BUCKETS


def head_of(module: str, cls: str) -> str:
    """Return the part of a line that all records of a module share."""
    return f'"module":{quoted(module)},"cls":{quoted(cls)}'


class Lines:
    """Makes lines of events; one thread at a time, with the sink's lock.

    `names`: the statistics to write. `rank`: this process's, left out where it is 0. `native`:
    whether the extension makes them, which holds the interpreter's lock for a tenth of the time;
    None is where it is built, and then it is `self.native`. The lines are the same.
    """

    def __init__(
        self, names: tuple[str, ...], rank: int, pool: RowPool, native: bool | None = None
    ) -> None:
        self._names = names
        self._rank = f'"rank":{rank},' if rank else ""
        self._pool = pool
        self._places: dict[tuple[str, str], str] = {}
        self._seen: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        self._first: OrderedDict[int, int] = OrderedDict()
        self._numbers = _Numbers(names)
        built = None if native is False else native_module()
        fields = [(name, PLACES[name]) for name in names if name in FIELDS]
        self.native: Any = built and built.TraceLines(
            fields,
            "samples" in names,
            "sketch" in names,
            self._rank,
            _WIDE,
            quoted,
            self._numbers.of_bytes,
        )

    def of(self, events: Iterable[Event], rows: Iterable[Rows]) -> Iterator[str | bytes]:
        """Yield the events' lines, or bytes of several; then the rows are free again."""
        lines = self._in_python if self.native is None else self._in_native_code
        yield from lines(events, rows)
        for one in rows:
            self._pool.give(one)

    def forget(self) -> None:
        """Refer to no earlier line from now on: some may not have been written."""
        self._seen.clear()
        self._first.clear()
        if self.native is not None:
            self.native.forget()

    def now(self, events: list[Event], rows: Rows | None) -> bytes:
        """Return the events' lines; `rows`: where all of their numbers are, on the host."""
        if self.native is None:
            lines = self._in_python(events, () if rows is None else (rows,))
            return b"".join(line.encode() + b"\n" for line in lines)
        ready = [event if event[_EXTRA] is None else _written(event) for event in events]
        blocks = [] if rows is None else [(rows, rows.first, rows.used)]
        made: bytes = self.native.of(ready, blocks)
        return made

    def _in_native_code(self, events: Iterable[Event], rows: Iterable[Rows]) -> Iterator[bytes]:
        blocks = []
        for one in rows:
            numbers = np.ascontiguousarray(one.numbers())
            blocks.append((one, numbers.ctypes.data, len(numbers), numbers))
        batch: list[Any] = []
        try:
            for event in events:
                plain = event[_EXTRA] is None and event[_SAVING] is None
                batch.append(event if plain else _written(event))
        finally:  # an event that has no line takes no earlier one with it
            if batch:
                yield self.native.of(batch, blocks)

    def _in_python(self, events: Iterable[Event], rows: Iterable[Rows]) -> Iterator[str]:
        blocks = {id(one): _Block(one.numbers()) for one in rows}
        for event in events:
            event, of = _kept(event), event[_ROWS]
            yield self._line(event, None if of is None else blocks[id(of)])

    def _line(self, event: Event, block: _Block | None) -> str:
        seq, head, call, step, phase, path, shape, dtype, _, slot, same, extra, _ = event
        where = self._places.get((phase, path))
        if where is None:
            where = f'"phase":"{phase}","tensor":{quoted(path)}'
            self._places[phase, path] = where
        begin = (
            f'{{"seq":{seq},{head},"call":{call},"step":{"null" if step is None else step},'
            f"{self._rank}{where},"
        )
        if same is not None:
            same = self._first.get(same, same)
        elif block is not None:
            same = self._earlier(seq, (shape, dtype, block.digest(slot)))
        found = self._statistics(shape, dtype, block, slot) if same is None else f'"same":{same}'
        if extra:
            return f"{begin}{found},{_fields_of(extra)}}}"
        return f"{begin}{found}}}"

    def _earlier(self, seq: int, key: tuple[Any, ...]) -> int | None:
        """The seq of a record with the very same numbers, among the latest ones."""
        earlier = self._seen.get(key)
        if earlier is None:
            self._seen[key] = seq
            if len(self._seen) > REMEMBERED:
                self._seen.popitem(last=False)
            return None
        self._seen.move_to_end(key)
        self._first[seq] = earlier
        if len(self._first) > REMEMBERED:
            self._first.popitem(last=False)
        return earlier

    def _statistics(self, size: Any, dtype: Any, block: _Block | None, slot: int) -> str:
        shape = ",".join(map(str, size))
        if block is None or not self._names:
            return f'"shape":[{shape}],"dtype":"{_name(dtype)}"'
        return f'"shape":[{shape}],{self._numbers.of(dtype, block, slot)}'


class _Numbers:
    """Writes the statistics of a row, from the dtype on."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._of_narrow, self._of_wide = _template(names, "%.9g"), _template(names, "%r")
        picked = [PLACES[name] for name in names if name in FIELDS]
        if "samples" in names:
            picked += range(SAMPLES.start, SAMPLES.stop)
        self._pick = itemgetter(*picked, 0, 0)  # two more, so that it always gives a tuple

    def of_bytes(self, dtype: torch.dtype, row: bytes) -> str:
        """The text of one row that native code leaves to Python."""
        return self.of(dtype, _Block(np.frombuffer(row, np.float64)[None]), 0)

    def of(self, dtype: Any, block: _Block, slot: int) -> str:
        """The text of a block's row."""
        name = _name(dtype)
        if not block.fine[slot]:
            fields = record_fields(block.rows[slot].tolist())
            kept = {"dtype": name} | {name: fields[name] for name in self._names}
            return line_of(kept)[1:-1]
        picked = self._pick(block.values[slot])[:-2]
        if "sketch" in self._names:
            picked = (*picked, block.sketch(slot))
        template = self._of_wide if dtype in _WIDE else self._of_narrow
        return f'"dtype":"{name}",{template % picked}'


class _Block:
    """The numbers of one buffer, ready for all of its lines."""

    def __init__(self, rows: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        self.rows = rows
        buckets = rows[:, SKETCH]
        largest = np.abs(buckets).max(axis=1, initial=0.0)
        plain = (largest == 0) | ((largest >= LEAST_PLAIN) & (largest < MOST_PLAIN))
        finite = np.isfinite(rows).all(axis=1)
        self.fine = (finite & plain & (rows[:, PLACES["n"]] > 0)).tolist()
        self.values = rows[:, : SKETCH.start].tolist()
        with np.errstate(all="ignore"):
            self._bytes = np.ascontiguousarray(buckets, "<f4").tobytes()

    def digest(self, slot: int) -> bytes:
        """What tells a row from others: short, for thousands of whole rows break up the heap."""
        return blake2b(self.rows[slot].tobytes(), digest_size=16).digest()

    def sketch(self, slot: int) -> str:
        at = _SKETCH_BYTES * slot
        return base64.b64encode(self._bytes[at : at + _SKETCH_BYTES]).decode("ascii")


def _template(names: tuple[str, ...], number: str) -> str:
    """The text of the statistics with a place for each number, in the order of `names`."""
    parts = [f'"{name}":{"%d" if name in COUNTS else number}' for name in names if name in FIELDS]
    if "samples" in names:
        parts.append(f'"samples":[{",".join([number] * SAMPLED)}]')
    if "sketch" in names:
        parts.append('"sketch":"%s"')
    return ",".join(parts)


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _written(event: Event) -> tuple[Any, ...]:
    """The event with its file written and its further fields as text, for native code."""
    extra: Any = _kept(event)[_EXTRA]
    return (*event[:_EXTRA], _fields_of(extra) if extra else None, None)


def _kept(event: Event) -> Event:
    """The event after its file was written; OSError where the disk does not take it."""
    extra: Any = event[_EXTRA]
    saving: Any = event[_SAVING]
    if saving is None:
        return event
    try:
        saving.write()
    except OSError:
        raise
    except Exception as error:  # of a dtype that no such file can have
        extra = {name: value for name, value in (extra or {}).items() if name != "file"}
        extra |= {"note": f"its tensor could not be kept whole ({said(error)})"}
    kept: Any = (*event[:_EXTRA], extra, None)
    return cast("Event", kept)


def _fields_of(extra: dict[str, Any]) -> str:
    return line_of(plain_fields(extra))[1:-1]

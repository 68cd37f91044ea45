"""Reading traces: one file as a stream or whole, several ranks' files as one trace.

A file is data from elsewhere: whatever is wrong with it is a TraceError that names the line and the
reason. Only one thing is forgiven: a last line that was cut off, as in a process that was killed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from polyattn.errors import TraceError
from polyattn.trace.format import field_checks as checks
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.field_checks import Malformed
from polyattn.trace.format.header import META, Header, parse_header
from polyattn.trace.format.ranks import files_of, merge
from polyattn.trace.format.record import Record, parse_record

__all__ = ["HEADER_LIMIT", "LINE_LIMIT", "TraceReader", "read"]

HEADER_LIMIT = 256 * 2**20
LINE_LIMIT = 2**20
"""Bytes that the header and any other line may have."""


class TraceReader:
    """A trace file, read a line at a time: iterate over it for records in the file's order.

    Raises TraceError when it is opened if there is no header of a trace in it, and in the iteration
    for a line that is none of a trace. `ended`, `notes` are whole after the last record.

    >>> import tempfile
    >>> from polyattn.trace import TraceWriter
    >>> path = Path(tempfile.mkdtemp(), "run.jsonl")
    >>> with TraceWriter(path) as trace:
    ...     trace.add("", "out", "out", [1.0, 2.0])
    0
    >>> with TraceReader(path) as lines:
    ...     [record.shape for record in lines], lines.ended
    ([(2,)], True)
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.ended = False
        self.notes: list[str] = []
        self._line = 1
        self._earlier: dict[int, Record] = {}
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        except (OSError, ValueError) as error:
            raise TraceError(
                f"got the trace {self.path}, which cannot be read ({error})."
            ) from error
        try:
            self.header = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> Header:
        line = self._next_line(HEADER_LIMIT)
        if not line:
            raise self._wrong("an empty file; the run wrote nothing")
        try:
            return parse_header(checks.parse(line))
        except Malformed as error:
            if not line.endswith(b"\n") and line.startswith(b'{"' + META.encode()):
                raise self._wrong(f"a header that was cut off ({error})") from error
            raise self._wrong(str(error)) from error

    def _next_line(self, limit: int) -> bytes:
        try:
            line = self._file.readline(limit + 1)
        except OSError as error:
            raise self._wrong(f"nothing that can be read ({error})") from error
        if len(line) > limit:
            raise self._wrong(f"a line of more than {limit} bytes")
        return line

    def _wrong(self, reason: str) -> TraceError:
        return TraceError(
            f"got {self.path}, line {self._line}: {reason}; expected a trace as polyattn writes "
            "it. Record it again."
        )

    def __iter__(self) -> Iterator[Record]:
        while line := self._line_after():
            try:
                raw = checks.parse(line)
            except Malformed as error:
                if line.endswith(b"\n"):
                    raise self._wrong(str(error)) from error
                self.notes.append(
                    f"{self.path.name}: the last line ({self._line}) was cut off after "
                    f"{len(line)} bytes and left out"
                )
                break
            try:
                record = self._record(raw)
            except Malformed as error:
                raise self._wrong(str(error)) from error
            if record is not None:
                yield record
        if not self.ended:
            self.notes.append(
                f"{self.path.name}: the run did not end its trace; it was killed, or still runs"
            )

    def _line_after(self) -> bytes:
        if self._file.closed:
            return b""
        self._line += 1
        return self._next_line(LINE_LIMIT)

    def _record(self, raw: dict[str, Any]) -> Record | None:
        if self.ended:
            raise Malformed("a line after the end: two runs in one file")
        if "end" in raw:
            self._end(raw["end"])
            return None
        if META in raw:
            raise Malformed("a second header: two runs in one file")
        record = parse_record(raw, self._earlier)
        if record.seq in self._earlier:
            raise Malformed(f"seq {record.seq} for the second time")
        self._earlier[record.seq] = record
        return record

    def _end(self, end: object) -> None:
        counted = checks.integer(checks.table(end, "end").get("records", 0), "end: records")
        checks.plain(end, "end")
        self.ended = True
        if counted != len(self._earlier):
            self.notes.append(
                f"{self.path.name}: its end counts {counted} records, "
                f"and there are {len(self._earlier)}"
            )

    def close(self) -> None:
        """Close the file; again does nothing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def read(path: str | Path) -> Trace:
    """Read a trace: a file, a pattern (``run.rank*.jsonl``), or a folder that holds one run.

    ``run.jsonl`` also finds ``run.rank0.jsonl`` and its siblings. Files of several ranks become one
    trace: see :func:`polyattn.trace.format.ranks.merge`. Raises TraceError for anything that is no
    trace, is of a newer schema, or is damaged in another way than by a cut at its end.
    """
    traces = [_read_file(file) for file in files_of(path)]
    parts = any(r.partial or r.global_shape is not None for r in traces[0].records)
    return traces[0] if len(traces) == 1 and not parts else merge(traces)


def _read_file(path: Path) -> Trace:
    with TraceReader(path) as lines:
        records = sorted(lines, key=lambda record: record.seq)
        return Trace(
            lines.header, tuple(records), lines.ended, tuple(lines.notes), (path,), (lines.header,)
        )

"""`TuningTable`: the measured times of a machine, kept between runs."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from polyattn.errors import TuningError
from polyattn.tuning import database, exchange, rows, snapshots
from polyattn.tuning.exchange import PathOrFile
from polyattn.tuning.rows import Entry
from polyattn.tuning.schema import SCHEMA_VERSION
from polyattn.tuning.snapshots import Texts
from polyattn.tuning.storage import Storage
from polyattn.tuning.values import Key, Measurement, refuse

FILE_NAME = "tuning.sqlite3"


class TuningTable:
    """The table of measured times in the SQLite file `path`, usually `<cache>/tuning.sqlite3`.

    Making one touches no disk; looking up in a file that does not exist does not create it.
    Threads, forked children and other processes may use the same file at once. A damaged file is
    moved to `<path>.corrupt-<n>` and rebuilt; one of an older schema is brought to this one; a file
    that is foreign, newer or out of reach is left alone and the table goes on in memory
    (`persistent` is False). `notices` tells.

    >>> import tempfile
    >>> key = Key("cpu:x86-64 avx2 2 threads", "polyattn=0.1.0 torch=2.13.0", '{"T":128}')
    >>> slow = Measurement("sdpa_math", "{}", 4e-5, 3e-5, 5e-5, 20, 1e-7, 1e-6, verified=True)
    >>> fast = Measurement("sdpa_flash", "{}", 2e-5, 1e-5, 3e-5, 20, 1e-7, 1e-6, verified=True)
    >>> wrong = Measurement("broken", "{}", 1e-6, 1e-6, 1e-6, 20, 0.5, 1e-6, verified=False)
    >>> with tempfile.TemporaryDirectory() as cache, TuningTable(f"{cache}/{FILE_NAME}") as table:
    ...     print(table.best(key), os.listdir(cache))
    ...     table.record(key, [slow, fast, wrong])
    ...     print([found.backend for found in table.best(key)], len(table.rows()))
    ...     print(table.forget(backend="broken"), table.persistent, table.notices)
    [] []
    3
    ['sdpa_flash', 'sdpa_math'] 3
    1 True []
    """

    def __init__(self, path: str | os.PathLike[str], *, busy_timeout_s: float = 30.0) -> None:
        text = os.fspath(path)
        if not isinstance(text, str) or not text or "\0" in text:
            raise refuse(
                "TuningTable path",
                path,
                "the path of a file",
                f"pass '<cache directory>/{FILE_NAME}'",
            )
        self._storage = Storage(Path(text).absolute(), busy_timeout_s)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> TuningTable:
        """The table at `path`; the disk is touched at first use, not here."""
        return cls(path)

    @property
    def path(self) -> Path:
        """The absolute path of the table's file, which need not exist."""
        return self._storage.path

    @property
    def persistent(self) -> bool:
        """False when the table is only in memory; `notices` says why."""
        return self._storage.is_persistent()

    @property
    def in_passing(self) -> bool:
        """Whether it is in memory only until a file descriptor is free; it costs nothing to ask."""
        return self._storage.is_in_passing()

    @property
    def notices(self) -> list[str]:
        """What was wrong with the file or its rows, and what was done; empty when all is well."""
        return self._storage.notices()

    @property
    def generation(self) -> int:
        """A number that changes when this process or another one changed the table.

        It is comparable within one `TuningTable` only. Read it before `best`, keep both, and look
        up again when it has changed. Costs tens of microseconds: too much for every attention call.
        """
        return self._storage.generation()

    @property
    def writes(self) -> int:
        """A number that grows whenever this object changes the table; it costs nothing to ask."""
        return self._storage.writes

    def record(
        self, key: Key, measurements: Iterable[Measurement], flags: Mapping[str, Any] | None = None
    ) -> int:
        """Store measurements, all or none; one of the same key, backend and config is replaced.

        `flags`: a snapshot of the framework's flags in force while they were measured, plain JSON
        data; without it, what the measurements say themselves. Returns how many were given.
        TuningError if another program keeps the table locked.
        """
        return self.record_all([(key, measurement) for measurement in measurements], flags)

    def record_all(self, entries: Iterable[Entry], flags: Mapping[str, Any] | None = None) -> int:
        """Store measurements of several keys as :meth:`record` does those of one: all or none."""
        entries = list(entries)
        for key, measurement in entries:
            if not isinstance(key, Key):
                raise refuse("record key", key, "a Key", "make one with polyattn.tuning.Key")
            if not isinstance(measurement, Measurement):
                raise refuse(
                    "record",
                    measurement,
                    "Measurement values",
                    "make them with polyattn.tuning.Measurement",
                )
        texts = snapshots.texts_of(flags)
        for name in texts:
            entries = [(key, dataclasses.replace(one, flags=name)) for key, one in entries]
        if entries:
            self._storage.write(
                lambda connection: rows.replace(connection, entries, texts), None, create=True
            )
        return len(entries)

    def best(self, key: Key) -> list[Measurement]:
        """The verified measurements of a key, the smallest median first; empty if none."""
        found = [measurement for _, measurement in self._select(key) if measurement.verified]
        return sorted(found, key=lambda one: (one.median_s, one.backend, one.config))

    def rows(self, device: str | None = None, versions: str | None = None) -> list[Entry]:
        """Every valid row, verified or not, in a fixed order; only those of what is given."""
        report = self._storage.notice
        return self._storage.read(
            lambda connection: rows.select(connection, None, report, device, versions), []
        )

    def keys(self) -> list[Key]:
        """Every key that has a valid row, once, in order."""
        return list(dict.fromkeys(key for key, _ in self._select(None)))

    def flags(self) -> dict[str, dict[str, Any]]:
        """Each snapshot that rows were measured under, by the digest that is in their `flags`."""
        return {name: snapshots.parsed(text) for name, text in self._everything()[1].items()}

    def forget(
        self, key: Key | None = None, device: str | None = None, backend: str | None = None
    ) -> int:
        """Delete the rows that match everything given (all rows where nothing is); their number."""
        return self._storage.write(
            lambda connection: rows.delete(connection, key, device, backend), 0, create=False
        )

    def export_json(self, target: PathOrFile) -> int:
        """Write every valid row as JSON to a path (whole or not at all) or a file; their number."""
        entries, texts = self._everything()
        exchange.write_text(exchange.dumps(entries, texts), target, self.path)
        return len(entries)

    def import_json(self, source: PathOrFile) -> int:
        """Take the rows of an export that are new or newer than ours; their number.

        TuningError, and nothing is taken, if anything in the document is not as it should be.
        """
        return self._take(*exchange.loads(exchange.read_text(source, self.path)))

    def merge(self, other: str | os.PathLike[str]) -> int:
        """Take the rows of another table's file that are new or newer than ours; their number.

        Rows of the other table that are not valid are left out, with a notice. TuningError, and
        nothing is taken, if the file is not a whole table of this schema or an older one.
        """
        path = Path(other).absolute()
        try:
            if not path.is_file():
                raise database.CorruptFileError("nothing, or not a regular file")
            found = self._storage.exclusively(
                lambda: database.contents(path, "rw", self._storage.timeout_s)
            )
        except (sqlite3.Error, OSError, database.CorruptFileError) as error:
            raise TuningError(
                f"merge: got {str(path)!r}, which is {error}; expected a tuning table of schema "
                f"{SCHEMA_VERSION} or older; pass the path of a {FILE_NAME}, or use import_json"
            ) from error

        def report(problem: str) -> None:
            self._storage.notice(f"merge of {path}: {problem}")

        known = snapshots.sound(found.flags)
        return self._take(rows.decode_all(found.rows, known, report), known)

    def close(self) -> None:
        """Release the file. Closing twice is fine; any other use afterwards is a TuningError."""
        self._storage.close()

    def __enter__(self) -> TuningTable:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TuningTable({str(self.path)!r})"

    def _select(self, key: Key | None) -> list[Entry]:
        report = self._storage.notice
        return self._storage.read(lambda connection: rows.select(connection, key, report), [])

    def _everything(self) -> tuple[list[Entry], Texts]:
        """Every valid row and the snapshots that these name, as they are at one moment."""
        report = self._storage.notice

        def both(connection: sqlite3.Connection) -> tuple[list[Entry], Texts]:
            entries = rows.select(connection, None, report)
            return entries, snapshots.select(connection, rows.named(entries))

        nothing: tuple[list[Entry], Texts] = ([], {})
        return self._storage.read(both, nothing)

    def _take(self, entries: list[Entry], texts: Texts) -> int:
        if not entries:
            return 0
        return self._storage.write(
            lambda connection: rows.replace_older(connection, entries, texts), 0, create=True
        )

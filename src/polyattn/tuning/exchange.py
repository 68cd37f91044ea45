"""The tuning table as one JSON document, to carry times from machine to machine.

Reading is strict: an unknown schema, an unknown or missing member or a value out of range refuses
the whole document, because half an import would look like a whole one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from polyattn.errors import TuningError
from polyattn.tuning import snapshots
from polyattn.tuning.rows import COLUMNS, KEY_COLUMNS, Entry
from polyattn.tuning.schema import SCHEMA_VERSION
from polyattn.tuning.snapshots import Texts
from polyattn.tuning.values import Key, Measurement, refuse, strict_json

APPLICATION = "polyattn-tuning"
_MEMBERS = ("application", "schema", "flags", "rows")
_EXPORT = "pass a file that export_json wrote"

PathOrFile = str | os.PathLike[str] | IO[str] | IO[bytes]


def dumps(entries: Iterable[Entry], texts: Texts) -> str:
    """The document of entries and of the snapshots that they name.

    >>> print(dumps([], {}))
    {
     "application": "polyattn-tuning",
     "schema": 2,
     "flags": {},
     "rows": []
    }
    <BLANKLINE>
    """
    rows = [_plain(key, measurement) for key, measurement in entries]
    document = {
        "application": APPLICATION,
        "schema": SCHEMA_VERSION,
        "flags": {name: snapshots.parsed(text) for name, text in texts.items()},
        "rows": rows,
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def loads(text: str) -> tuple[list[Entry], Texts]:
    """The entries of a document and its snapshots, or TuningError that names what is wrong.

    >>> loads('{"application": "polyattn-tuning", "schema": 9, "rows": []}')
    Traceback (most recent call last):
    polyattn.errors.TuningError: import: got schema 9; expected schema 1 or 2; \
export it again with this version of polyattn
    """
    try:
        document = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise refuse("import", text, f"JSON ({error})", _EXPORT) from None
    if not isinstance(document, dict) or document.get("application") != APPLICATION:
        raise refuse("import", document, f"an object whose application is {APPLICATION!r}", _EXPORT)
    schema = document.get("schema")
    if type(schema) is not int or schema not in (1, SCHEMA_VERSION):
        raise TuningError(
            f"import: got schema {schema!r}; expected schema 1 or {SCHEMA_VERSION}; "
            "export it again with this version of polyattn"
        )
    members = ("application", "schema", "rows") if schema == 1 else _MEMBERS
    _check_members("import", document, members)
    texts = _texts(document.get("flags", {}))
    rows = document["rows"]
    if not isinstance(rows, list):
        raise refuse("import rows", rows, "a list", _EXPORT)
    columns = [name for name in COLUMNS if schema != 1 or name != "flags"]
    return [_entry(number, row, columns, texts) for number, row in enumerate(rows)], texts


def read_text(source: PathOrFile, table: Path) -> str:
    """The text of a path or an open file."""
    if not isinstance(source, str | os.PathLike):
        return _decoded(source.read())
    path = Path(source)
    _check_not_table(path, table, "use merge() for a table")
    try:
        return _decoded(path.read_bytes())
    except OSError as error:
        raise refuse("import", str(path), f"a readable file ({error})", _EXPORT) from error


def write_text(text: str, target: PathOrFile, table: Path) -> None:
    """Write text to a path, whole or not at all, or to an open file."""
    if not isinstance(target, str | os.PathLike):
        writer: Any = target
        writer.write(text)
        return
    path = Path(target)
    _check_not_table(path, table, "name another file")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_text(text, encoding="utf-8")  # a pipe or a terminal, which have no real path
        else:
            _replace_file(path.resolve(), text)
    except (OSError, RuntimeError) as error:
        wanted = f"a file that can be written ({error})"
        raise refuse("export", str(path), wanted, "name another file") from error


def _replace_file(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _check_not_table(path: Path, table: Path, advice: str) -> None:
    with suppress(OSError):
        if path.samefile(table):
            wanted = "a JSON file, not the table itself"
            raise refuse("export or import", str(path), wanted, advice)


def _decoded(content: str | bytes) -> str:
    if isinstance(content, str):
        return content
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("import", content[:40], f"UTF-8 text ({error})", _EXPORT) from None


def _plain(key: Key, measurement: Measurement) -> dict[str, object]:
    row = {**dataclasses.asdict(key), **dataclasses.asdict(measurement)}
    if row["error"] == math.inf:
        row["error"] = "inf"
    return row


def _texts(flags: object) -> Texts:
    if not isinstance(flags, dict):
        raise refuse("import flags", flags, "an object of snapshots by digest", _EXPORT)
    texts: Texts = {}
    for name, snapshot in flags.items():
        try:
            texts[name] = snapshots.text_of(snapshot)
        except TuningError as error:
            raise TuningError(f"import {error}") from None
        if (made := snapshots.digest_of(texts[name])) != name:
            wanted = f"the snapshot whose digest this is (that of the one here is {made})"
            raise refuse("import flags", name, wanted, _EXPORT)
    return texts


def _entry(number: int, row: object, columns: list[str], texts: Texts) -> Entry:
    what = f"import rows[{number}]"
    if not isinstance(row, dict):
        raise refuse(what, row, "an object", _EXPORT)
    _check_members(what, row, columns)
    rest = {name: row[name] for name in columns if name not in KEY_COLUMNS}
    if rest["error"] == "inf":
        rest["error"] = math.inf
    try:
        key, measurement = Key(*(row[name] for name in KEY_COLUMNS)), Measurement(**rest)
        snapshots.require(measurement.flags, texts)
    except TuningError as error:
        raise TuningError(f"{what}: {error}") from None
    return key, measurement


def _check_members(what: str, found: dict[str, Any], expected: Iterable[str]) -> None:
    if set(found) != set(expected):
        wrong = sorted(set(found) ^ set(expected))
        raise refuse(
            what,
            sorted(found),
            f"exactly {', '.join(expected)} (differs in {', '.join(wrong)})",
            _EXPORT,
        )

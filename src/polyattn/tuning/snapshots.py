"""Under which flags the times were measured: each distinct snapshot once, under its digest.

A snapshot is any JSON object; what it says is no concern of the table. Rows hold the digest, and
the digest is the checksum too: a text that does not give its own digest is damaged. A look-up of
times hashes that text and never parses it.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from typing import Any

from polyattn.errors import TuningError
from polyattn.tuning.values import canonical_json, refuse, strict_json

_AGAIN = "pass a snapshot: an object of plain JSON values"

Texts = dict[str, str]
"""The canonical text of each snapshot, by its digest."""


def digest(snapshot: Mapping[str, Any]) -> str:
    """The digest under which a snapshot is stored; the order of its members does not matter.

    >>> digest({"a": 1, "b": [True]}) == digest({"b": (True,), "a": 1}) != digest({"a": 1})
    True
    """
    return digest_of(text_of(snapshot))


def texts_of(snapshot: Mapping[str, Any] | None) -> Texts:
    """A snapshot as it is stored; nothing for None."""
    if snapshot is None:
        return {}
    text = text_of(snapshot)
    return {digest_of(text): text}


def text_of(snapshot: Mapping[str, Any]) -> str:
    """The canonical JSON of a snapshot, or TuningError if it is not plain data.

    >>> text_of({"b": None, "a": (1, 2)})
    '{"a":[1,2],"b":null}'
    """
    if not isinstance(snapshot, Mapping):
        raise refuse("flags", snapshot, "a snapshot of flags", _AGAIN)
    try:
        text = json.dumps(dict(snapshot), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise refuse("flags", dict(snapshot), f"plain JSON values ({error})", _AGAIN) from None
    return canonical_json("flags", text)


def parsed(text: str) -> dict[str, Any]:
    """The snapshot of a stored text."""
    try:
        snapshot = strict_json(text)
    except (ValueError, RecursionError):
        snapshot = None
    if not isinstance(snapshot, dict):
        raise refuse("flags", text, "the JSON of a snapshot", "forget its rows and measure again")
    return snapshot


def sound(stored: Iterable[tuple[object, ...]]) -> Texts:
    """Those of the stored pairs of digest and text that are what was once written."""
    return {
        name: text
        for name, text in stored
        if isinstance(name, str) and isinstance(text, str) and digest_of(text) == name
    }


def select(connection: sqlite3.Connection, wanted: Iterable[str] | None = None) -> Texts:
    """The stored snapshots that are whole: all, or those of the digests that are asked for."""
    if wanted is None:
        return sound(select_raw(connection))
    one = "SELECT digest, snapshot FROM flags WHERE digest = ?"
    return sound(pair for name in wanted for pair in connection.execute(one, (name,)).fetchall())


def select_raw(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
    """Every pair of digest and text as it is stored."""
    return connection.execute("SELECT digest, snapshot FROM flags").fetchall()


def insert(connection: sqlite3.Connection, texts: Iterable[tuple[object, ...]]) -> None:
    """Write pairs of digest and text; a damaged text of the same digest gives way."""
    connection.executemany("INSERT OR REPLACE INTO flags (digest, snapshot) VALUES (?, ?)", texts)


def prune(connection: sqlite3.Connection) -> None:
    """Delete the snapshots that no row names any more."""
    connection.execute(
        "DELETE FROM flags WHERE NOT EXISTS "
        "(SELECT 1 FROM measurements WHERE measurements.flags = flags.digest)"
    )


def require(name: str, known: Iterable[str]) -> None:
    """Refuse a digest whose snapshot is not known; the empty one stands for none.

    >>> require("", [])
    >>> require("ab", [])
    Traceback (most recent call last):
    polyattn.errors.TuningError: flags: got 'ab'; expected a digest whose snapshot is there, \
whole; measure again
    """
    if name and name not in known:
        wanted = "a digest whose snapshot is there, whole"
        raise TuningError(f"flags: got {name!r}; expected {wanted}; measure again")


def digest_of(text: str) -> str:
    """The digest of a text."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

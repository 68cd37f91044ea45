"""Records: the JSON of a run, and what two of them say about each other."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polyattn.bench import flags
from polyattn.bench.machine import machine_class
from polyattn.errors import PolyattnError

__all__ = ["SCHEMA", "compare", "default_path", "dump", "read", "write"]

SCHEMA = "polyattn.bench/1"


def dump(record: Mapping[str, Any]) -> str:
    """Return a record as JSON text."""
    return json.dumps(record, indent=1, ensure_ascii=False)


def default_path(record: Mapping[str, Any], kind: str) -> Path:
    """Return where the record of this kind of machine belongs in a checkout."""
    return Path("benchmarks/results") / machine_class(record["machine"]) / f"{kind}.json"


def write(record: Mapping[str, Any], path: Path) -> None:
    """Write a record, making the folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(record) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a record; raise :class:`PolyattnError` for anything else."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        known = record["schema"] == SCHEMA
    except OSError as error:
        raise PolyattnError(
            f"got {path}, which cannot be read ({error.strerror}), expected a record of `polyattn "
            "bench`; look at the path."
        ) from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PolyattnError(
            f"got {path}, expected a record of `polyattn bench` ({error})."
        ) from error
    if known and (lacking := _lacking(record)):
        raise PolyattnError(
            f"got {path}, a record of `polyattn bench` that is damaged: {lacking}; make it again."
        )
    if not known:
        raise PolyattnError(
            f"got {path} of the schema {record['schema']!r}, expected {SCHEMA!r}; make it again "
            "with this version of polyattn."
        )
    flags.check(record, str(path))
    return dict(record)


def _lacking(record: Mapping[str, Any]) -> str:
    """Say what of a record is not as one writes it; nothing where it can be compared."""
    for name in ("machine", "versions"):
        if not isinstance(record.get(name), dict):
            return f"{name!r} is no object"
    rows = record.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return "'rows' is no list of objects"
    for row in rows:
        if not isinstance(row.get("name"), str):
            return "a row has no name"
        for measure in _MEASURES:
            if row.get(measure) and not _is_spread(row[measure]):
                return f"{measure!r} of the row {row['name']!r} lacks its median or quartiles"
    return ""


def _is_spread(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    return all(_is_finite(value.get(name)) for name in ("median", "q1", "q3"))


def _is_finite(number: object) -> bool:
    """Whether it is a number that can be compared and subtracted as a float."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return abs(number) <= sys.float_info.max


_MEASURES = {
    "extra_us": "extra time, median us",
    "relative": "time over that of torch in the same run, median",
}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Set the rows of two records of one kind side by side.

    A row differs when the quartiles of the two do not overlap; less is noise. The notes say how
    the conditions differed: machine, versions, and each knob of the frameworks' flags.
    """
    if a.get("kind") != b.get("kind"):
        raise PolyattnError(
            f"got a record of {a.get('kind')!r} and one of {b.get('kind')!r}, expected two of the "
            "same kind."
        )
    measure = next((m for m in _MEASURES if any(row.get(m) for row in a["rows"])), "extra_us")
    theirs = {row["name"]: row[measure] for row in b["rows"] if row.get(measure)}
    rows = [
        _difference(row["name"], row[measure], theirs[row["name"]])
        for row in a["rows"]
        if row.get(measure) and row["name"] in theirs
    ]
    if not rows:
        raise PolyattnError(
            f"got two records of {a.get('kind')!r} with no row in common that holds times, "
            "expected rows to compare: `polyattn bench compare` is for records of times."
        )
    notes = [
        f"{what} differs: {a[what]} and {b[what]}"
        for what in ("machine", "versions")
        if a[what] != b[what]
    ]
    notes += flags.notes(a, b)
    return {
        "measure": _MEASURES[measure],
        "rows": rows,
        "notes": notes,
        "flags": flags.difference(a, b),
        "slower": [row["name"] for row in rows if row["verdict"] == "slower"],
    }


def _difference(name: str, a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, Any]:
    verdict = "same"
    if b["q1"] > a["q3"]:
        verdict = "slower"
    elif b["q3"] < a["q1"]:
        verdict = "faster"
    return {
        "name": name,
        "a": a["median"],
        "b": b["median"],
        "change": round(b["median"] - a["median"], 4),
        "verdict": verdict,
    }

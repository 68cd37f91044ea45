"""Calibration: how large errors are that mean nothing, measured on the reference itself.

Run the reference a few times with every parameter multiplied by ``(1 + eps * u)``, u uniform in
-1..1 and eps the spacing of the dtype, trace each run, and :func:`build` a floor: for each record
the largest error seen. What a port may differ by without being wrong is a small multiple of it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyattn.errors import TraceError
from polyattn.trace.compare.distance import distance
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.reader import read
from polyattn.trace.format.record import Record

__all__ = ["META", "SCHEMA", "Floor", "build", "load", "save"]

META = "polyattn.trace.floor"
SCHEMA = 1


@dataclass(frozen=True)
class Floor:
    """`errors`: the largest seen by module, phase and tensor, over calls and steps; `runs`: of how
    many reruns; `reference`: where it is from; `notes`: what is worth knowing of it.
    """

    errors: Mapping[tuple[str, str, str], float]
    runs: int
    reference: str = ""
    notes: tuple[str, ...] = field(default=())

    def of(self, record: Record) -> float | None:
        """Return the floor of a record of the reference, None if it was not calibrated."""
        return self.errors.get((record.module, record.phase, record.tensor))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: what :func:`save` writes."""
        errors: dict[str, dict[str, float]] = {}
        for (module, phase, tensor), error in self.errors.items():
            errors.setdefault(module, {})[f"{phase}:{tensor}"] = error
        return {
            META: {"schema": SCHEMA, "runs": self.runs, "reference": self.reference},
            "errors": errors,
            "notes": list(self.notes),
        }


def build(reference: Trace | str | Path, reruns: Sequence[Trace | str | Path]) -> Floor:
    """Return the floor of a reference from traces of it under perturbation.

    Records without a counterpart in some rerun are counted in a note. Raises TraceError if there
    are no reruns, or if nothing of one is comparable with the reference.
    """
    if isinstance(reruns, str | Path | Trace) or not reruns:
        raise TraceError(
            f"got {reruns!r:.60}, expected a list of one or more traces of the same model with "
            "slightly perturbed weights."
        )
    base = reference if isinstance(reference, Trace) else read(reference)
    errors: dict[tuple[str, str, str], float] = {}
    lacking = 0
    for rerun in reruns:
        other = rerun if isinstance(rerun, Trace) else read(rerun)
        known = {(record.rank, *record.key): record for record in other.records}
        seen = 0
        for record in base.records:
            twin = known.get((record.rank, *record.key))
            if record.phase == "param" or twin is None:
                lacking += record.phase != "param"
                continue
            found = distance(record, twin)
            if not found.comparable or math.isinf(found.error):
                lacking += 1
                continue
            seen += 1
            key = (record.module, record.phase, record.tensor)
            errors[key] = max(errors.get(key, 0.0), found.error)
        if not seen:
            raise TraceError(
                "got a rerun that has no record in common with the reference, expected the same "
                "model on the same inputs, with the same layers recorded."
            )
    notes = (f"{lacking} records have no comparable counterpart in a rerun",) if lacking else ()
    return Floor(errors, len(reruns), str(base.paths[0]) if base.paths else "", notes)


def save(floor: Floor, path: str | Path) -> Path:
    """Write a floor as JSON, whole or not at all; return the path."""
    path = Path(path)
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        draft.write_text(json.dumps(floor.to_dict(), indent=1) + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise TraceError(f"got {path}, which cannot be written ({error}).") from error
    return path


def load(path: str | Path) -> Floor:
    """Read a floor; TraceError if the file holds none, or one of a newer version."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"got the floor {path}, which cannot be read ({error}).") from error
    meta = data.get(META) if isinstance(data, dict) else None
    schema = meta.get("schema") if isinstance(meta, dict) else None
    if meta is None or type(schema) is not int or schema < 1:
        raise TraceError(
            f"got {path}, which holds no floor, expected a file that `polyattn trace calibrate` "
            "wrote."
        )
    if schema > SCHEMA:
        raise TraceError(
            f"got {path}, a floor of schema {schema}, and this version reads up to {SCHEMA}: "
            "install a newer polyattn or calibrate again."
        )
    try:
        return _parsed(data, meta)
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            f"got {path}, a floor that is damaged ({error}); calibrate again."
        ) from error


def _parsed(data: Any, meta: Any) -> Floor:
    errors = {}
    for module, found in data.get("errors", {}).items():
        for key, error in found.items():
            phase, colon, tensor = key.partition(":")
            number = type(error) in (int, float) and 0 <= error <= sys.float_info.max
            if not colon or not number:
                raise ValueError(f"{key!r:.60}: {error!r:.60}")
            errors[module, phase, tensor] = float(error)
    runs = meta.get("runs", 0)
    if type(runs) is not int or runs < 0:
        raise ValueError(f"runs {runs!r:.60}")
    notes = tuple(str(note) for note in data.get("notes", []))
    return Floor(errors, runs, str(meta.get("reference", "")), notes)

"""Traces of several ranks as one: parts of a tensor become the tensor, by adding their sketches."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyattn.errors import TraceError
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.record import Record
from polyattn.trace.statistics.schema import LARGEST, SCHEMA, SORTS, STATISTICS, Parts
from polyattn.trace.statistics.sketch_text import pack, unpack

__all__ = ["files_of", "join", "merge"]


def files_of(path: str | Path) -> list[Path]:
    """Return the files that a path means: itself, a folder's, a pattern's, or its ranks'."""
    path = Path(path)
    try:
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise TraceError(f"got the folder {path} without a .jsonl file, expected a trace.")
            return found
        if path.exists():
            return [path]
        ranks = f"{glob.escape(str(path.with_name(path.stem)))}.rank*{glob.escape(path.suffix)}"
        found = sorted(map(Path, glob.glob(str(path)) or glob.glob(ranks)))
    except (OSError, ValueError) as error:
        raise TraceError(f"got the trace {path}, which cannot be read ({error}).") from error
    if not found:
        raise TraceError(
            f"got {path}, and there is no such file, expected a trace (a .jsonl file), a pattern "
            "of several, or a folder."
        )
    return found


def merge(traces: Sequence[Trace]) -> Trace:
    """Return the traces of the ranks of one run as one trace, its records numbered anew.

    Records that say which part of a tensor they are of (`global_shape` and `start`, or `partial`)
    become one record of the whole, where all parts are there: sketches, counts and norms add up,
    samples are left out. Others stay, each with its rank. They are ordered by `seq`, then rank:
    ranks have no common clock. Raises TraceError if the files are not of one run.
    """
    notes = [note for trace in traces for note in trace.notes]
    traces = sorted(traces, key=lambda trace: trace.header.rank)
    notes += _one_run(traces)
    groups: dict[object, list[tuple[int, Record]]] = {}
    for file, trace in enumerate(traces):
        for record in trace.records:
            part = record.partial or record.global_shape is not None
            key = record.key if part else (file, record.seq)
            groups.setdefault((part, key), []).append((file, record))
    merged, lacking = [], []
    for (part, _), group in groups.items():  # type: ignore[misc]
        whole = join([record for _, record in group]) if part else None
        if whole is not None:
            merged.append((whole, group))
        else:
            merged.extend((record, [(file, record)]) for file, record in group)
            lacking += [group[0][1]] if part else []
    if lacking:
        notes.append(
            f"{len(lacking)} tensors have not all their parts in these files, and their parts stay "
            f"apart; the first is {lacking[0].tensor} of {lacking[0].module!r}"
        )
    return Trace(
        traces[0].header,
        _renumbered(merged),
        all(trace.ended for trace in traces),
        tuple(notes),
        tuple(path for trace in traces for path in trace.paths),
        tuple(header for trace in traces for header in trace.headers),
    )


def _one_run(traces: Sequence[Trace]) -> list[str]:
    """A note on ranks that are lacking; TraceError if the files are of several runs."""
    worlds = {trace.header.world for trace in traces}
    ranks = [trace.header.rank for trace in traces]
    if len(worlds) > 1 or len(set(ranks)) < len(ranks):
        said = ", ".join(
            f"{trace.paths[0].name}: rank {trace.header.rank} of {trace.header.world}"
            for trace in traces[:8]
        )
        raise TraceError(
            f"got {len(traces)} files ({said}), expected one file for each rank of one run; name "
            "the files of one run."
        )
    missing = worlds.pop() - len(ranks)
    return [f"{missing} ranks of the run have no file here"] if missing else []


def _renumbered(merged: list[tuple[Record, list[tuple[int, Record]]]]) -> tuple[Record, ...]:
    merged.sort(key=lambda one: (one[0].seq, one[0].rank))
    new = {
        (file, record.seq): number
        for number, (_, group) in enumerate(merged)
        for file, record in group
    }
    joined = {number for number, (_, group) in enumerate(merged) if len(group) > 1}

    def same(whole: Record, file: int) -> int | None:
        number = None if whole.same is None else new[file, whole.same]
        return None if number in joined else number  # a part is not identical to the whole

    return tuple(
        replace(whole, seq=number, same=same(whole, group[0][0]))
        for number, (whole, group) in enumerate(merged)
    )


def join(parts: Sequence[Record]) -> Record | None:
    """Return the record of the whole that `parts` are parts of, or None if they are not all of it.

    Equal boxes (replicas) count once; terms of a sum (`partial`) all count, and of their sum only
    the sketch is known.
    """
    first = min(parts, key=lambda part: (part.rank, part.seq))
    whole = first.global_shape or first.shape
    alike = {(p.global_shape or p.shape, p.dtype, p.partial) for p in parts}
    if len(alike) > 1:
        return None
    if not first.partial:
        parts = list({(p.start, p.shape): p for p in reversed(parts)}.values())[::-1]
    n = math.prod(whole) * (2 if first.dtype.startswith("complex") else 1)
    covered = sum(part.n for part in parts)
    if covered != n and not (first.partial and n and covered % n == 0):
        return None
    alone: dict[str, Any] = dict.fromkeys(STATISTICS) | {
        "shape": whole,
        "dtype": first.dtype,
        "n": n,
    }
    if not first.partial:
        alone |= _counts(parts) | _moments(parts)
    sketches = [part.sketch for part in parts if part.sketch is not None]
    if len(sketches) == len(parts):
        columns = zip(*map(unpack, sketches), strict=True)
        alone["sketch"] = pack([_held(sum(column)) for column in columns])
    return replace(
        first, **alone, same=None, global_shape=None, start=None, partial=False, file=None
    )


def _counts(parts: Sequence[Record]) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for name in SORTS:
        values = [getattr(part, name) for part in parts]
        found[name] = None if None in values else sum(values)
    return found


def _moments(parts: Sequence[Record]) -> dict[str, float | None]:
    """Of all parts, weighted by their finite elements; None where a part did not collect it."""
    finite = [part.n - part.bad if part.bad is not None else None for part in parts]
    some = [(part, count) for part, count in zip(parts, finite, strict=True) if count != 0]
    total = None if None in finite else sum(count or 0 for count in finite)
    shares = [(count or 0) / total for _, count in some] if total else None
    means = [part.mean for part, _ in some]
    found: dict[str, float | None] = {}
    for row in SCHEMA:
        if row.kind == "moment":
            values = [getattr(part, row.name) for part, _ in some]
            known = bool(values) and None not in values
            found[row.name] = _joined(row.parts, values, means, shares) if known else None
    return found


def _joined(
    how: Parts, values: list[float], means: list[float | None], shares: list[float] | None
) -> float | None:
    """A moment of the whole; `means` and `shares` of the finite elements are None if unknown."""
    if how in _PLAINLY:
        return _held(_PLAINLY[how](values))
    if shares is None:
        return None
    if how == "mean":
        return sum(share * value for share, value in zip(shares, values, strict=True))
    own = [mean for mean in means if mean is not None]
    if how != "deviation" or len(own) < len(means):
        return None
    mean = sum(share * one for share, one in zip(shares, own, strict=True))
    return _held(math.hypot(*_spreads(shares, values, own, mean)))


_PLAINLY: dict[Parts, Callable[[list[float]], float]] = {
    "sum": sum, "smallest": min, "largest": max, "norm": lambda values: math.hypot(*values),
}  # fmt: skip


def _spreads(
    shares: list[float], stds: list[float], means: list[float], mean: float
) -> Iterable[float]:
    for share, std, own in zip(shares, stds, means, strict=True):
        yield math.sqrt(share) * std
        yield math.sqrt(share) * (own - mean)


def _held(value: float) -> float:
    """A sum that passes the range of float64 is its largest number, as in statistics."""
    if math.isnan(value):  # an infinite sum of one sign met one of the other
        return 0.0
    return max(-LARGEST, min(LARGEST, value))

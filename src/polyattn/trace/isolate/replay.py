"""The isolated run of a port: its tensors replaced by the reference's, module by module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.errors import TraceError
from polyattn.trace.compare.counterparts import Key, counterparts
from polyattn.trace.compare.rules import Given
from polyattn.trace.format.contents import Trace
from polyattn.trace.format.isolated import mark_isolated
from polyattn.trace.format.reader import read
from polyattn.trace.format.record import Record
from polyattn.trace.isolate.feeding import Feed, feeding
from polyattn.trace.isolate.whole_tensors import WholeTensors
from polyattn.trace.recorders.torch.model_trace import trace

__all__ = ["fed_run", "feed_of", "refuse_without_tensors", "written"]


def feed_of(
    reference: Trace,
    port: Trace,
    rules: Given = None,
    layers: frozenset[str] | None = None,
    dtype: torch.dtype | None = None,
) -> Feed:
    """Return what to feed a port whose ordinary trace is `port`.

    `layers`: the port's modules that may be fed, all by default. `dtype`: what narrower tensors are
    widened to. Raises TraceError where the reference kept no tensor whole that fits.
    """
    refuse_without_tensors(reference)
    known = counterparts(reference, port, rules)
    found = {
        key: record
        for key, record in _kept(reference, known.records).items()
        if layers is None or key[0] in layers
    }
    if not found:
        raise TraceError(
            "got a port none of whose modules has a counterpart that the reference kept whole; say "
            "which is which with rules, or record the reference with more tensors."
        )
    values = WholeTensors(reference)
    values.check(found.values())
    return Feed(found, known.forms, values, dtype)


def refuse_without_tensors(reference: Trace) -> None:
    """Raise TraceError for a reference that kept no tensor whole."""
    if not any(record.file for record in reference.records):
        raise TraceError(
            f"got the reference {_path(reference)}, which kept no whole tensors, expected a trace "
            "with the tensors to feed: record it with tensors='.*' (polyattn trace record "
            "--tensors '.*'), or those of some modules."
        )


def _kept(reference: Trace, records: Mapping[Key, Record]) -> dict[Key, Record]:
    """Those that the reference kept whole."""
    # the same values elsewhere are the same tensor
    files = {
        _values(record): record
        for record in reference.records
        if record.file is not None and record.sketch is not None
    }
    found: dict[Key, Record] = {}
    for key, record in records.items():
        whole = record if record.file is not None else files.get(_values(record))
        if whole is not None:
            found[key] = whole
    return found


def _values(record: Record) -> tuple[object, ...]:
    return record.shape, record.dtype, record.sketch, record.l2, record.min, record.max


def fed_run(model: nn.Module, feed: Feed, folder: Path, call: Callable[[nn.Module], Any]) -> Trace:
    """Run a port once, fed, and return what was recorded, in `folder`."""
    with trace(model, folder / "fed.jsonl", weights=False) as run, feeding(model, feed):
        call(model)
    return read(run.path)


def written(fed: Trace, feed: Feed, target: Path, port: Trace) -> Trace:
    """Write the isolated trace of a fed run to `target`, and return it.

    `port`: the port's ordinary trace, whose weights' fingerprints are those.
    """
    mark_isolated(fed.paths[0], target, feed.marks, {"weights": dict(port.header.weights)})
    return read(target)


def _path(trace: Trace) -> str:
    return str(trace.paths[0]) if trace.paths else "given"

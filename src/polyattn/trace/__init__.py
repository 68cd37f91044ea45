"""Activation traces: the file format, its writer and reader, and the sketch that compares tensors.

No framework is needed here: NumPy is loaded where arrays are met, torch and JAX never. The format
is in ``docs/trace-format.md``. The modules `sketch`, `statistics` and `fingerprints` are imported
by name; they need NumPy.

>>> from polyattn.trace import PHASES
>>> PHASES
('in', 'out', 'grad_in', 'grad_out', 'param')
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from polyattn.trace.format.contents import Trace
    from polyattn.trace.format.header import SCHEMA, Header
    from polyattn.trace.format.output import rank_path
    from polyattn.trace.format.reader import TraceReader, read
    from polyattn.trace.format.record import PHASES, STATISTICS, Record, line_of
    from polyattn.trace.format.sink import JsonlSink
    from polyattn.trace.recorders.numpy import TraceWriter

__all__ = [
    "Header", "JsonlSink", "Record", "Trace", "TraceReader", "TraceWriter",
    "line_of", "rank_path", "read", "PHASES", "SCHEMA", "STATISTICS",
]  # fmt: skip

_LAZY = {  # a trace that is off loads nothing
    "Header": "polyattn.trace.format.header",
    "JsonlSink": "polyattn.trace.format.sink",
    "PHASES": "polyattn.trace.format.record",
    "Record": "polyattn.trace.format.record",
    "SCHEMA": "polyattn.trace.format.header",
    "STATISTICS": "polyattn.trace.format.record",
    "Trace": "polyattn.trace.format.contents",
    "TraceReader": "polyattn.trace.format.reader",
    "TraceWriter": "polyattn.trace.recorders.numpy",
    "line_of": "polyattn.trace.format.record",
    "rank_path": "polyattn.trace.format.output",
    "read": "polyattn.trace.format.reader",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})

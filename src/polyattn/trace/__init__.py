"""Activation traces: the file format, its writer and reader, and the sketch that compares tensors.

No framework is needed here: NumPy is loaded where arrays are met, torch and JAX never. The format
is in ``docs/trace-format.md``. The modules `sketch`, `statistics` and `fingerprints` are imported
by name; they need NumPy.
"""

from polyattn.trace.contents import Trace
from polyattn.trace.header import SCHEMA, Header
from polyattn.trace.output import rank_path
from polyattn.trace.reader import TraceReader, read
from polyattn.trace.record import PHASES, STATISTICS, Record, line_of
from polyattn.trace.sink import JsonlSink
from polyattn.trace.writer import TraceWriter

__all__ = [
    "Header", "JsonlSink", "Record", "Trace", "TraceReader", "TraceWriter",
    "line_of", "rank_path", "read", "PHASES", "SCHEMA", "STATISTICS",
]  # fmt: skip

"""The persistent table of measured attention times, and nothing else.

`TuningTable` keeps `Measurement` values under a `Key` in one SQLite file, and beside them, each
once, the snapshots of a framework's flags that they were measured under. It is data: it imports no
framework, chooses no backend and runs no kernel. A file that is damaged, foreign or out of reach
costs speed, never a crash and never a wrong answer.
"""

from polyattn.tuning.snapshots import digest
from polyattn.tuning.table import FILE_NAME, TuningTable
from polyattn.tuning.values import Key, Measurement

__all__ = ["FILE_NAME", "Key", "Measurement", "TuningTable", "digest"]

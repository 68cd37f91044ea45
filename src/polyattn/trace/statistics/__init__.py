"""The numbers that a record keeps of a tensor: one schema, and their definition in NumPy.

`statistics` needs NumPy, which is loaded when it is asked for; the schema needs nothing.

>>> from polyattn.trace.statistics import statistics
>>> statistics([1.0, -2.0])["abs_mean"]
1.5
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from polyattn.trace.statistics.definition import statistics

__all__ = ["statistics"]


def __getattr__(name: str) -> typing.Any:
    if name != "statistics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from polyattn.trace.statistics.definition import statistics

    return statistics

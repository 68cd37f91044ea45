"""What is generated: models, caches, contexts and types, a row each."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from polyattn.errors import PolyattnError

__all__ = ["GOAL", "GOAL_LONG", "LONG", "QUICK", "ROWS", "Row", "chosen"]

GOAL, GOAL_LONG = 1.0, 1.3
"""What stock's time over ours has to be, and from a context of `LONG` tokens on."""
LONG = 4096
_SHORT_NAMES = {128: "128", 1024: "1k", 4096: "4k"}
_TYPES = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class Row:
    """One generation. `cache`: dynamic or static; `batch` > 1: padded on the left."""

    model: str
    cache: str
    context: int
    dtype: str
    batch: int = 1
    compiled: bool = False
    as_run: bool = False
    """Whether the routing of ``polyattn run``, which records each call, is measured as well."""

    @property
    def name(self) -> str:
        """Return the row's name, which ``--only`` looks at."""
        context = _SHORT_NAMES.get(self.context, str(self.context)) if self.context else ""
        kind = f"padded x{self.batch}" if self.batch > 1 else ""
        parts = (self.model, self.cache, kind, "compiled" * self.compiled, context)
        return " ".join(filter(None, (*parts, _TYPES.get(self.dtype, self.dtype))))

    @property
    def goal(self) -> float:
        """Return what stock's time over ours has to be."""
        return GOAL_LONG if self.context >= LONG else GOAL


def _all() -> Iterator[Row]:
    for dtype in _TYPES:
        for context in _SHORT_NAMES:
            yield Row("llama", "dynamic", context, dtype, as_run=True)
            yield Row("llama", "static", context, dtype)
            yield Row("llama", "dynamic", context, dtype, batch=2)
            yield Row("gemma", "dynamic", context, dtype)
            yield Row("gemma", "static", context, dtype)
        yield Row("gemma", "dynamic", 1024, dtype, batch=2)
        yield Row("whisper", "dynamic", 0, dtype)
        yield Row("whisper", "static", 0, dtype)
        yield Row("llama", "static", 4096, dtype, compiled=True)
    yield Row("llama", "static", 128, "float32", compiled=True)
    yield Row("llama", "dynamic", 1024, "float32", compiled=True)
    yield Row("gemma", "static", 1024, "float32", compiled=True)
    yield Row("whisper", "static", 0, "float32", compiled=True)
    yield Row("gemma-2", "dynamic", 1024, "float32")


ROWS = tuple(_all())
QUICK = tuple(
    row for row in ROWS if row.context in (0, 128) and row.dtype == "float32" and not row.compiled
)
"""What a run of about a minute does."""


def chosen(only: str, quick: bool) -> tuple[Row, ...]:
    """Return the rows whose name holds the pattern, or matches its wildcards."""
    every = QUICK if quick and not only else ROWS
    found = tuple(r for r in every if only in r.name or fnmatch.fnmatch(r.name, only))
    if not found:
        names = "; ".join(row.name for row in ROWS)
        raise PolyattnError(f"got --only {only!r}, expected a part of one of: {names}.")
    return found

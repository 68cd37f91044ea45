"""Warnings of torch's that are heard and not let out, without touching those of other threads."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["hushed"]


class _Ear:
    """What stands where a warnings filter has its pattern: it hears, in its own thread only."""

    def __init__(self) -> None:
        self.thread, self.texts = threading.get_ident(), list[str]()

    def match(self, text: str) -> bool:
        """Take the text if it is said in this ear's thread; the filter then ignores it."""
        if threading.get_ident() != self.thread:
            return False
        self.texts.append(text)
        return True


@contextlib.contextmanager
def hushed() -> Iterator[list[str]]:
    """Collect what is warned of in this thread; other threads' warnings go their way.

    ``warnings.catch_warnings`` would take theirs too, and put back filters that they have
    changed meanwhile; this adds one filter, which answers for its thread only, and removes it.
    """
    ear = _Ear()
    entry: Any = ("ignore", ear, Warning, None, 0)
    filters: list[Any] = warnings.filters  # type: ignore[assignment]
    filters.insert(0, entry)
    try:
        yield ear.texts
    finally:
        filters.remove(entry)

"""What one thread has recorded and not yet handed over, and which calls run in it."""

from __future__ import annotations

import threading
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn.torch.internals import version_of
from polyattn.trace.recorders.torch.native_protocol import Event

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.device_rows import Rows
    from polyattn.trace.recorders.torch.trace_hook import TraceHook

__all__ = ["Call", "Lane", "Seen", "versions"]

Seen = tuple[Any, int, int, str | None]
"""As `native_protocol.SEEN` says."""

Given = list[tuple[str, Tensor, int]]


class Call:
    """A call that runs: its number and step, and whether the step is recorded.

    `given`: its tensors with their versions, to see which it changes.
    """

    __slots__ = ("compiled", "given", "hook", "number", "step", "wanted")

    def __init__(
        self, hook: TraceHook, number: int, step: int | None, wanted: bool, compiled: bool
    ) -> None:
        self.hook, self.number, self.step = hook, number, step
        self.wanted, self.compiled = wanted, compiled
        self.given: Given = []

    def changed(self) -> list[tuple[str, Tensor]]:
        """Those of its tensors that were changed in place since it began."""
        return [(at, t) for at, t, version in self.given if version_of(t) != version]


class Lane:
    """What one thread has recorded and not yet handed over."""

    __slots__ = ("calls", "events", "later", "lock", "rows", "seen", "since", "stack")

    def __init__(self) -> None:
        self.lock = threading.RLock()  # for the thread that flushes or closes: rows and events
        self.stack: list[Call] = []
        self.events: list[Event] = []
        self.later = False  # some of the events have to wait
        self.rows: dict[torch.device, Rows] = {}
        self.seen: dict[int, Seen] = {}
        self.since = monotonic()
        self.calls = 0


def versions(found: list[tuple[str, Any]]) -> Given:
    """Return the tensors that have a version, with it; subclasses may refuse to say it.

    >>> [version for _, _, version in versions([("args[0]", torch.ones(1)), ("args[1]", None)])]
    [0]
    """
    given: Given = []
    for at, t in found:
        try:
            if not t.is_inference():
                given.append((at, t, version_of(t)))
        except Exception:  # it is recorded as what cannot be read
            continue
    return given

"""Frames: the calls of modules that a trace's records describe, and which call ran inside which.

A frame is one call of one module, forward or backward. In the backward pass what comes in are the
gradients of the outputs and what goes out those of the inputs, so both directions are walked alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from polyattn.trace.format.record import Record

__all__ = ["Frame", "ancestors", "changed_in_place", "frames_of"]

_COMES_IN = ("in", "grad_out")
_SLIGHTLY = 1e-4


@dataclass(eq=False, slots=True)
class Frame:
    """One call: `ins` as seen before it, `outs` after it, `changed` arguments as it left those that
    it changed in place; `first` and `last` are places in time.
    """

    module: str
    cls: str
    call: int
    step: int | None
    rank: int
    backward: bool
    ins: list[Record] = field(default_factory=list)
    outs: list[Record] = field(default_factory=list)
    changed: list[Record] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0
    parent: Frame | None = None
    children: list[Frame] = field(default_factory=list)
    depth: int = 0

    @property
    def phase(self) -> str:
        """``forward`` or ``backward``."""
        return "backward" if self.backward else "forward"

    def within(self, other: Frame) -> bool:
        """Whether this call ran inside `other`."""
        at = self.parent
        while at is not None and at is not other:
            at = at.parent
        return at is other


def changed_in_place(record: Record) -> bool:
    """Whether a record is of an argument, as the call left it."""
    return record.phase == "out" and record.tensor.startswith(("args[", "kwargs"))


def ancestors(module: str) -> Iterator[str]:
    """Yield the names of the modules around one, from the nearest to the root, "".

    >>> list(ancestors("blocks.0.attn"))
    ['blocks.0', 'blocks', '']
    """
    while module:
        module = module.rpartition(".")[0]
        yield module


def frames_of(records: Sequence[Record]) -> list[Frame]:
    """Return the calls in the order in which they began, each with its parent and children."""
    found: dict[tuple[object, ...], Frame] = {}
    for record in records:
        if record.phase == "param":
            continue
        backward = record.phase.startswith("grad")
        key = (record.rank, record.module, record.call, record.step, backward)
        frame = found.get(key)
        if frame is None:
            frame = found[key] = Frame(
                record.module, record.cls, record.call, record.step, record.rank, backward
            )
            frame.first = record.seq
        frame.last = record.seq
        _place(frame, record).append(record)
    frames = list(found.values())
    _widen(frames)
    return _nest(frames)


def _place(frame: Frame, record: Record) -> list[Record]:
    if record.phase in _COMES_IN:
        return frame.ins
    return frame.changed if changed_in_place(record) else frame.outs


def _widen(frames: list[Frame]) -> None:
    """Where a call recorded only one side of itself, let it span the calls named below it."""
    for one_sided, ordered in (("ins", True), ("outs", False)):
        edge: dict[tuple[object, ...], float] = {}
        frames.sort(key=lambda frame: frame.last if ordered else -frame.first)
        for frame in frames:
            at = (frame.rank, frame.step, frame.backward)
            far = edge.pop((*at, frame.module), None)
            returned = getattr(frame, one_sided) or (frame.changed and not ordered)
            if far is not None and not returned:
                if ordered:
                    frame.first = min(frame.first, far - _SLIGHTLY)
                else:
                    frame.last = max(frame.last, far + _SLIGHTLY)
            own = frame.first if ordered else frame.last
            for above in ancestors(frame.module):
                known = edge.get((*at, above), own)
                edge[(*at, above)] = min(known, own) if ordered else max(known, own)


def _nest(frames: list[Frame]) -> list[Frame]:
    frames.sort(key=lambda frame: (frame.first, -frame.last))
    open_: dict[tuple[object, ...], list[Frame]] = {}
    for frame in frames:
        stack = open_.setdefault((frame.rank, frame.backward), [])
        while stack and stack[-1].last < frame.first:
            stack.pop()
        outer = (f for f in reversed(stack) if f.last >= frame.last)
        around = next((f for f in outer if f.ins or f.outs or f.changed), None)
        if around is not None:
            frame.parent, frame.depth = around, around.depth + 1
            around.children.append(frame)
        stack.append(frame)
    return frames

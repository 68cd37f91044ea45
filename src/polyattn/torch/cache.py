"""One key for a call, one table from keys to what runs: the cache in front of selection.

Eager calls, torch's signature and paged calls look here; the table is emptied as a whole when a
choice may change (`polyattn.selection.scopes.invalidate`) and when it is full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.masks import Dense
from polyattn.masks.biases import DenseBias
from polyattn.masks.simplify import simplify
from polyattn.problem import MaskFacts, Problem
from polyattn.selection import Selection, scopes
from polyattn.torch.keys import Key
from polyattn.torch.size_classes import size_class

__all__ = ["PLAIN", "Entry", "Row", "Table", "Wide", "resized", "table", "wide_of"]

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that the table holds; others take the long way each time."""

_MOST_ENTRIES = 4096
_MOST_ALIKE = 8
_MOST_PLAIN = 4


class Entry(NamedTuple):
    """What runs for tensors like those it was made with: ``check(q, k, v)`` says which those are.

    `operator`: what `run` is nothing but, where it is so (see `polyattn.backends.sdpa.torch`).
    """

    check: Callable[..., bool]
    run: Callable[..., Any]
    plan: Any
    operator: Any = None


class Wide(NamedTuple):
    """What runs for tensors of a class of sizes (see `polyattn.torch.size_classes`).

    ``check(q, k, v)`` compares all but batch and lengths; from `low` to `high` keys count.
    """

    check: Callable[..., bool]
    run: Callable[..., Any]
    plan: Any
    low: int
    high: int


class Row(NamedTuple):
    """The entries of one key: the newest laid open, and all of them by the shapes of q, k, v.

    `by_class`: those that serve classes of sizes, by
    :func:`polyattn.torch.size_classes.size_class`.
    """

    check: Callable[..., bool]
    run: Callable[..., Any]
    plan: Any
    by_shapes: dict[Any, tuple[Entry, ...]]
    by_class: dict[Any, tuple[Wide, ...]]


Bare = tuple[Callable[..., bool], Any, Any]
Plain = tuple[Callable[..., bool], Any, Any, bool, Any, tuple[Bare, ...]]


class Table:
    """From keys to entries; emptied when a choice may change, and when it is full.

    `rows`: by key. `plain`: by layout, the newest entry of the plainest calls (see
    :attr:`Key.is_plainest`) and the older ones, with the switches that they were chosen under.
    """

    def __init__(self) -> None:
        self.rows: dict[Any, Row] = {}
        self.plain: dict[str, Plain] = {}
        self.changed: Callable[[], None] = lambda: None  # called when rows have changed
        self._count = 0
        scopes.listeners.append(self.forget)

    @property
    def count(self) -> int:
        """How many entries there are."""
        return self._count

    def forget(self) -> None:
        """Empty the table."""
        self.rows.clear()
        self.plain.clear()
        self._count = 0
        self.changed()

    def find(self, key: Key | None, q: Tensor, k: Tensor, v: Tensor) -> Entry | Wide | None:
        """Return the entry of this key and these tensors, if there is one."""
        if key is None or (row := self.rows.get(key)) is None:
            return None
        try:
            shapes = q.shape, k.shape, v.shape
        except (AttributeError, RuntimeError):  # no tensors, or nested ones
            return None
        alike = row.by_shapes.get(shapes, ())
        exact = next((entry for entry in alike if entry.check(q, k, v)), None)
        return exact or wide_of(row, key.layout, q, k, v)

    def add(
        self,
        key: Key | None,
        entry: Entry,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        epoch: str,
        wide: Wide | None = None,
    ) -> None:
        """Remember an entry as the newest of its key, unless its `epoch` has passed.

        `wide`: what also serves the other sizes of its class.
        """
        if key is None or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
            return
        with scopes.lock:
            if epoch != scopes.state.epoch:
                return
            if self._count >= _MOST_ENTRIES:
                self.forget()
            known = self.rows.get(key)
            by_shapes, by_class = ({}, {}) if known is None else (known.by_shapes, known.by_class)
            shapes = q.shape, k.shape, v.shape
            by_shapes[shapes] = (entry, *by_shapes.get(shapes, ()))[:_MOST_ALIKE]
            self._count += 1
            kind = None if wide is None else size_class(key.layout, *shapes)
            if wide is not None and kind is not None:
                by_class[kind] = (wide, *by_class.get(kind, ()))[:_MOST_ALIKE]
                self._count += 1
            self.rows[key] = Row(entry.check, entry.run, entry.plan, by_shapes, by_class)
            if key.is_plainest:
                self._add_plain(key, entry)
            self.changed()

    def _add_plain(self, key: Key, entry: Entry) -> None:
        older: tuple[Bare, ...] = ()
        known = self.plain.get(key.layout)
        if known is not None and known[3:5] == (key.determined, key.environ):
            older = (known[:3], *known[5])[:_MOST_PLAIN]
        self.plain[key.layout] = (
            entry.check, entry.run, entry.operator, key.determined, key.environ, older,
        )  # fmt: skip


def wide_of(row: Row, layout: str, q: Tensor, k: Tensor, v: Tensor) -> Wide | None:
    """Return the entry of a row that serves the class of sizes of these tensors."""
    if not row.by_class or (kind := size_class(layout, q.shape, k.shape, v.shape)) is None:
        return None
    keys = k.shape[1 if layout == "BTNH" else 2]
    for wide in row.by_class.get(kind, ()):
        if wide.low <= keys <= wide.high and wide.check(q, k, v):
            return wide
    return None


def resized(selection: Selection, q: Tensor, k: Tensor, mask: Any, bias: Any = None) -> Selection:
    """Return the selection of a class as that of one call, with the call's own sizes.

    `mask`: of the call, or the array of torch's signature. Copied field by field, since recorders
    ask for it at each call: :func:`dataclasses.replace` takes ten times as long.
    """
    found: Selection = object.__new__(Selection)
    found.__dict__.update(selection.__dict__, of_class=selection)
    if (known := selection.problem) is None:
        return found
    problem: Problem = object.__new__(Problem)
    facts = problem.__dict__
    facts.update(known.__dict__)
    row = 1 if known.layout == "BTNH" else 2
    facts["batch"], facts["q_len"], facts["kv_len"] = q.shape[0], q.shape[row], k.shape[row]
    if isinstance(mask, Tensor):
        mask, bias = (Dense(mask), None) if mask.dtype == torch.bool else (None, DenseBias(mask))
    if mask is not None and not mask.is_static:
        facts["mask"] = MaskFacts.of(simplify(mask, problem.q_len, problem.kv_len))
    if bias is not None:
        facts["bias"] = bias.signature
    found.__dict__["problem"] = problem
    return found


table = Table()
"""The table of this process."""

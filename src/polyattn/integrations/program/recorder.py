"""The listener that keeps what one process asks of attention."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyattn.integrations.arrays_as_text import take
from polyattn.integrations.program.asked import Case, Passed, Ran, Record, Unseen
from polyattn.integrations.program.fragments import MOST_CASES_OF_A_CLASS, of_ledger
from polyattn.integrations.program.ledger import Ledger, RanOn
from polyattn.integrations.sdpa_patch import SdpaCall
from polyattn.problem import Problem
from polyattn.selection import Rejected, Selection
from polyattn.torch.cache import resized
from polyattn.tuning.lookup import problem_class

__all__ = ["Recorder"]

_MOST_HEARD = 4096
_MOST_SHAPES = 64


@dataclass
class _Heard:
    """A selection, which is kept so that its identity tells it, and the cases of its class.

    `cases`: the place of each; `counted`: the place of the count of each, on what this ran on.
    """

    selection: Selection
    ran: Ran
    cases: dict[Any, int]
    counted: dict[int, int] = field(default_factory=dict)


class Recorder:
    """A listener of :class:`~polyattn.integrations.sdpa_patch.route_sdpa` that keeps it all.

    Of each class of problems the first few cases are kept as they were; calls of further ones
    are counted to the last of them, so that a growing cache of keys does not grow the record.
    `ledger`: where it is written down; in memory, for :meth:`record`, if there is none.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.begin(ledger or Ledger())

    def begin(self, ledger: Ledger) -> None:
        """Begin anew with another ledger, as a fork does: what was heard is its parent's."""
        self._ledger = ledger
        self._of_class: dict[str, dict[Any, int]] = {}
        self._heard: dict[int, _Heard] = {}
        self._places: dict[Any, int] = {}
        self._shapes: Counter[str] = Counter()
        self._lock = threading.Lock()  # the parent's may be held by a thread that is not here

    def ran(self, selection: Selection, call: SdpaCall | None) -> None:
        """Count a call, and keep its arrays' facts if it is of a new kind."""
        problem = selection.problem
        if problem is not None:
            sizes = problem.batch, problem.q_len, problem.kv_len
            self._count(selection.of_class or selection, sizes, call, lambda: problem)

    def ran_of_class(self, selection: Selection, call: SdpaCall) -> None:
        """Count a call whose sizes its arrays say."""
        query, key = call.query.shape, call.key.shape

        def problem() -> Problem:
            own = resized(selection, call.query, call.key, call.attn_mask).problem
            assert own is not None
            return own

        if selection.problem is not None:
            self._count(selection, (query[0], query[2], key[2]), call, problem)

    def _count(
        self, chosen: Selection, sizes: Any, call: SdpaCall | None, problem: Callable[[], Problem]
    ) -> None:
        strides, needs_grad = _strides(call), _needs_grad(call)
        key = *sizes, strides, needs_grad
        with self._lock:
            heard = self._heard.get(id(chosen)) or self._hear(chosen)
            case = heard.cases.get(key)
            if case is None and len(heard.cases) >= MOST_CASES_OF_A_CLASS:
                case = next(reversed(heard.cases.values()))
            elif case is None:
                mask = call.attn_mask if call is not None else None
                stored = take(mask) if isinstance(mask, Tensor) else None
                entry = Case(problem(), strides, needs_grad, stored, refused=_refused(chosen))
                case = heard.cases[key] = self._ledger.add(entry)
            place = heard.counted.get(case)
            if place is None:
                place = heard.counted[case] = self._place(RanOn(case, heard.ran))
            self._ledger.counts[place] += 1

    def _hear(self, selection: Selection) -> _Heard:
        """Return what is known of the calls of a selection, for further ones to be quick."""
        assert selection.problem is not None
        if len(self._heard) >= _MOST_HEARD:
            self._heard.clear()
        cases = self._of_class.setdefault(problem_class(selection.problem), {})
        ran = Ran(
            selection.backend,
            selection.version,
            str(selection.source),
            selection.reason,
            selection.fallback,
        )
        heard = self._heard[id(selection)] = _Heard(selection, ran, cases)
        return heard

    def _place(self, entry: RanOn | Passed | Unseen) -> int:
        """Return the place at which an entry is counted, the same for equal ones."""
        place = self._places.get(entry)
        if place is None:
            place = self._places[entry] = self._ledger.add(entry)
        return place

    def passed(self, reason: str, call: SdpaCall | None) -> None:
        """Count a call that came to no backend; of many shapes, the first ones are told apart."""
        shapes = [] if call is None else [str(tuple(getattr(x, "shape", "?"))) for x in call[:3]]
        entry = Passed(reason, ", ".join(shapes), 0)
        with self._lock:
            if entry not in self._places:
                self._shapes[reason] += 1
                if self._shapes[reason] > _MOST_SHAPES:
                    entry = Passed(reason, "of further shapes", 0)
            self._ledger.count(self._place(entry))

    def unseen(self, what: str, why: str) -> None:
        """Note something that is out of sight."""
        with self._lock:
            self._ledger.count(self._place(Unseen(what, why)))

    def record(self, program: Sequence[str] = ()) -> Record:
        """Return what was heard so far, if the ledger is in memory."""
        with self._lock:
            return of_ledger(self._ledger, program)


def _refused(selection: Selection) -> dict[str, str]:
    decisions = selection.decisions.items()
    return {name: str(one) for name, one in decisions if isinstance(one, Rejected)}


def _strides(call: SdpaCall | None) -> tuple[tuple[int, ...], ...] | None:
    if call is None:
        return None
    return call.query.stride(), call.key.stride(), call.value.stride()


def _needs_grad(call: SdpaCall | None) -> tuple[bool, ...]:
    if call is None or not torch.is_grad_enabled():
        return (False, False, False)
    return tuple(x.requires_grad for x in call[:3])

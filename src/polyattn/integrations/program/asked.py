"""What a program asked of attention, as values: its problems, and what they ran on, and where."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from polyattn.integrations.arrays_as_text import StoredArray
from polyattn.problem import Problem
from polyattn.tuning.lookup import problem_class

__all__ = ["Case", "Gain", "Passed", "Process", "Ran", "Record", "Unseen"]


@dataclass(frozen=True)
class Ran:
    """What a call ran on, and why; `process` is a place in the record's processes."""

    backend: str
    version: str
    source: str
    reason: str
    fallback: str | None = None
    process: int = 0


@dataclass
class Case:
    """One problem that a program really had, and what is needed to have it again.

    `strides` of query, key and value (None where the arrays were not seen: compiled code),
    `needs_grad` of the three, and the mask or bias as it was passed. `refused`: the backends that
    could not run it, each with its reasons.
    """

    problem: Problem
    strides: tuple[tuple[int, ...], ...] | None
    needs_grad: tuple[bool, ...]
    attn_mask: StoredArray | None
    calls: int = 0
    ran: Counter[Ran] = field(default_factory=Counter)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def problem_class(self) -> str:
        """The class under which times are stored."""
        return problem_class(self.problem)

    @property
    def same(self) -> tuple[object, ...]:
        """What two cases have in common that one measurement stands for."""
        return self.problem, self.strides, self.needs_grad, self.attn_mask


@dataclass(frozen=True)
class Passed:
    """Calls that did not come to a backend of polyattn."""

    reason: str
    shapes: str
    calls: int
    process: int = 0


@dataclass(frozen=True)
class Process:
    """One process of the program that had torch, and so was reached.

    `group` is shared by those that do the same, as "rank" or "DataLoader worker". `state`:
    ``ended``, ``running`` (when the record was made), or ``cut short``: by a signal, a crash or an
    exec.
    `threads`: those of torch when the process was first heard of.
    """

    name: str
    group: str
    pid: int
    parent: int
    state: str = "ended"
    threads: int | None = None


@dataclass(frozen=True)
class Unseen:
    """Something of the program that is known to be out of sight, and why; its calls are unknown."""

    what: str
    why: str
    times: int = 1
    process: int | None = None


@dataclass(frozen=True)
class Gain:
    """A case measured here: seconds of a call, one for each round, as it ran and with stock torch.

    The rounds of both are paired. `note` says why there are no times, where there are none.
    `foreign`: the largest share of the cores that other processes took meanwhile.
    """

    case: int
    backend: str
    seconds: tuple[float, ...] = ()
    stock_seconds: tuple[float, ...] = ()
    threads: int | None = None
    foreign: float = 0.0
    note: str = ""


@dataclass
class Record:
    """Everything that was heard of one run of a program."""

    cases: list[Case]
    passed: list[Passed]
    program: tuple[str, ...] = ()
    processes: list[Process] = field(default_factory=list)
    unseen: list[Unseen] = field(default_factory=list)
    gains: list[Gain] = field(default_factory=list)
    machine: str = ""

    @property
    def calls(self) -> int:
        """All calls, those that came to no backend included."""
        return sum(c.calls for c in self.cases) + sum(p.calls for p in self.passed)

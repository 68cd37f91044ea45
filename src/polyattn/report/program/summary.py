"""A record in groups: what ran where and why, kinds of processes, kinds of problems."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from polyattn.integrations.program.asked import Case, Gain, Process, Record
from polyattn.problem import Problem
from polyattn.report.kit.quantities import plural

__all__ = [
    "Group",
    "ProblemClass",
    "Reason",
    "classes",
    "cut_short",
    "groups",
    "process_of",
    "reasons",
    "short",
]


@dataclass(frozen=True)
class Reason:
    """One reason, the backend that it led to ("" if none was reached), and its calls."""

    backend: str
    version: str
    source: str
    why: str
    calls: int
    processes: tuple[int, ...] = ()


@dataclass
class Group:
    """Processes that do the same: how many there are, and their calls by backend ("": none)."""

    name: str
    processes: list[int] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        count = len(self.processes)
        if self.name in ("rank", "DataLoader worker"):
            return plural(count, self.name)
        return self.name if count == 1 else f"{count} x {self.name}"


@dataclass
class ProblemClass:
    """Cases that a choice counts for alike."""

    cases: list[Case]
    gain: Gain | None = None

    @property
    def calls(self) -> int:
        """The calls of all its cases."""
        return sum(case.calls for case in self.cases)

    @property
    def backends(self) -> Counter[str]:
        """Its calls by backend."""
        found: Counter[str] = Counter()
        for case in self.cases:
            for ran, calls in case.ran.items():
                found[ran.backend] += calls
        return found


def reasons(record: Record) -> list[Reason]:
    """Return what calls ran on with each reason once, the most frequent first."""
    found: dict[tuple[str, str, str, str], Counter[int]] = defaultdict(Counter)
    for case in record.cases:
        for ran, calls in case.ran.items():
            fell = f"; instead of what was asked for: {ran.fallback}" if ran.fallback else ""
            key = ran.backend, ran.version, ran.source, ran.reason + fell
            found[key][ran.process] += calls
    shapes: dict[str, str] = {}
    for one in record.passed:
        shapes.setdefault(one.reason, one.shapes)
        found["", "", "", one.reason][one.process] += one.calls
    made = [
        Reason(*key[:3], _with_shapes(key[3], "" if key[0] else shapes[key[3]]),
               calls.total(), tuple(sorted(calls)))
        for key, calls in found.items()
    ]  # fmt: skip
    return sorted(made, key=lambda one: -one.calls)


def _with_shapes(why: str, shapes: str) -> str:
    return f"{why}; first of shapes {shapes}" if shapes else why


def groups(record: Record) -> list[Group]:
    """Return the kinds of processes, those with the most calls first."""
    found: dict[str, Group] = {}
    for at, process in enumerate(record.processes):
        found.setdefault(process.group, Group(process.group)).processes.append(at)
    for at, backend, calls in _counted(record):
        if at < len(record.processes):
            found[record.processes[at].group].calls[backend] += calls
    return sorted(found.values(), key=lambda group: -group.calls.total())


def process_of(record: Record, at: int) -> Counter[str]:
    """Return the calls of one process by backend ("": none)."""
    found: Counter[str] = Counter()
    for place, backend, calls in _counted(record):
        if place == at:
            found[backend] += calls
    return found


def _counted(record: Record) -> Iterator[tuple[int, str, int]]:
    for case in record.cases:
        for ran, calls in case.ran.items():
            yield ran.process, ran.backend, calls
    for one in record.passed:
        yield one.process, "", one.calls


def classes(record: Record) -> list[ProblemClass]:
    """Return the kinds of problems, those with the most calls first."""
    found: dict[str, ProblemClass] = {}
    place = {id(case): at for at, case in enumerate(record.cases)}
    gains = {gain.case: gain for gain in record.gains}
    for case in record.cases:
        one = found.setdefault(case.problem_class, ProblemClass([]))
        one.cases.append(case)
        if place[id(case)] in gains:
            one.gain = gains[place[id(case)]]
    return sorted(found.values(), key=lambda one: -one.calls)


def cut_short(record: Record) -> list[Process]:
    """Return the processes that did not end by themselves."""
    return [one for one in record.processes if one.state == "cut short"]


def short(problem: Problem) -> str:
    """Return a problem in a line: B T S N K H as everywhere, then its other facts.

    >>> short(Problem(batch=1, q_len=9, kv_len=9, heads=4, kv_heads=2, head_dim=64))
    'B=1 T=S=9 N=4 K=2 H=64 BTNH, float32, cpu'
    """
    p = problem
    lengths = f"T=S={p.q_len}" if p.q_len == p.kv_len else f"T={p.q_len} S={p.kv_len}"
    heads = f"N={p.heads}" if p.heads == p.kv_heads else f"N={p.heads} K={p.kv_heads}"
    dims = f"H={p.head_dim}" if p.head_dim == p.value_dim else f"H={p.head_dim} V={p.value_dim}"
    others = str(p).removeprefix(f"{p.shapes}, ")
    if p.compiled:  # a compiler's choice is for all sizes of a class, and one stands for them
        others = others.replace("compiled=True", "compiled, of sizes alike")
    batch = "packed" if p.layout == "packed" else f"B={p.batch}"
    layout = " BTNH" if p.layout == "BTNH" else ""  # torch's own function has the other one
    return f"{batch} {lengths} {heads} {dims}{layout}, {others}"

"""Random programs of scopes of torch's knobs: nested, raising, in several threads, all repeatable.

A program runs in one to four threads, of which one moves at a time: a seeded schedule says which,
so that a seed reproduces a failure.
Beside scopes it assigns knobs directly, names what cannot be set,
and contradicts itself. What it must leave behind is known beforehand: everything as it was, but for
the knobs that were assigned directly and that no scope names.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polyattn.errors import FlagsError
from polyattn.flags.cells import Access, Cell
from polyattn.torch.flags import diff, flags, snapshot, table
from polyattn.torch.flags.float32 import CELLS
from polyattn.torch.flags.state import THREADS
from polyattn.torch.flags.tables import accesses

FLOAT32 = (
    "float32_matmul_precision", "cudnn.allow_tf32",
    *(f"cuda.{kind}" for kind in ("all", "matmul", "conv", "rnn")),
    *(f"mkldnn.{kind}" for kind in ("all", "matmul", "conv", "rnn")),
    "generic.all",
)  # fmt: skip
"""All pieces of state behind the float32 knobs, by their names in ``CELLS``."""

Chance = random.Random
Values = dict[str, tuple[Any, ...]]


class PlannedError(Exception):
    """What a program raises on purpose."""


RAISED = (PlannedError, KeyboardInterrupt, RuntimeError, SystemExit)


def settable(*, possible: bool = True) -> Values:
    """The values to try for each knob that this build lets us set.

    `possible`: without those that torch's setter refuses on this machine.
    """
    found: Values = {}
    for row in table():
        one = accesses()[row.name]
        if row.knob.kind != "knob" or not row.settable or one.write is None:
            continue
        if row.name == "cuda.sdp_priority":
            found[row.name] = (["math"], ["cudnn", "flash"], ["efficient", "math", "flash"])
        elif isinstance(row.knob.allowed, tuple) and row.knob.allowed:
            found[row.name] = tuple(v for v in row.knob.allowed if not one.lacks(v))
        elif row.knob.type == "int":
            found[row.name] = (1, 2, 3)
        else:
            raise AssertionError(f"no values to try for {row.name}; add some here")
        if possible:
            found[row.name] = tuple(v for v in found[row.name] if _possible(row.name, v))
    return found


def _possible(name: str, value: Any) -> bool:
    try:
        with flags({name: value}):
            return True
    except FlagsError as error:  # float16 sums without such a CPU; Inductor's switch before 2.10
        return "by the CPU" not in str(error) and "_inductor" not in str(error)


def families(values: Values) -> list[list[str]]:
    """The knobs that share state with others, or depend on each other's value, grouped."""
    precisions = [
        name for name in values if any(c.owner is CELLS for c in accesses()[name].touches)
    ]
    sums = ("cuda.matmul.allow_fp16", "cuda.matmul.allow_bf16")
    stems = ("deterministic", "opt_einsum", "_inductor", *sums)
    others = [[name for name in values if name.startswith(stem)] for stem in stems]
    return [precisions, precisions, precisions, *(family for family in others if family)]


def plain(value: Any) -> Any:
    """``initial`` cannot be stored again; what can be put back for it is what reads the same."""
    return "tf32" if value == "initial" else value


def hidden() -> dict[str, Any]:
    """The state behind the float32 knobs, which readings show only in part."""
    return {name: plain(value) for name, value in CELLS.read(FLOAT32).items()}


def stand(*, later: bool = False) -> dict[str, Any]:
    """Everything that a program must leave as it was, as the calling thread sees it."""
    found = {"snapshot": snapshot(), "hidden": hidden()}
    if later:  # takes a thread to find out
        found["threads that start later"] = THREADS.read(["later"])
    return found


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What differs between two of :func:`stand`."""
    found = diff(before["snapshot"], after["snapshot"])
    for part in before.keys() - {"snapshot"}:
        for name, value in before[part].items():
            if value != after[part][name]:
                found[f"{part}: {name}"] = (value, after[part][name])
    return found


class Worker:
    """A thread that does one job at a time and lives as long as the test."""

    def __init__(self, number: int) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        name = f"program-{number}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while job := self._jobs.get():
            try:
                self._done.put((job(), None))
            except BaseException as error:
                self._done.put((None, error))

    def do(self, call: Callable[[], Any]) -> Any:
        """Return what `call` returns in this worker's thread."""
        self._jobs.put(call)
        value, error = self._done.get(timeout=60)
        if error is not None:
            raise error
        return value

    def end(self) -> None:
        """Let the thread end."""
        self._jobs.put(None)
        self.thread.join(timeout=60)


class Program:
    """One random program, by its seed."""

    def __init__(self, seed: int, values: Values) -> None:
        self.chance = Chance(seed)
        self.threads = self.chance.randint(2, 4) if self.chance.random() < 0.25 else 0
        self.values = dict(values)
        self._families = families(self.values)
        self.counts = dict.fromkeys(("scopes", "refused", "raised", "assigned", "named"), 0)
        self.slow = self.chance.random() < 0.05  # num_threads needs new threads to be restored
        self.free = self._free() if self.chance.random() < 0.3 else {}
        held = {cell for cells in self.free.values() for cell in cells}
        self._names = [
            name
            for name in self.values
            if not held & set(accesses()[name].touches) and (self.slow or name != "num_threads")
        ]

    def _free(self) -> dict[str, tuple[Cell, ...]]:
        """Choose knobs that are assigned directly and that no scope will name."""
        names = self.chance.sample(sorted(self.values), self.chance.randint(1, 3))
        touched = {name: accesses()[name].touches for name in names}
        return {  # what belongs to a thread, only that thread could put back
            name: cells for name, cells in touched.items() if not any(c.per_thread for c in cells)
        }

    def some_changes(self) -> dict[str, Any]:
        """Random values for a few random knobs; knobs that share state come often."""
        if self.chance.random() < 0.6:
            family = [n for n in self.chance.choice(self._families) if n in self._names]
        else:
            family = self._names
        names = self.chance.sample(family, min(len(family), self.chance.choice((1, 1, 2, 3, 5))))
        return {name: self.chance.choice(self.values[name]) for name in names}

    def steps(self, depth: int = 0) -> Iterator[None]:
        """One thread's part: a generator that stops wherever another thread may go on."""
        for _ in range(self.chance.randint(1, 3)):
            act = self.chance.random()
            if act < 0.15:
                self._refused()
            elif act < 0.3 and self.free:
                self._assign(self.chance.choice(sorted(self.free)))
            elif act < 0.36 and depth:
                self.counts["raised"] += 1
                raise self.chance.choice(RAISED)("planned")
            elif depth < 4:
                yield from self._scope(depth)
            yield

    def _scope(self, depth: int) -> Iterator[None]:
        changes = self.some_changes()
        catches = self.chance.random() < 0.4
        before = stand() if len(changes) > 1 else None  # one alone is not refused
        try:
            scope = flags(changes, on_conflict="allow").__enter__()
        except FlagsError as error:
            alone = len(changes) < 2 and not any(map(_depends, changes))
            assert not alone, f"{changes} alone was refused: {error}"
            self.counts["refused"] += 1
            if before is not None:
                left = difference(before, stand())
                assert not left, f"{changes} was refused and changed {left}"
            return
        self.counts["scopes"] += 1
        try:
            with _Entered(scope):
                yield
                if changes and self.chance.random() < 0.2:
                    self._assign(self.chance.choice(sorted(changes)), named=True)
                yield from self.steps(depth + 1)
        except RAISED as error:
            if not catches or "planned" not in str(error):
                raise

    def _assign(self, name: str, *, named: bool = False) -> None:
        """Set a knob as a program without polyattn would."""
        one = accesses()[name]
        if one.write is None or (name == "num_threads" and not self.slow):
            return
        value = self.chance.choice(self.values[name])
        try:
            one.write(one.convert(value))
        except RuntimeError:  # torch refuses some pairs, such as splits off with reductions on
            return
        self.counts["named" if named else "assigned"] += 1

    def _refused(self) -> None:
        """Name what cannot be set, beside what can: nothing may change."""
        wrong = self.chance.choice(
            [
                ("cudnn.benchmrk", True),
                ("cudnn.benchmark", 1),
                ("cuda.is_built", True),
                ("float32_matmul_precision", "low"),
                ("num_threads", 0),
                ("mkl.verbose", 1),
                ("cuda.sdp_priority", ["flash", "flash"]),
                ("default_dtype", "int8"),
            ]
        )
        pairs = [*(p for p in self.some_changes().items() if p[0] != wrong[0]), wrong]
        self.chance.shuffle(pairs)
        before = stand()
        try:
            flags(dict(pairs)).__enter__()
        except FlagsError:
            self.counts["refused"] += 1
            assert not difference(before, stand()), f"{pairs} changed something"
        else:
            raise AssertionError(f"{pairs} was not refused")


def _depends(name: str) -> bool:
    """Torch refuses to keep reductions in 16 bits without splits, so it matters which are on."""
    return name.endswith("_split_k")


class _Entered:
    """A scope that was entered already."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> Any:
        return self._scope.__exit__(*error)


def run(seed: int, values: Values, workers: list[Worker]) -> dict[str, int]:
    """Run the program of a seed; AssertionError if it leaves anything changed."""
    program = Program(seed, values)
    chance = program.chance
    cast = chance.sample(workers, program.threads)
    before, theirs = stand(later=program.slow), [worker.do(stand) for worker in cast]
    stored = _read_free(program)
    if cast:
        _interleave([(worker, program.steps()) for worker in cast], chance)
    else:
        _exhaust(program.steps())
    _put_free(stored)
    left = difference(before, stand(later=program.slow))
    assert not left, f"seed {seed}: {left}"
    for worker, was in zip(cast, theirs, strict=True):
        left = difference(was, worker.do(stand))
        assert not left, f"seed {seed}, in {worker.thread.name}: {left}"
    return program.counts


def _read_free(program: Program) -> dict[Cell, Any]:
    cells = dict.fromkeys(cell for cells in program.free.values() for cell in cells)
    return {cell: cell.owner.read([cell.name])[cell.name] for cell in cells}


def _put_free(stored: dict[Cell, Any]) -> None:
    """Put back what was assigned directly, all of an owner's cells at once."""
    for owner in {cell.owner for cell in stored}:
        owner.write({cell.name: v for cell, v in stored.items() if cell.owner is owner})


def _exhaust(steps: Iterator[None]) -> None:
    try:
        for _ in steps:
            pass
    except RAISED as error:
        if "planned" not in str(error):
            raise


def _step(steps: Iterator[None]) -> bool:
    """Go one step; return whether there may be another."""
    try:
        next(steps)
    except StopIteration:
        return False
    except RAISED as error:
        if "planned" not in str(error):
            raise
        return False
    return True


def _interleave(parts: list[tuple[Worker, Iterator[None]]], chance: Chance) -> None:
    alive = list(parts)
    while alive:
        worker, steps = part = chance.choice(alive)
        if not worker.do(lambda steps=steps: _step(steps)):
            alive.remove(part)


@contextmanager
def kept() -> Iterator[None]:
    """Put all state of this thread back at the end, with torch's setters and not by a scope."""
    here = [one for one in accesses().values() if not one.lacks()]
    cells = dict.fromkeys(cell for one in here for cell in one.touches)
    stored = {cell: cell.owner.read([cell.name])[cell.name] for cell in cells}
    try:
        yield
    finally:
        _put_free(stored)


def some_state(chance: Chance, values: Values, *, precisions: bool = True) -> None:
    """Leave torch in a random state, also such that its own old getters raise."""
    if precisions:
        _store_precisions(chance)
    for name, choices in values.items():
        one: Access = accesses()[name]
        precision = any(cell.owner is CELLS for cell in one.touches)
        if not precision and name != "num_threads" and chance.random() < 0.5 and one.write:
            try:
                one.write(one.convert(chance.choice(choices)))
            except RuntimeError:
                continue


def _store_precisions(chance: Chance) -> None:
    stored: dict[str, Any] = {
        "float32_matmul_precision": chance.choice(("highest", "high", "medium")),
        "cudnn.allow_tf32": chance.random() < 0.5,
    }
    for name in FLOAT32[2:]:
        kinds = (
            ("none", "ieee", "tf32")
            if name.startswith("cuda")
            else ("none", "ieee", "tf32", "bf16")
        )
        stored[name] = (
            "none" if name.endswith(".all") and chance.random() < 0.5 else chance.choice(kinds)
        )
    torch._C._set_float32_matmul_precision(stored["float32_matmul_precision"])
    torch._C._set_cudnn_allow_tf32(stored["cudnn.allow_tf32"])
    for name in FLOAT32[2:]:
        torch._C._set_fp32_precision_setter(*name.split("."), stored[name])

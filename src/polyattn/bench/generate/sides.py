"""The processes of the sides, and the turns that they take."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from polyattn.bench.generate.worker import READY, Answers, Job, Turn, work
from polyattn.bench.timing import Watch
from polyattn.errors import PolyattnError

__all__ = ["Generated", "SideFailed", "Sides"]

_ENDS_WITHIN_S = 5.0


class SideFailed(PolyattnError):
    """A side could not generate: which one, and why."""

    def __init__(self, side: str, why: str) -> None:
        super().__init__(f"{side}: {why}")
        self.side, self.why = side, why


@dataclass(frozen=True)
class Generated:
    """What was measured of a row: turns of each side (the prefill first), and what it computed.

    `foreign`: the share of all cores that other processes took meanwhile.
    """

    turns: Mapping[str, list[Turn]]
    answers: Mapping[str, Answers]
    foreign: float


class Sides:
    """One process a side, from ``with`` to its end; whatever happens, none is left."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._pipes: dict[str, Any] = {}
        self._processes: list[Any] = []

    def __enter__(self) -> Sides:
        context = multiprocessing.get_context("spawn")
        for name in self.names:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=work,
                args=(name, theirs),
                name=f"polyattn bench generate: {name}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes[name] = ours
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes.values():
            pipe.close()  # upon which an idle one ends by itself
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join(_ENDS_WITHIN_S)
            if process.is_alive():
                process.kill()
                process.join()

    def generate(self, job: Job, names: Sequence[str]) -> Generated:
        """Let the named sides generate, a block each in turn; who begins changes from turn to turn.

        Raises SideFailed with the trace where one fails; the sides are of no more use then.
        """
        names = tuple(names)
        for name in names:
            self._send(name, job)
        for name in names:  # all models are made before the first is timed
            self._answer(name, job, str, READY)
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        answers: dict[str, Answers] = {}
        watch, begin = Watch(), time.perf_counter()
        for number in range(1 + -(-(job.tokens - 1) // job.block)):
            first = number % len(names)
            for name in (*names[first:], *names[:first]):
                self._send(name, "go")
                turns[name].append(self._answer(name, job, Turn))
        used = sum(turn.processor for of_side in turns.values() for turn in of_side)
        cores = (os.cpu_count() or 1) * (time.perf_counter() - begin)
        foreign = max(0.0, watch.foreign() - used / cores)
        for name in names:
            self._send(name, "go")
            answers[name] = self._answer(name, job, Answers)
        return Generated(turns, answers, foreign)

    def _send(self, name: str, what: Any) -> None:
        try:
            self._pipes[name].send(what)
        except OSError as error:
            raise SideFailed(name, f"its process has ended: {error}") from error

    def _answer(self, name: str, job: Job, kind: type[Any], exactly: Any = None) -> Any:
        try:
            answer = self._pipes[name].recv()
        except (EOFError, OSError) as error:
            raise SideFailed(name, "its process has ended; was it killed for memory?") from error
        if not isinstance(answer, kind) or (exactly is not None and answer != exactly):
            raise SideFailed(name, str(answer))
        return answer

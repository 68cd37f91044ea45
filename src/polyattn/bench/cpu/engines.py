"""Engines of others, each in a process and an environment of its own.

A checkout holds them (``benchmarks/peers``), ``scripts/peers`` makes their environments. A process
gets the arrays of a case as files, answers with its result, which is checked as ours is, and then
takes its turns: it times a block of calls by itself, while all others wait. In between it is
stopped: threads of many engines spin for a while when they have nothing to do.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import WINDOW
from polyattn.bench.cpu.room import ENGINE, lacking
from polyattn.bench.cpu.ways import Unable, Way
from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["Engines", "chosen_engines", "known_engines"]

ROOT = Path(__file__).resolve().parents[4]
PEERS = ROOT / "benchmarks" / "peers"
_PREPARE_S = 300.0
_END_S = 5.0


def known_engines() -> list[str]:
    """Return the names of the engines that the checkout knows."""
    return sorted(path.stem for path in (PEERS / "requirements").glob("*.txt"))


def chosen_engines(text: str) -> tuple[str, ...]:
    """Return the engines of "all" or of names joined by commas."""
    if not PEERS.is_dir():
        raise MissingDependency(
            f"got `bench cpu --peers {text}` from an installed package, expected a checkout of the "
            "project, whose benchmarks/peers holds the engines; `--peers` alone runs here."
        )
    names = known_engines() if text == "all" else text.split(",")
    if unknown := set(names) - set(known_engines()):
        raise PolyattnError(
            f"got --peers {','.join(sorted(unknown))}, expected all or some of "
            f"{', '.join(known_engines())}, joined by commas."
        )
    return tuple(names)


class _Ended(Exception):
    """The process of an engine is gone; the text says how."""


class _Engine:
    """The process of one engine; it starts when it is first needed, and anew where it crashed."""

    def __init__(self, name: str, threads: int) -> None:
        self.name, self.threads = name, threads
        self.process: subprocess.Popen[str] | None = None

    def about(self) -> dict[str, Any]:
        """Return its versions, or why it cannot run here."""
        try:
            return self._ask({"do": "about"}, _PREPARE_S)
        except _Ended as error:
            return {"unable": str(error)}

    def way(self, inputs: Inputs, files: dict[str, str], folder: Path) -> Way | Unable:
        """Get a case ready."""
        case, answer = inputs.case, folder / f"{self.name}.npy"
        told = {
            "do": "prepare", "files": files, "answer": str(answer), "dtype": case.dtype,
            "layout": case.layout, "mask": case.mask, "window": WINDOW, "threads": self.threads,
        }  # fmt: skip
        try:
            found = self._ask(told, _PREPARE_S)
        except _Ended as error:
            return Unable(self.name, str(error))
        if "unable" in found:
            return Unable(self.name, found["unable"])
        made = (("prepare", float(found["prepare_s"])),)
        return Way(self.name, lambda q, k, v: _tensor(answer, q), prepare_s=made, timed=self.timed)

    def timed(self, calls: int) -> tuple[float, float]:
        """Return the seconds and the processor time of so many calls."""
        try:
            found = self._ask({"do": "run", "calls": calls}, None)
        except _Ended as error:
            raise PolyattnError(f"{self.name} ended between two calls: {error}") from None
        if "unable" in found:
            raise PolyattnError(f"{self.name} failed between two calls: {found['unable']}")
        return float(found["seconds"]), float(found["processor"])

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            python = ROOT / ".peers" / self.name / "bin" / "python"
            if not python.exists():
                raise _Ended(f"not installed; scripts/peers {self.name}")
            worker = PEERS / "polyattn_peers" / "worker.py"
            self.process = subprocess.Popen(
                [str(python), str(worker), self.name, str(self.threads)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                start_new_session=True,  # an interrupt is for this process, which ends its own
            )  # fmt: skip
            if hasattr(os, "sched_setaffinity"):  # Linux
                here = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(self.process.pid, here[: self.threads])
        return self.process

    def _ask(self, message: dict[str, Any], limit_s: float | None) -> dict[str, Any]:
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.send_signal(signal.SIGCONT)
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise _Ended(self._how()) from None
        if not select.select([process.stdout], [], [], limit_s)[0]:
            self.end()
            raise _Ended(f"took longer than {limit_s:.0f} s")
        line = process.stdout.readline()
        if not line:
            raise _Ended(self._how())
        process.send_signal(signal.SIGSTOP)
        found: dict[str, Any] = json.loads(line)
        return found

    def _how(self) -> str:
        assert self.process is not None
        code = self.process.wait(_END_S)
        self.end()
        if code < 0:
            return f"its process crashed ({signal.Signals(-code).name})"
        return f"its process ended with {code}"

    def end(self) -> None:
        """End the process."""
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Engines:
    """All engines of a run; as a context, it ends their processes."""

    def __init__(self, names: Sequence[str], threads: int) -> None:
        self._all = [_Engine(name, threads) for name in names]
        self._folder = tempfile.TemporaryDirectory(prefix="polyattn-peers-")

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._folder.cleanup()

    def about(self) -> dict[str, Any]:
        """Return versions by engine, or why one cannot run here."""
        return {engine.name: engine.about() for engine in self._all}

    def parties(self, inputs: Inputs) -> Iterator[list[Way | Unable]]:
        """Yield each engine's way to run a case, as many together as the memory holds.

        Those of a party end before the next one begins; mostly there is one of them all.
        """
        case, folder = inputs.case, Path(self._folder.name)
        if case.train:
            yield [Unable(engine.name, "is timed forward only") for engine in self._all]
            return
        files = _written(inputs, folder) if self._all else {}
        party: list[Way | Unable] = []
        crowded = False
        for engine in self._all:
            if any(isinstance(way, Way) for way in party) and lacking(case, ENGINE):
                yield party
                self._end()
                party, crowded = [], True
            if lacking(case, ENGINE) and not any(isinstance(way, Way) for way in party):
                self._end()  # what they hold of the case before
            why = lacking(case, ENGINE)
            party.append(Unable(engine.name, why) if why else engine.way(inputs, files, folder))
        if party or not self._all:
            yield party
        if crowded:
            self._end()

    def _end(self) -> None:
        for engine in self._all:
            engine.end()

    def processes(self) -> list[int]:
        """Return the ids of the processes, whose time is not that of others."""
        return [engine.process.pid for engine in self._all if engine.process is not None]


def _written(inputs: Inputs, folder: Path) -> dict[str, str]:
    """Write the arrays of a case, bfloat16 as its bits."""
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    if inputs.allowed is not None:
        arrays["allowed"] = inputs.allowed
    files = {}
    for name, x in arrays.items():
        bits = x.view(torch.uint16) if x.dtype == torch.bfloat16 else x
        files[name] = str(folder / f"{name}.npy")
        np.save(files[name], bits.contiguous().numpy())
    return files


def _tensor(path: Path, like: Tensor) -> Tensor:
    """Read a result."""
    found = np.load(path, allow_pickle=False)
    if found.dtype == np.uint16:
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).view(like.shape)
    return torch.from_numpy(found).to(like.dtype).view(like.shape)

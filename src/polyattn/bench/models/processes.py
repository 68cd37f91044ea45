"""Processes that examine models: each takes a few, and none outlives the run."""

from __future__ import annotations

import functools
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyattn import settings
from polyattn.bench.models.model_row import Row

__all__ = ["Examiners"]

_A_PROCESS = 40
"""How many models one process examines: code and weights that stay behind are given back."""


class Examiners:
    """Examines models in processes of their own, by a module's function ``examine(name)``.

    `jobs` at once, each model for at most `limit_s`, each process with at most `memory_mib`, and
    with `environment` beside what this one has.
    """

    def __init__(
        self, module: str, *, jobs: int = 1, limit_s: float = 300.0, memory_mib: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        whole = settings.environment(dict(environment or {}))
        self._begun = functools.partial(_Child, module, memory_mib, whole)
        self._jobs, self._limit_s = jobs, limit_s
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self, names: Sequence[str], found: Callable[[Row], None]) -> None:
        """Examine the models; `found` hears each row, in this thread, as it is there."""
        waiting: queue.Queue[str] = queue.Queue()
        for name in names:
            waiting.put(name)
        rows: queue.Queue[Row] = queue.Queue()
        threads = [
            threading.Thread(target=self._work, args=(waiting, rows), daemon=True)
            for _ in range(min(self._jobs, len(names)))
        ]
        try:
            for thread in threads:
                thread.start()
            for _ in names:
                found(self._next(rows, threads))
        finally:
            self._over.set()
            self.close()

    def _next(self, rows: queue.Queue[Row], threads: Sequence[threading.Thread]) -> Row:
        while True:
            try:
                return rows.get(timeout=0.5)  # so that Ctrl-C is heard
            except queue.Empty:
                if not any(thread.is_alive() for thread in threads) and rows.empty():
                    raise RuntimeError("the processes that examine models cannot begin") from None

    def close(self) -> None:
        """End every process that is left."""
        with self._lock:
            left, self._children = self._children, set()
        for child in left:
            _end(child)

    def _work(self, waiting: queue.Queue[str], rows: queue.Queue[Row]) -> None:
        child, done = None, 0
        while not self._over.is_set():
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            if child is None or child.process.poll() is not None or done >= _A_PROCESS:
                self._leave(child)
                child, done = self._begin(), 0
            row = child.examine(name, self._limit_s)
            done += 1
            if row.outcome in ("crashed", "cut short"):
                self._leave(child)
                child = None
            rows.put(row)
        self._leave(child)

    def _begin(self) -> _Child:
        child = self._begun()
        with self._lock:
            self._children.add(child.process)
        if self._over.is_set():
            self.close()
        return child

    def _leave(self, child: _Child | None) -> None:
        if child is not None:
            with self._lock:
                self._children.discard(child.process)
            _end(child.process)


class _Child:
    def __init__(self, module: str, memory_mib: int, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "polyattn.bench.models.child", module, str(memory_mib)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, start_new_session=True, env=environment,
        )  # fmt: skip
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def examine(self, name: str, limit_s: float) -> Row:
        begin = time.monotonic()
        line: Any = None
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(f"{name}\n")
            self.process.stdin.flush()
            line = self._lines.get(timeout=limit_s)
        except queue.Empty:
            return Row(name, "cut short", f"took longer than {limit_s:g} s", seconds=limit_s)
        except OSError:
            pass  # it has died; its exit status says how
        if line is None:
            took = round(time.monotonic() - begin, 2)
            return Row(name, "crashed", f"exit status {self.process.wait()}", seconds=took)
        return Row.from_json(json.loads(line))


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
    for end in (child.stdin, child.stdout):
        if end is not None:
            end.close()

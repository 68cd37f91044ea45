"""What a tap of a trace takes of a compiled program."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from polyattn.jax.trace import tap, trace

__all__ = ["MOST_US", "row"]

MOST_US = 10.0
_TAPS, _ROUNDS = 64, 30
_SIZES = {"small": 256, "large": 1 << 20}


def row() -> dict[str, Any]:
    """Return the microseconds a tensor that 64 taps add to a program, until each record is written.

    `small_us`: of 256 float32 numbers, each tap after a sum; `large_us`: of a million, all taps of
    one array, since XLA joins sums that nobody looks at. Rounds with and without a trace alternate.
    """
    found: dict[str, Any] = {}
    for name, size in _SIZES.items():
        rounds = _ROUNDS if name == "small" else max(_ROUNDS // 5, 3)
        with tempfile.TemporaryDirectory() as folder:
            path, program = Path(folder, "taps.jsonl"), _program(sums=name == "small")
            plain, traced = _alternated(program, jnp.ones(size), rounds, path)
        found[f"{name}_us"] = round((traced - plain) / _TAPS * 1e6, 2)
    return {**found, "goal_us": MOST_US, "met": found["small_us"] <= MOST_US}


def _program(sums: bool) -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        for place in range(_TAPS):
            x = tap(x * 1.0001 + 0.001 if sums else x, f"m{place}")
        return x + 1

    return jax.jit(program)


def _alternated(
    program: Callable[[Any], Any], x: Any, rounds: int, path: Path
) -> tuple[float, float]:
    """Return the median seconds of the program without a trace and with one."""
    plain, traced = [], []
    _once(program, x, nullcontext())
    with trace(path) as run:
        with run.step(0):
            program(x)
        for number in range(rounds):
            traced.append(_once(program, x, run.step(number + 1)))
            plain.append(_once(_untraced(program), x, nullcontext()))
    return statistics.median(plain), statistics.median(traced)


def _untraced(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
    from polyattn.trace.recorders.jax.active_trace import as_active

    def call(x: Any) -> Any:
        with as_active(None):
            return program(x)

    return call


def _once(program: Callable[[Any], Any], x: Any, step: Any) -> float:
    begin = time.perf_counter()
    with step:
        jax.block_until_ready(program(x))
    return time.perf_counter() - begin

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
    """Return the microseconds a tensor that 64 taps add to a program of 64 sums.

    `small_us`: of 256 float32 numbers, until every record is with the operating system; `large_us`:
    of a million. `summed_us`: what the sum that such a tap follows takes by itself. Rounds with and
    without a trace alternate.
    """
    found: dict[str, Any] = {}
    for name, size in _SIZES.items():
        rounds = _ROUNDS if name == "small" else max(_ROUNDS // 5, 3)
        with tempfile.TemporaryDirectory() as folder:
            plain, traced = _alternated(jnp.ones(size), rounds, Path(folder, "taps.jsonl"))
        found[f"{name}_us"] = round((traced - plain) / _TAPS * 1e6, 2)
        found[f"{name}_summed_us"] = round(plain / _TAPS * 1e6, 2)
    return {**found, "goal_us": MOST_US, "met": found["small_us"] <= MOST_US}


def _program() -> Callable[[Any], Any]:
    def program(x: Any) -> Any:
        for place in range(_TAPS):
            x = tap(x * 1.0001 + 0.001, f"m{place}")
        return x

    return jax.jit(program)


def _alternated(x: Any, rounds: int, path: Path) -> tuple[float, float]:
    """Return the median seconds of the program without a trace and with one."""
    program = _program()
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

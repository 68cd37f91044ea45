"""Ordinary problems, small and large: on which of them is the kernel slower than torch?

What is found sets the thresholds of the heuristics: a problem on which the kernel is slower and is
chosen all the same is a mistake of theirs.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

from polyattn.bench.cpu.cases import Case, grid
from polyattn.bench.cpu.inputs import Inputs
from polyattn.bench.cpu.run import Options, in_force, timed_case
from polyattn.errors import PolyattnError
from polyattn.torch import explain

__all__ = ["SLACK", "measure_grid"]

SLACK = 1.05
_ROWS = 4
_QUICK = 10
_FIRST = Options(repeats=3, block_s=0.006)
_AGAIN = Options(repeats=9, block_s=0.02)


def measure_grid(options: Options, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:  # fmt: skip  # noqa: E501
    """Time every problem of the grid; those that seem slower are timed again, for longer."""
    cases = [case for case in grid() if options.only in case.name]
    if not cases:
        raise PolyattnError(
            f"got --only {options.only!r}, which no problem of the grid holds, expected a part "
            'of a name such as "causal (1,8,64,64) fp32 BTNH".'
        )
    if options.quick:
        cases = random.Random(0).sample(cases, min(_QUICK, len(cases)))
    rows = []
    for number, case in enumerate(cases):
        say(f"{number + 1}/{len(cases)} {case.name}")
        row = _timed(case, _FIRST, options.backend)
        if row["ratio"]["median"] < SLACK:
            row = _timed(case, _AGAIN, options.backend)
        rows.append(row)
    slower = [row for row in rows if row["ratio"]["median"] < 1 / SLACK]
    mistakes = [row["name"] for row in slower if row["chosen"] == options.backend]
    mean = math.exp(sum(math.log(row["ratio"]["median"]) for row in rows) / len(rows))
    return {
        **in_force("cpu-grid", options),
        "slack": SLACK,
        "mean_ratio": round(mean, 3),
        "slower": [row["name"] for row in slower],
        "chosen_though_slower": mistakes,
        "wrong": [row["name"] for row in rows if row["wrong"]],
        "goals_met": not mistakes and not any(row["wrong"] for row in rows),
        "rows": rows,
    }


def _timed(case: Case, how: Options, backend: str) -> dict[str, Any]:
    inputs = Inputs.of(case)
    selection = explain(inputs.q, inputs.k, inputs.v, mask=inputs.mask, layout=case.layout)
    row = timed_case(case, dataclasses.replace(how, backend=backend), _ROWS)
    return {**row, "chosen": selection.backend, "chosen_by": str(selection.source)}

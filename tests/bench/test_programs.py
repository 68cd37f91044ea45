"""How many rounds a whole program is timed for."""

from __future__ import annotations

import json
import math
from collections import Counter

from polyattn.bench.programs.program_rows import OURS, ProgramRow
from polyattn.bench.programs.program_run import AGAIN, Turns, _is_enough, figures

ROW = ProgramRow("vit batch", "float32")


def turns(ratios: list[float]) -> Turns:
    times = {"sdpa": ratios, AGAIN: ratios, OURS: [1.0] * len(ratios)}
    return Turns(times, rms={OURS: 0.0}, ran=Counter(native_cpu=6))


def test_rounds_are_added_until_the_ratio_is_known() -> None:
    steady, loud = turns([1.1, 1.11] * 4), turns([0.9, 1.3] * 4)
    assert not _is_enough(steady, ROW, 6, 7, 10.0)
    assert _is_enough(steady, ROW, 8, 7, 10.0)
    assert not _is_enough(loud, ROW, 8, 7, 10.0)
    assert _is_enough(loud, ROW, 8, 7, 61.0)
    assert _is_enough(loud, ROW, 2, 2, 1.0)  # as quick as asked for


def test_rounds_that_take_minutes_are_cut() -> None:
    assert not _is_enough(turns([1.0, 2.0]), ROW, 2, 7, 500.0)
    assert _is_enough(turns([1.0, 2.0, 1.5]), ROW, 3, 7, 241.0)


def test_what_is_uncertain_is_not_judged() -> None:
    assert figures(ROW, turns([0.6, 1.5] * 4))["met"] is None
    many = turns([0.96, 1.01, 1.0, 0.99, 0.98, 1.0, 0.97] * 5)
    assert figures(ROW, many)["noise"] < 0.02
    many.seconds["sdpa"] = many.seconds[AGAIN] = [0.9] * 35
    assert figures(ROW, many)["met"] is False


def test_few_rounds_and_results_without_numbers_are_json() -> None:
    found = turns([1.0, 1.1])
    found.rms["sdpa"] = math.nan
    record = json.loads(json.dumps(figures(ROW, found), allow_nan=False))
    assert record["noise"] is None and record["met"] is None
    assert record["rms"] == {OURS: 0.0, "sdpa": None}

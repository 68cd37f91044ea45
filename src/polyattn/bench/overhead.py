"""What a call costs over the kernel it ends in, ours and others', in one run."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polyattn.bench import machine
from polyattn.bench import overhead_cases as cases
from polyattn.bench import overhead_in_programs as in_programs
from polyattn.bench.overhead_cases import Case, Missing
from polyattn.bench.records import SCHEMA
from polyattn.bench.timing import PAIRS, Pair, Rounds, time_pairs
from polyattn.errors import MissingDependency, PolyattnError
from polyattn.selection.evidence import UNMEASURED
from polyattn.selection.evidence.of_machine import assume

__all__ = ["measure"]


def measure(*, rounds: int = 25, block_s: float = 0.002, peers: bool = True) -> dict[str, Any]:
    """Time every row and return the record.

    What was measured of this machine's kernels takes no part, so that calls end in torch's flash
    kernel, whose direct call is at hand.
    """
    if _torch() is None:
        raise MissingDependency(
            "got `bench overhead` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        )
    with _one_thread(), assume(UNMEASURED):
        names = cases.namespace()
        listed: list[Case | Missing] = [*cases.our_cases()]
        listed += cases.peer_cases(names) if peers else []
        running = [case for case in listed if isinstance(case, Case)]
        _require_flash(names)
        for case in running:
            _require_same_answer(case, names)
        pairs = [Pair(case.statement, case.over, case.scope) for case in running]
        timed, quiet = time_pairs(pairs, names, rounds=rounds, block_s=block_s)
        found = dict(zip(running, timed, strict=True))
        rows = [
            {"name": row.name, "missing": row.how_to_get_it}
            if isinstance(row, Missing)
            else _row(row, found[row].summary())
            for row in listed
        ]
        rows.append(_first_call(names, rounds))
        record = _record(rows, rounds, quiet)
    return record | {"in_programs": in_programs.rows(rounds)}


def _record(rows: list[dict[str, Any]], rounds: int, quiet: Rounds) -> dict[str, Any]:
    """Return the rows with all that was in force when they were measured."""
    return {
        "schema": SCHEMA,
        "kind": "overhead",
        "command": machine.command_line("overhead"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "flags": machine.flags(),
        "shape": f"{cases.SHAPE} float32",
        "threads": 1,
        "rounds": rounds,
        "pairs_per_round": PAIRS,
        "dropped_rounds": quiet.dropped,
        "foreign_load": {
            "median": round(statistics.median(quiet.foreign), 4),
            "max": round(max(quiet.foreign), 4),
        },
        "legend": cases.LEGEND,
        "goals_met": all(row.get("met", True) for row in rows),
        "rows": rows,
    }


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


@contextmanager
def _one_thread() -> Iterator[None]:
    torch = _torch()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _require_flash(names: dict[str, Any]) -> None:
    """Refuse to compare with a kernel that the call does not end in."""
    from polyattn.torch import explain

    chosen = explain(names["q"], names["k"], names["v"], layout="BNTH")
    if chosen.backend != "sdpa_flash":
        raise PolyattnError(
            f"got {chosen.backend} ({chosen.source}) for {cases.SHAPE}, expected sdpa_flash, whose "
            "direct call this is measured against; unset POLYATTN_BACKEND and set "
            "POLYATTN_TUNING=off."
        )


def _require_same_answer(case: Case, names: dict[str, Any]) -> None:
    """A row whose call computes something else than its kernel would compare nothing."""
    result: dict[str, Any] = {}
    scoped = {**names, "result": result}
    for kind, statement in (("call", case.statement), ("over", case.over)):
        head, _, tail = statement.rpartition(": ")
        assign = f"result[{kind!r}] = {tail}"
        with case.scope():
            exec(f"{head}: {assign}" if head else assign, scoped)
    torch = names["torch"]
    if not torch.allclose(result["call"], result["over"], atol=1e-6):
        raise PolyattnError(
            f"{case.name}: {case.statement} and {case.over} give different results."
        )


def _row(case: Case, summary: dict[str, Any]) -> dict[str, Any]:
    met = None if case.goal_us is None else summary["extra_us"]["median"] <= case.goal_us
    return {
        "name": case.name,
        "statement": case.statement,
        "over": cases.SHORT.get(case.over, case.over),
        "goal_us": case.goal_us,
        **({} if met is None else {"met": met}),
        "ours": case.ours,
        **summary,
    }


def _first_call(names: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Time a call of a class not seen before: the selection itself, which is then remembered."""
    from polyattn.selection import scopes

    case = Case("first call of its kind", 'forget(); attention(q, k, v, layout="BNTH")')
    timed, _ = time_pairs(
        [Pair(case.statement, case.over)],
        {**names, "forget": scopes.invalidate},
        rounds=rounds,
        block_s=0.002,
    )
    return _row(case, timed[0].summary())

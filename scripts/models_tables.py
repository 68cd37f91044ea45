"""The tables of docs/transformers.md and docs/diffusers.md: from the records of `bench models`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyattn.bench.machine import processor_name
from polyattn.bench.models.model_row import OUTCOMES, Row

__all__ = ["models_of"]

_RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_KINDS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    (
        "no model is configured by it, or its code is not there",
        lambda why: why.startswith(("LookupError: no model in", "ModuleNotFoundError")),
    ),
    ("it takes a package that was not installed", lambda why: why.startswith("ImportError")),
    ("no small configuration or inputs that it takes are known", lambda why: True),
)
"""Why a model was not built: in words, and what its error begins with."""
_SAID = ("different", "refused", "crashed", "unsteady", "cut short")


def models_of(library: str) -> Callable[[], str]:
    """Return what makes the table of a library, from the first of its records by name."""

    def make() -> str:
        paths = sorted(_RESULTS.glob(f"*/models-{library}.json"))
        if not paths:
            return f"There is no record yet: `polyattn bench models --library {library} --record`."
        return "\n".join(_lines(json.loads(paths[0].read_text(encoding="utf-8")), paths[0]))

    return make


def _lines(record: Mapping[str, Any], path: Path) -> Iterator[str]:
    rows = [Row.from_json(row) for row in record["rows"]]
    machine = record["machine"]
    runs = sum(len(row.cases) for row in rows if row.outcome == "equal")
    yield (
        f"{len(rows)} of {record['library']} {record['version']}, torch "
        f"{record['versions']['torch']} on {processor_name(machine)}, {machine['cores']} cores, "
        f"{record.get('date', 'no date')[:10]}: {record['calls']:,} calls on polyattn, {runs:,} "
        "runs of models that are equal. The record: "
        f"`{path.relative_to(_RESULTS.parent.parent).as_posix()}`."
    )
    yield from ("", "| outcome | models |", "|---|---:|")
    for outcome, meaning in OUTCOMES.items():
        found = [row for row in rows if row.outcome == outcome]
        if outcome == "not built":
            for kind, those in _not_built(found):
                yield f"| {outcome}: {kind} | {len(those)} |"
        elif found or outcome in ("equal", "different"):
            yield f"| {outcome}: {meaning} | {len(found)} |"
    for row in rows:
        if row.outcome in _SAID:
            yield from ("", f"{row.outcome}: `{row.name}`: {row.reason}")
    yield from _named("as sdpa", [row for row in rows if row.outcome == "as sdpa"])
    for kind, those in _not_built([row for row in rows if row.outcome == "not built"]):
        yield from _named(f"not built, {kind}", those)


def _not_built(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    left = list(rows)
    for kind, is_of_it in _KINDS:
        those = [row for row in left if is_of_it(row.reason)]
        left = [row for row in left if row not in those]
        if those:
            yield kind, those


def _named(what: str, rows: Sequence[Row]) -> Iterator[str]:
    if rows:
        yield from ("", f"{what}: {', '.join(row.name for row in rows)}.")

"""What people see of a run of ``bench gpu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from polyattn.bench.gpu.gpu_run import BACKENDS
from polyattn.bench.harm.calls import ATTENTION, DROP_IN
from polyattn.bench.report import conditions, console, say

__all__ = ["print_record"]

_LEGEND = (
    "x torch: the time of torch's own function with a program's arguments over that of ours "
    "(drop-in: the same arguments; attention: the mask as a value) and of each backend that was "
    "asked for. Medians of interleaved repeats, by the device's clock. TFLOP/s: of the pairs that "
    "the mask allows."
)


def print_record(record: Mapping[str, Any]) -> None:
    """Print the table, why each backend was chosen, and the verdict."""
    table = Table(title=f"{record['machine']['accelerator']}: times as fast as torch's own call")
    table.add_column("case", overflow="fold")
    for name in ("torch ms", DROP_IN, ATTENTION, "TFLOP/s", *BACKENDS):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("chosen", overflow="fold")
    for row in record["rows"]:
        ratios = row["ratios"]
        picked = [
            f"{ratios[name]['median']:.2f}" if name in ratios else "-"
            for name in (DROP_IN, ATTENTION, *BACKENDS)
        ]
        table.add_row(
            row["name"], f"{row['torch_ms']['median']:.3g}", *picked[:2], f"{row['tflops']:g}",
            *picked[2:], row["choices"][ATTENTION]["chosen"],
        )  # fmt: skip
    console(width=150).print(table)
    said = {
        (choice["chosen"], choice["reason"]): None
        for row in record["rows"]
        for choice in row["choices"].values()
    }
    for line in (_LEGEND, *(f"{one}  <- {why}" for one, why in said), *_verdict(record)):
        say(line)
    say(conditions(record))


def _verdict(record: Mapping[str, Any]) -> list[str]:
    rows = {row["name"]: row for row in record["rows"]}
    lines = [f"geometric mean: {record['mean_ratio']:.2f} x torch"]
    lines += [f"{name}: wrong result: {rows[name]['wrong']}" for name in record["wrong"]]
    harmed = [f"{name} {rows[name]['ratio']['median']:.2f}" for name in record["harmed"]]
    return [
        *lines,
        f"harm (below {record['least']:g}): {'; '.join(harmed)}" if harmed else "no harm",
    ]

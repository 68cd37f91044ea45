"""The end of a run: its record printed, written and drawn, as its options say."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyattn.bench import records
from polyattn.bench.report import say

__all__ = ["conclude"]


def conclude(
    options: argparse.Namespace,
    record: Mapping[str, Any],
    kind: str,
    show: Callable[[Mapping[str, Any]], None],
    drawn: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda record: record,
) -> None:
    """Print a record by `show` or as JSON, write it where asked, and draw the ratios of `drawn`.

    What was interrupted is printed only.
    """
    if options.json:
        say(records.dump(record), plain=True)
    else:
        show(record)
    if record.get("interrupted"):
        say("interrupted: these are the rows that were measured, not written", error=True)
        return
    if options.record is not None:
        path = Path(options.record or records.default_path(record, kind))
        records.write(record, path)
        say(f"record: {path}", error=options.json)
    if options.plot:
        from polyattn.bench.plot import draw_ratios

        say(f"plot: {draw_ratios(drawn(record), Path(options.plot))}", error=options.json)

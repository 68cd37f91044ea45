"""The files that a bench is to write, looked at before it measures: a run may take an hour."""

from __future__ import annotations

import argparse
import importlib.util

from polyattn.errors import MissingDependency
from polyattn.outputs import check_output

__all__ = ["check_outputs"]


def check_outputs(options: argparse.Namespace) -> None:
    """Raise for a file that cannot be written, and for a plot where nothing can draw it.

    An option that is empty names no file: where its record goes is known when it is made.
    """
    for flag in ("out", "record", "plot", "json"):
        path = getattr(options, flag, None)
        if isinstance(path, str):
            check_output(f"--{flag}", path, makes_folders=True)
    if getattr(options, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            "got --plot without matplotlib, expected it installed: pip install 'polyattn[bench]'"
        )

"""``polyattn trace``: what a program's models compute, recorded, shown and compared."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from polyattn.errors import PolyattnError, near_matches

__all__ = ["main"]

ACTIONS: dict[str, tuple[str, str, str]] = {
    "record": ("trace_record", "SCRIPT [ARGS]", "run a program, and write what its models compute"),
    "show": ("trace_show", "FILE", "what is in a trace"),
    "diff": ("trace_diff", "A B", "which module of B is the first that is wrong, A being right"),
    "isolate": (
        "trace_isolate", "--reference A SCRIPT [ARGS]",
        "which modules of a port differ by themselves, each fed what the original's was",
    ),
    "calibrate": (
        "trace_calibrate", "REFERENCE RERUN ...", "how large differences are that mean nothing",
    ),
}  # fmt: skip
"""Each action: the module beside this one whose ``main(argv)`` it is, its arguments, its line."""


def main(argv: Sequence[str]) -> int:
    """Do one action; returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_help())
        return 0 if argv else 2
    if argv[0] not in ACTIONS:
        raise PolyattnError(
            f"got {argv[0]!r}, expected one of {', '.join(ACTIONS)}."
            f"{near_matches(argv[0], ACTIONS)}"
        )
    return int(importlib.import_module(f"polyattn.cli.{ACTIONS[argv[0]][0]}").main(argv[1:]))


def _help() -> str:
    usages = {name: f"{name} {arguments}" for name, (_, arguments, _) in ACTIONS.items()}
    width = max(map(len, usages.values()))
    return "\n".join(
        [
            "usage: polyattn trace ACTION ...   (polyattn trace ACTION --help says more)",
            "",
            *(f"  {usages[name]:<{width}}  {line}" for name, (_, _, line) in ACTIONS.items()),
            "",
            "Only `record` and `isolate` need torch.",
            "`diff` and `isolate` exit with 0: same, 1: different, 2: cannot say.",
        ]
    )

"""Numbers and lists of the command line, with errors that say what was got and expected."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["count", "integers", "number", "parser", "split_program"]


def parser(command: str, summary: str, **options: Any) -> argparse.ArgumentParser:
    """Make the parser of one command."""
    made = argparse.ArgumentParser(
        prog=f"polyattn {command}",
        description=summary,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    made.add_argument(
        "--json",
        nargs="?",
        const="-",
        metavar="FILE",
        help="JSON instead of tables, to stdout or (--json=FILE) to a file",
    )
    return made


def integers(names: str, *, none: bool = False) -> Callable[[str], tuple[int | None, ...]]:
    """Return a type for ``B,T,N,H``: as many sizes as there are names; `none` allows ``none``."""
    expected = names.split(",")

    def read(text: str) -> tuple[int | None, ...]:
        parts = [part.strip().lower() for part in text.split(",")]
        try:
            found = tuple(None if none and part == "none" else int(part) for part in parts)
        except ValueError:
            found = ()
        if len(found) != len(expected) or any(x is not None and x < 0 for x in found):
            extra = " or none" if none else ""
            raise argparse.ArgumentTypeError(
                f"got {text!r}, expected {names}: {len(expected)} integers >= 0{extra}, "
                f"e.g. {','.join(['128'] * len(expected))}"
            )
        return found

    return read


def count(what: str, low: int) -> Callable[[str], int]:
    """Return a type for a whole number from `low` on."""

    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = low - 1
        if found < low:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {what}: an integer >= {low}")
        return found

    return read


def number(what: str, low: float = -math.inf, high: float = math.inf) -> Callable[[str], float]:
    """Return a type for a finite number within bounds."""

    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (low <= found <= high and math.isfinite(found)):
            bounds = "" if low == -math.inf else f" from {low:g}"
            bounds += "" if high == math.inf else f" to {high:g}"
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {what}: a number{bounds}")
        return found

    return read


def split_program(
    made: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Split our options from the program's: ``SCRIPT ARGS``, or what Python has in its place.

    That is ``-m MODULE``, ``-c CODE``, or ``-`` for standard input.
    """
    valued = {
        spelling
        for action in made._actions
        if action.nargs is None and action.option_strings
        for spelling in action.option_strings
    }
    at = 0
    while at < len(arguments):
        token = arguments[at]
        if token == "--":
            return list(arguments[:at]), list(arguments[at + 1 :])
        if token in ("-m", "-c", "-") or not token.startswith("-"):
            break
        at += 2 if token in valued else 1
    return list(arguments[:at]), list(arguments[at:])

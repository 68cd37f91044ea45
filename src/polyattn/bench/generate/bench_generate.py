"""The command ``polyattn bench generate``: its options, its record, and its exit code."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from polyattn.errors import PolyattnError

__all__ = ["add", "run"]

_TOKENS, _TOKENS_QUICK = 200, 60
_CODES = {True: 0, False: 1, None: 2}
_INTERRUPTED = 130


def add(kinds: Any) -> None:
    """Add the command to those of ``polyattn bench``."""
    generate = kinds.add_parser(
        "generate",
        help="text generation of transformers with a growing cache, beside stock",
        description="What a token of transformers' generate takes, stock and through polyattn.",
    )
    generate.add_argument("--quick", action="store_true", help="the short rows, in a minute")
    generate.add_argument("--only", metavar="PATTERN", default="", help="a part of the rows' names")
    generate.add_argument("--tokens", type=int, help=f"that are timed ({_TOKENS}; quick: 60)")
    generate.add_argument(
        "--known-lengths", action="store_true", help="generate once before, so that none is new"
    )
    generate.add_argument("--threads", type=int, default=0, help="of torch; by default its own")
    generate.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    generate.add_argument("--json", action="store_true", help="print the record, not the table")
    generate.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/generate.json",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and return 0 if all goals are met, 1 if not, 2 if it cannot be said."""
    tokens = options.tokens or (_TOKENS_QUICK if options.quick else _TOKENS)
    if tokens < 20 or (options.tokens is not None and options.tokens < 20):
        raise PolyattnError(f"got --tokens {options.tokens}, expected at least 20.")
    if options.threads < 0:
        raise PolyattnError(f"got --threads {options.threads}, expected at least 1.")
    part = options.quick or options.only or options.tokens or options.threads
    whole = not (part or options.known_lengths)
    if options.record == "" and not whole:
        raise PolyattnError(
            "got --record without FILE beside --quick, --only, --tokens, --threads or "
            "--known-lengths, expected a whole run for the record of the machine; name a FILE."
        )
    from polyattn.bench.generate.generated import chosen
    from polyattn.bench.generate.whole_run import Options, measure
    from polyattn.bench.report import say

    asked = Options(
        chosen(options.only, options.quick),
        tokens,
        seed=options.seed,
        known=options.known_lengths,
        threads=options.threads,
        quick=options.quick,
    )
    record = measure(asked, lambda line: say(line, error=True))
    _tell(record, options)
    if record["interrupted"]:
        say("interrupted: these are the rows that were measured, not written", error=True)
        return _INTERRUPTED
    return _CODES[record["goals_met"]]


def _tell(record: dict[str, Any], options: argparse.Namespace) -> None:
    from polyattn.bench import records
    from polyattn.bench.generate.generate_table import print_record
    from polyattn.bench.report import say

    if options.json:
        say(records.dump(record), plain=True)
    else:
        print_record(record)
    if options.record is not None and not record["interrupted"]:
        path = Path(options.record or records.default_path(record, "generate"))
        records.write(record, path)
        say(f"record: {path}", error=options.json)

"""The commands of ``polyattn bench``."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyattn.bench.generate import bench_generate as generate
from polyattn.bench.gpu import bench_gpu
from polyattn.bench.harm import bench_harm as harm
from polyattn.bench.jax import bench_jax
from polyattn.bench.models import bench_models
from polyattn.bench.offload import bench_offload
from polyattn.bench.outputs import check_outputs
from polyattn.bench.programs import bench_programs
from polyattn.bench.trace import bench_trace as trace
from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["main"]

YES, NO, CANNOT_SAY = 0, 1, 2
_OF_OUTPUT = (errno.ENOSPC, errno.EPIPE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark; returns 0 if all goals are met, 1 if not, 2 if it cannot be said."""
    options = _parser().parse_args(argv)
    from polyattn.bench.report import say

    try:
        commands = {
            "compare": _compare, "cpu": _cpu, "generate": generate.run, "gpu": bench_gpu.run,
            "growth": _growth, "harm": harm.run, "jax": bench_jax.run, "models": bench_models.run,
            "offload": bench_offload.run, "overhead": _overhead, "programs": bench_programs.run,
            "trace": trace.run,
        }  # fmt: skip
        check_outputs(options)
        return commands[options.what](options)
    except (PolyattnError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno in _OF_OUTPUT:
            raise  # of standard output: for all commands the same is said
        say(f"polyattn bench: {error}", error=True)
        return CANNOT_SAY


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="polyattn bench", description=__doc__)
    kinds = parser.add_subparsers(dest="what", required=True)
    overhead = kinds.add_parser(
        "overhead",
        help="what a call costs over the kernel it ends in, beside other libraries",
        description="Extra time of a call over the kernel it ends in, at (1,1,8,8) float32.",
    )
    overhead.add_argument("--rounds", type=int, default=25, help="rounds that are kept")
    overhead.add_argument("--block-ms", type=float, default=2.0, help="length of a block")
    overhead.add_argument("--no-peers", action="store_true", help="leave other libraries out")
    overhead.add_argument("--json", action="store_true", help="print the record, not the table")
    overhead.add_argument(
        "--out",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/overhead.json",
    )
    overhead.add_argument("--plot", metavar="FILE.png", help="draw the table (needs matplotlib)")
    _add_cpu(kinds)
    growth = kinds.add_parser(
        "growth",
        help="whether memory stays bounded over calls of ever new shapes",
        description="Resident memory over calls of distinct shapes, eager, drop-in and compiled.",
    )
    growth.add_argument("--shapes", type=int, default=1_000_000, help="how many (1000000)")
    growth.add_argument("--json", action="store_true", help="print the record, not the steps")
    harm.add(kinds)
    generate.add(kinds)
    bench_gpu.add(kinds)
    bench_jax.add(kinds)
    bench_models.add(kinds)
    bench_offload.add(kinds)
    bench_programs.add(kinds)
    trace.add(kinds)
    compare = kinds.add_parser("compare", help="set two records side by side")
    compare.add_argument("a", metavar="A.json")
    compare.add_argument("b", metavar="B.json")
    compare.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser


def _add_cpu(kinds: Any) -> None:
    cpu = kinds.add_parser(
        "cpu",
        help="the CPU kernel of polyattn beside torch's and others'",
        description="native_cpu and torch SDPA in one run, with goals, errors and yardsticks.",
    )
    cpu.add_argument(
        "--peers",
        nargs="?",
        const="torch",
        metavar="all|NAMES",
        help="FlexAttention and the folded route too; with all, or names joined by commas, the "
        "engines of others that scripts/peers has installed",
    )
    cpu.add_argument("--quick", action="store_true", help="an eighth of the lengths, no goals")
    cpu.add_argument("--only", metavar="PATTERN", default="", help="a part of the cases' names")
    cpu.add_argument("--repeats", type=int, help="repeats that are kept (7; quick: 3)")
    cpu.add_argument("--json", action="store_true", help="print the record, not the table")
    cpu.add_argument(
        "--record",
        metavar="FILE",
        nargs="?",
        const="",
        help="write the record; without FILE to benchmarks/results/<machine>/cpu.json",
    )
    cpu.add_argument("--plot", metavar="FILE.png", help="draw the ratios (needs matplotlib)")


def _overhead(options: argparse.Namespace) -> int:
    from polyattn.bench import overhead, records, report

    if options.rounds < 2 or not 0 < options.block_ms < math.inf:
        raise PolyattnError(
            f"got --rounds {options.rounds} --block-ms {options.block_ms}, expected at least 2 "
            "rounds and a block longer than 0 ms."
        )
    record = overhead.measure(
        rounds=options.rounds, block_s=options.block_ms / 1e3, peers=not options.no_peers
    )
    if options.json:
        report.say(records.dump(record), plain=True)
    else:
        report.print_overhead(record)
    if options.out is not None:
        path = Path(options.out) if options.out else records.default_path(record, "overhead")
        records.write(record, path)
        report.say(f"record: {path}", error=options.json)
    if options.plot:
        from polyattn.bench.plot import draw

        report.say(f"plot: {draw(record, Path(options.plot))}", error=options.json)
    return YES if record["goals_met"] else NO


def _engines(asked: str | None) -> tuple[str, ...]:
    """Return the engines of others that --peers names; alone it means torch's own other ways."""
    if asked in (None, "torch"):
        return ()
    from polyattn.bench.cpu.engines import chosen_engines

    return chosen_engines(asked)


def _cpu(options: argparse.Namespace) -> int:
    if options.repeats is not None and options.repeats < 2:
        raise PolyattnError(f"got --repeats {options.repeats}, expected at least 2.")
    if options.record == "" and (options.quick or options.only):
        raise PolyattnError(
            "got --record without FILE beside --quick or --only, expected a whole run for the "
            "record of the machine; name a FILE."
        )
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(
            "got `bench cpu` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        )
    from polyattn.bench.conclude import conclude
    from polyattn.bench.cpu import bench_cpu as run
    from polyattn.bench.cpu import cpu_table as report
    from polyattn.bench.report import say

    asked = run.Options(
        repeats=options.repeats or (3 if options.quick else 7),
        block_s=0.01 if options.quick else 0.04,
        peers=options.peers is not None,
        engines=_engines(options.peers),
        quick=options.quick,
        only=options.only,
    )
    run.require(asked.backend)
    progress = (lambda line: None) if options.json else (lambda line: say(line, error=True))
    record = run.measure(asked, progress)
    conclude(options, record, "cpu", report.print_record)
    return NO if not record["goals_met"] else CANNOT_SAY if record["left_out"] else YES


def _growth(options: argparse.Namespace) -> int:
    from polyattn.bench import growth, records
    from polyattn.bench.report import say

    if options.shapes < 100:
        raise PolyattnError(f"got --shapes {options.shapes}, expected at least 100.")
    progress = (lambda line: None) if options.json else say
    record = growth.measure(options.shapes, progress)
    if options.json:
        say(records.dump(record), plain=True)
    else:
        verdict = "bounded" if record["bounded"] else "NOT bounded"
        say(
            f"{verdict}: the second half grew by {record['second_half_grew_mib']} MiB "
            f"(allowed {record['allowed_mib']})"
        )
    return YES if record["bounded"] else NO


def _compare(options: argparse.Namespace) -> int:
    from polyattn.bench import records, report

    comparison = records.compare(records.read(Path(options.a)), records.read(Path(options.b)))
    if options.json:
        report.say(records.dump(comparison), plain=True)
    else:
        report.print_comparison(comparison, options.a, options.b)
    return NO if comparison["slower"] else YES

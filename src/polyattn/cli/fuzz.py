"""``polyattn fuzz``: random problems through every backend, at any length.

Prints counts for each backend and a line for each failure that makes it again:
``polyattn fuzz --backend NAME --case '...'``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from polyattn.cli.arguments import parser
from polyattn.cli.printing import console, emit_json, note
from polyattn.errors import PolyattnError
from polyattn.outputs import check_output

if TYPE_CHECKING:
    from polyattn.conformance.report import Report

__all__ = ["main"]

_INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns 0 nothing found, 1 something found, 2 used wrongly or nothing tested, 130 after Ctrl-C.
    """
    made = _parser()
    try:
        options = made.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        _refuse_misuse(options)
        return _with_threads(options)
    except PolyattnError as error:
        note(f"polyattn fuzz: {error}")
        return 2


def _with_threads(options: argparse.Namespace) -> int:
    import torch  # here: --help and what is misspelt need not wait for it

    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)  # tensors this small only wait for each other
    try:
        return _many(options) if options.case is None else _one(options)
    finally:
        torch.set_num_threads(before)


def _many(options: argparse.Namespace) -> int:
    from polyattn.conformance.fuzz import run
    from polyattn.conformance.screen import bar, show_report

    with bar(options.problems, console(error=True)) as progress:
        report = run(
            options.problems,
            options.seed,
            options.backend,
            progress,
            options.time_limit,
            options.device,
            options.compiled,
            options.framework,
        )
    if options.json:
        emit_json(report.to_dict(), options.json)
    else:
        show_report(report, console())
    if report.ok and not report.tested and not report.interrupted:
        note(_nothing_tested(report))
        return 2
    return _INTERRUPTED if report.interrupted else 0 if report.ok else 1


def _refuse_misuse(options: argparse.Namespace) -> None:
    """Raise for arguments that ask for what there is not."""
    if options.framework == "jax" and options.compiled:
        raise PolyattnError(
            "got --compiled with --framework jax, expected one of them: JAX compiles every case."
        )
    check_output("--json", options.json)


def _nothing_tested(report: Report) -> str:
    names = ", ".join(report.untested)
    return (
        f"polyattn fuzz: got no problem that {names} takes among {report.problems}, expected one "
        "to judge it by. Look at what it declares (polyattn explain names the reasons), or ask for "
        "more --problems."
    )


def _one(options: argparse.Namespace) -> int:
    from polyattn.conformance.cases import Case
    from polyattn.conformance.fuzz import run_case
    from polyattn.conformance.screen import show_case

    case = Case.from_spec(options.case)
    verdicts = run_case(case, options.backend, options.device, options.compiled, options.framework)
    suspects = [name for name, v in verdicts.items() if v.fails or v.able]
    if options.json:
        rows = {name: vars(verdict) for name, verdict in verdicts.items()}
        emit_json({"case": case.spec, "verdicts": rows}, options.json)
    else:
        show_case(case, verdicts, console())
    if not suspects and all(v.outcome.startswith("refused") for v in verdicts.values()):
        return 2  # nobody took it: nothing can be said
    return 1 if suspects else 0


def _parser() -> argparse.ArgumentParser:
    made = parser("fuzz", "Random problems through every backend, against float64.")
    add = made.add_argument
    add("--problems", type=_count, default=1000, metavar="N", help="how many (default 1000)")
    add("--seed", type=int, default=0, metavar="S", help="which ones (default 0)")
    add("--backend", metavar="NAME", help="one backend or a group instead of all")
    add("--framework", choices=("torch", "jax"), default="torch", help="whose backends (torch)")
    add("--case", metavar="SPEC", help="one case, as a failure's line gives it")
    add("--device", default="cpu", help="cpu (default) or cuda; with JAX also rocm or tpu")
    add("--compiled", action="store_true", help="inside torch.compile(fullgraph=True)")
    add("--time-limit", type=_seconds, metavar="SECONDS", help="stop after the case that passes it")
    add("--threads", type=_count, default=1, metavar="N", help="torch's threads (default 1)")
    return made


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a count of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not found >= 0:  # NaN, too
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds, 0 or more")
    return found

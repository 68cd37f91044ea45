"""``polyattn explain``: a problem given by flags or by a record, every backend, every reason."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polyattn.cli.arguments import count, integers, number, parser
from polyattn.cli.printing import console, emit_json, table
from polyattn.cli.problems import MASKS, problem_of
from polyattn.errors import PolyattnError, Unsupported
from polyattn.problem import DTYPES, LAYOUTS, Problem
from polyattn.problem.machine import Facts
from polyattn.selection import Accepted, Decision, Selection
from polyattn.selection.prepare import select_here
from polyattn.selection.requests import Request
from polyattn.selection.wishes import Wishes, current_wishes

__all__ = ["main"]

SUMMARY = """Say which backend a problem would run on here, or on a machine you do not have
(--device), and for every other backend why it would not. Nothing is run."""


def main(argv: Sequence[str]) -> int:
    """Explain; returns 0 if something can run the problem, 1 if not, 2 if used wrongly."""
    options = _parser().parse_args(argv)
    facts = None if options.device in (None, "here") else Facts.parse(options.device)
    answers = [_answer(problem, options, facts) for problem in _problems(options)]
    if options.json:
        plain = [_plain(answer, problem) for problem, answer in answers]
        emit_json(plain if options.from_record else plain[0], options.json)
    else:
        for problem, answer in answers:
            _print(problem, answer)
    return 1 if any(isinstance(answer, Unsupported) for _, answer in answers) else 0


def _parser() -> argparse.ArgumentParser:
    made = parser("explain", SUMMARY)
    made.add_argument(
        "--q", type=str, metavar="B,T,N,H", help="query: batch, length, heads, head dim"
    )
    made.add_argument(
        "--kv",
        type=integers("S,K"),
        metavar="S,K",
        help="keys and key/value heads (as the query's)",
    )
    made.add_argument("--value-dim", type=int, metavar="V")
    made.add_argument("--dtype", default="float32", metavar="|".join(DTYPES))
    made.add_argument("--layout", default="BTNH", choices=LAYOUTS, help="packed: --q TOTAL,N,H")
    made.add_argument(
        "--sequences",
        type=count("sequences", 1),
        default=1,
        metavar="B",
        help="sequences of a packed problem",
    )
    _add_scores(made)
    for flag, says in _FLAGS.items():
        made.add_argument(f"--{flag}", action="store_true", help=says)
    made.add_argument(
        "--device",
        metavar="here|cpu:avx2|cuda:sm_90|h100|mi300x",
        help="a machine one does not have",
    )
    made.add_argument(
        "--backend", action="append", default=[], metavar="NAME", help="as backend= of a call"
    )
    made.add_argument("--never", action="append", default=[], metavar="NAME")
    made.add_argument(
        "--from-record", metavar="FILE", help="the problems of `polyattn run --record FILE`"
    )
    return made


def _add_scores(made: argparse.ArgumentParser) -> None:
    made.add_argument(
        "--causal", nargs="?", const="bottom_right", choices=("bottom_right", "top_left")
    )
    made.add_argument(
        "--window",
        type=integers("L,R", none=True),
        metavar="L,R",
        help="keys before and after; or none",
    )
    made.add_argument("--padding", action="store_true", help="keys are padded per batch entry")
    made.add_argument(
        "--mask",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"further masks, ~NAME for a complement: {', '.join(MASKS)}",
    )
    made.add_argument("--bias", nargs="?", const="dense", choices=("dense", "alibi"))
    made.add_argument("--bias-grad", action="store_true", help="the bias needs a gradient")
    made.add_argument("--softcap", type=number("a soft cap", 0), metavar="X")
    made.add_argument("--sinks", type=count("sinks", 0), nargs="?", const=1, default=0, metavar="M")
    made.add_argument("--dropout", type=number("a probability", 0, 1), default=0.0, metavar="P")
    made.add_argument("--scale", type=number("a scale"), metavar="X")


_FLAGS = {
    "grad": "the inputs need gradients",
    "lse": "return_lse=True",
    "deterministic": "deterministic=True",
    "strided": "the last dims are not contiguous",
    "compiled": "inside torch.compile",
}


def _problems(options: argparse.Namespace) -> list[Problem]:
    if options.from_record:
        if given := _describes(options):
            raise PolyattnError(
                f"got {given} and --from-record, expected one of them: the problems of a record "
                "are explained as they were recorded."
            )
        from polyattn.integrations.program.record_file import read_record

        return [case.problem for case in read_record(options.from_record).cases]
    if not options.q:
        raise PolyattnError("got no problem, expected --q B,T,N,H or --from-record FILE.")
    return [problem_of(options)]


_NOT_OF_A_PROBLEM = ("json", "device", "backend", "never", "from_record")


def _describes(options: argparse.Namespace) -> str:
    """Return an option that was given and that describes a problem, or an empty text."""
    made = _parser()
    for name, value in vars(options).items():
        if name not in _NOT_OF_A_PROBLEM and value != made.get_default(name):
            return f"--{name.replace('_', '-')}"
    return ""


Answer = Selection | Unsupported


def _answer(
    problem: Problem, options: argparse.Namespace, facts: Facts | None
) -> tuple[Problem, Answer]:
    if facts is not None:
        problem = problem.with_(device=facts.device, arch=facts.arch)
    wishes = _wishes(options)
    try:
        return problem, select_here(problem, wishes, facts)
    except Unsupported as error:
        return problem, error


def _wishes(options: argparse.Namespace) -> Wishes:
    return replace(current_wishes(options.backend or None), scope=Request.make((), options.never))


def _plain(answer: Answer, problem: Problem) -> dict[str, Any]:
    if isinstance(answer, Selection):
        return answer.to_dict()
    decisions = {name: d.to_dict() for name, d in answer.decisions.items()}
    return {"backend": None, "error": str(answer), "problem": str(problem), "decisions": decisions}


def _print(problem: Problem, answer: Answer) -> None:
    out = console()
    out.print(str(problem), style="bold", markup=False)
    if isinstance(answer, Selection):
        out.print(f"{answer.backend}  <- {answer.source}: {answer.reason}", markup=False)
        if answer.config:
            out.print(f"configuration: {dict(answer.config)}", markup=False)
        if answer.fallback:
            out.print(f"fallback: {answer.fallback}", markup=False)
        for source, names in answer.overridden.items():
            out.print(f"overrode {source}: {names}", markup=False)
    else:
        out.print(str(answer).splitlines()[0], markup=False)
    chosen = answer.backend if isinstance(answer, Selection) else None
    out.print(table(("backend", "", "why*"), _rows(answer.decisions, chosen)))
    out.print()


def _rows(decisions: Mapping[str, Decision], chosen: str | None) -> list[tuple[str, str, str]]:
    rows = []
    for name, decision in decisions.items():
        if isinstance(decision, Accepted):
            rows.append((name, "chosen" if name == chosen else "can", str(decision)))
        else:
            rows.append((name, "no", "\n".join(map(str, decision.reasons))))
    return rows

"""``polyattn flags``: how the frameworks' global switches stand, kept in files and compared."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from polyattn import flags as knobs
from polyattn.cli.arguments import parser
from polyattn.cli.flags_table import FRAMEWORKS, details, find, flags_of, installed, knob_table
from polyattn.cli.printing import console, emit_json, note, table
from polyattn.errors import FlagsError, PolyattnError, near_matches
from polyattn.flags import Row
from polyattn.flags.snapshot import Snapshot, read_all

__all__ = ["main"]

SUMMARY = """usage: polyattn flags ACTION ...   (polyattn flags ACTION --help says more)

  show [NAME ...]      how knobs stand, and everything known of those that are named
  snapshot             write how everything stands, as JSON
  diff A.json [B.json] what differs between two snapshots, or between one and now
  preset [NAME]        what the presets set here

"Now" is what the framework starts with in a new process, with the environment variables of this
one: to see how a program has set it, let the program store polyattn.torch.flags.snapshot()."""


def main(argv: Sequence[str]) -> int:
    """Do one action; returns its exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        print(SUMMARY)
        return 0 if argv else 2
    if argv[0] not in _ACTIONS:
        raise PolyattnError(
            f"got {argv[0]!r}, expected one of {', '.join(_ACTIONS)}."
            f"{near_matches(argv[0], _ACTIONS)}"
        )
    return _ACTIONS[argv[0]](argv[1:])


def _separate(argv: Sequence[str]) -> list[str]:
    """Keep ``--json`` from taking the name or the file after it for the file to write."""
    return ["--json=-" if argument == "--json" else argument for argument in argv]


def _framework_option(made: argparse.ArgumentParser, about: str) -> None:
    made.add_argument("--framework", choices=FRAMEWORKS, help=about)


def _default(framework: str | None) -> str:
    return framework or next(iter(installed()), FRAMEWORKS[0])


# --- show ---

SHOW = """How the knobs stand: all of them, or everything known of those that are named. A name may
be torch's full path (torch.backends.cudnn.benchmark), an alias, or a group (cudnn, cuda.matmul)."""


def _show(argv: Sequence[str]) -> int:
    made = parser("flags show", SHOW)
    made.add_argument("names", nargs="*", metavar="NAME")
    _framework_option(made, "whose knobs; torch if it is installed")
    options = made.parse_args(_separate(argv))
    found = _rows(options.names, options.framework)
    if options.json:
        plain = {name: [row.to_dict() for row in rows] for name, rows in found.items()}
        emit_json(plain, options.json)
        return 0
    out = console()
    for framework, rows in found.items():
        if not options.names or len(rows) > 3:
            out.print(knob_table(rows, framework))
            continue
        for row in rows:
            out.print(details(row))
            out.print()
    return 0


def _rows(names: Sequence[str], framework: str | None) -> dict[str, list[Row]]:
    """The rows asked for, by framework; of a name that is not torch's, those of jax."""
    first = _default(framework)
    if not names:
        return {first: list(flags_of(first).table())}
    asked = (first,) if framework else (first, *(f for f in installed() if f != first))
    found: dict[str, list[Row]] = {}
    for name in names:
        home, rows = _home(name, asked)
        known = found.setdefault(home, [])
        known += [row for row in rows if all(row.name != other.name for other in known)]
    return found


def _home(name: str, asked: Sequence[str]) -> tuple[str, list[Row]]:
    errors = []
    for framework in asked:
        try:
            return framework, find(name, list(flags_of(framework).table()), framework)
        except FlagsError as error:
            errors.append(error)
    hints = " ".join(str(error) for error in errors if "Did you mean" in str(error))
    raise FlagsError(hints or str(errors[0]), name)


# --- snapshot ---

SNAPSHOT = (
    """Write how everything stands, as plain JSON: to stdout, or to a file with --json=FILE."""
)


def _snapshot(argv: Sequence[str]) -> int:
    made = parser("flags snapshot", SNAPSHOT)
    _framework_option(made, "whose flags; torch if it is installed")
    options = made.parse_args(argv)
    emit_json(flags_of(_default(options.framework)).snapshot(), options.json or "-")
    return 0


# --- diff ---

DIFF = """What differs between two files, or between one file and this process now. A file is a
snapshot, or a record or a trace of polyattn's, which hold snapshots. Exit code 0: the same, 1: they
differ, 2: cannot say. Between two files no framework is imported."""


def _diff(argv: Sequence[str]) -> int:
    made = parser("flags diff", DIFF)
    made.add_argument("a", metavar="A.json")
    made.add_argument("b", nargs="?", metavar="B.json", help="without it: this process now")
    _framework_option(made, "compare only this one's flags")
    options = made.parse_args(_separate(argv))
    a = read_all(options.a)
    left: list[str] = []
    b = read_all(options.b) if options.b else _now(a, options.framework, left)
    both = [name for name in a if name in b and options.framework in (None, name)]
    left += _left_out(options, a, b)
    if not both:
        raise FlagsError(" ".join(left) or f"got no flags of {options.framework} to compare.")
    found = {name: knobs.diff(a[name], b[name]) for name in both}
    if options.json:
        same = not any(found.values())
        emit_json({"same": same, "differ": found, "not_compared": left}, options.json)
    else:
        _print_difference(found, options, {name: len(a[name]) - 1 for name in both})
        for line in left:
            note(f"polyattn flags diff: {line}")
    return 1 if any(found.values()) else 0


def _now(a: dict[str, Snapshot], only: str | None, left: list[str]) -> dict[str, Snapshot]:
    found = {}
    for name in a:
        if only not in (None, name):
            continue
        if name in FRAMEWORKS and name in installed():
            found[name] = flags_of(name).snapshot()
        else:
            left.append(f"{name} is not installed here, so its flags now cannot be read.")
    return found


def _left_out(
    options: argparse.Namespace, a: dict[str, Snapshot], b: dict[str, Snapshot]
) -> list[str]:
    """Say which frameworks only one of two files speaks of."""
    if not options.b:
        absent = options.framework and options.framework not in a
        return [_holds(options.a, a, options.framework)] if absent else []
    sides = ((options.a, a, b), (options.b, b, a))
    return [
        f"{path} holds flags of {name}, and the other file does not."
        for path, mine, theirs in sides
        for name in mine
        if name not in theirs and options.framework in (None, name)
    ] + [
        _holds(path, mine, options.framework)
        for path, mine, theirs in sides
        if options.framework and options.framework not in {*mine, *theirs}
    ]


def _holds(path: str, found: dict[str, Snapshot], wanted: str) -> str:
    return f"{path} holds flags of {' and '.join(found)}, and none of {wanted}."


def _print_difference(
    found: dict[str, dict[str, Any]], options: argparse.Namespace, sizes: dict[str, int]
) -> None:
    out = console()
    for framework, difference in found.items():
        if not difference:
            out.print(f"{framework}: the same, {sizes[framework]} values", markup=False)
            continue
        rows = [(name, repr(was), repr(now)) for name, (was, now) in difference.items()]
        out.print(f"{framework}: {len(rows)} of {sizes[framework]} values differ", markup=False)
        out.print(f"a: {options.a}", markup=False)
        out.print(f"b: {options.b or f'{framework} in this process, now'}", markup=False)
        out.print(table(("name*", "a*", "b*"), rows))


# --- preset ---

PRESET = """What the presets set in this build, and what they leave out. Used from Python:
with polyattn.torch.flags.deterministic(): ..."""


def _preset(argv: Sequence[str]) -> int:
    made = parser("flags preset", PRESET)
    made.add_argument("name", nargs="?", metavar="NAME")
    options = made.parse_args(_separate(argv))
    flags_of("torch")
    from polyattn.torch.flags.presets import PRESETS

    if options.name not in (None, *PRESETS):
        raise FlagsError(
            f"got the preset {options.name!r}, expected one of {', '.join(PRESETS)}."
            f"{near_matches(options.name, PRESETS)}"
        )
    made_here = [PRESETS[name]() for name in ([options.name] if options.name else PRESETS)]
    if options.json:
        plain = {
            one.name: {"changes": one.changes, "left_out": one.left_out, "remarks": one.remarks}
            for one in made_here
        }
        emit_json(plain, options.json)
    else:
        print("\n\n".join(map(str, made_here)))
    return 0


_ACTIONS: dict[str, Callable[[Sequence[str]], int]] = {
    "show": _show,
    "snapshot": _snapshot,
    "diff": _diff,
    "preset": _preset,
}

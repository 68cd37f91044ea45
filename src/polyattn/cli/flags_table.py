"""How rows of knobs are shown: all in a table of groups, or one with everything known of it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from polyattn.cli.printing import table
from polyattn.errors import FlagsError, MissingDependency, near_matches
from polyattn.flags import Knob, Row
from polyattn.flags.knob import Directory

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "FRAMEWORKS", "details", "find", "flags_of", "groups", "installed", "knob_table",
]  # fmt: skip

FRAMEWORKS = ("torch", "jax")
_PREFIXES = {"torch": ("torch.backends.", "backends.", "torch."), "jax": ("jax.config.", "jax.")}
_HINT = "Did you mean"
_VALUE_WIDTH = 24
_COMMON = 3  # rows from which on a reason is a note of the whole table


def installed() -> tuple[str, ...]:
    """Return the frameworks that can be asked here; importing none."""
    return tuple(name for name in FRAMEWORKS if importlib.util.find_spec(name) is not None)


def flags_of(framework: str) -> ModuleType:
    """Return ``polyattn.torch.flags`` or ``polyattn.jax.flags``, importing the framework."""
    if framework not in installed():
        raise MissingDependency(
            f"got flags of {framework}, which is not installed here; pip install "
            f"'polyattn[{framework}]'."
        )
    return importlib.import_module(f"polyattn.{framework}.flags")


def find(name: str, rows: Sequence[Row], framework: str) -> list[Row]:
    """Return the row of a name, an alias or a full path, or all rows of a group (``cudnn``).

    Raises FlagsError with near matches for an unknown one.
    """
    directory = Directory((row.knob for row in rows), _PREFIXES[framework])
    try:
        knob = directory.find(name)
    except FlagsError as error:
        path = directory.short(name).rstrip(".*")
        group = [row for row in rows if row.name.startswith(f"{path}.")]
        if not group:
            near = near_matches(name, {row.name.partition(".")[0] for row in rows})
            raise FlagsError(f"{error}{'' if _HINT in str(error) else near}", name) from None
        return group
    return [row for row in rows if row.knob is knob]


def groups(knobs: Iterable[Knob], framework: str) -> dict[str, list[Knob]]:
    """Sort knobs by the first part of their names; those of one part belong to the framework."""
    found: dict[str, list[Knob]] = {framework: []}
    for knob in knobs:
        first, dot, _ = knob.name.partition(".")
        found.setdefault(first if dot else framework, []).append(knob)
    return found


def knob_table(rows: Sequence[Row], framework: str) -> Table:
    """Make the table of rows, a heading for each group of names; reasons of many are its notes."""
    by_name = {row.name: row for row in rows}
    notes = _notes(rows)
    cells: list[tuple[Any, ...]] = []
    for group, knobs in groups((row.knob for row in rows), framework).items():
        if knobs:
            cells.append((Text(group, style="bold"), "", "", "", ""))
            cells += [_cells(by_name[knob.name], notes) for knob in knobs]
    made = table(("name", "value", "set", "scope", "what it does*"), cells, f"{framework}'s flags")
    if notes:
        made.caption = Text("\n".join(f"({number}) {why}." for why, number in notes.items()))
        made.caption_justify = "left"
    return made


def _notes(rows: Iterable[Row]) -> dict[str, int]:
    """Number the reasons for not being readable or settable that are the same for many."""
    counts: dict[str, int] = {}
    for row in rows:
        for why in {row.unreadable, row.unsettable}:
            if why and row.knob.kind != "function":
                counts[_anonymous(row, why)] = counts.get(_anonymous(row, why), 0) + 1
    common = [why for why, count in counts.items() if count >= _COMMON]
    return {why: number for number, why in enumerate(common, 1)}


def _anonymous(row: Row, why: str) -> str:
    return why.replace(repr(row.name), "NAME")


def _cells(row: Row, notes: dict[str, int]) -> tuple[str, ...]:
    knob = row.knob
    if knob.kind == "function":
        return f"  {_broken(knob.name)}", "", "", "", " ".join(_remarks(row, notes))
    value = _marked("-", row, row.unreadable, notes) or _wrapped(_text(row.value))
    settable = _marked("no", row, row.unsettable, notes) or "yes"
    remarks = " ".join(_remarks(row, notes))
    return f"  {_broken(knob.name)}", value, settable, knob.scope, remarks


def _marked(word: str, row: Row, why: str, notes: dict[str, int]) -> str:
    if not why:
        return ""
    number = notes.get(_anonymous(row, why))
    return f"{word} ({number})" if number else word


def _remarks(row: Row, notes: dict[str, int]) -> Iterator[str]:
    """What it does, why it cannot be read or set, and what stands in its place."""
    knob = row.knob
    yield knob.about
    if knob.kind != "function":
        for what, why in (("readable", row.unreadable), ("settable", row.unsettable)):
            said = what == "settable" and why == row.unreadable
            if why and not said and _anonymous(row, why) not in notes:
                yield f"Not {what}: {why}."
    if knob.deprecated:
        yield f"Deprecated: {knob.deprecated}."
    if knob.replaced_by and knob.replaced_by != "itself":
        yield f"Instead: {knob.replaced_by}."


def _text(value: object) -> str:
    """A list without quotes: names are told apart by the commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _wrapped(text: str) -> str:
    """Break a long value, at a comma or a space if it has one."""
    lines = [""]
    for word in text.replace(" ", " \0").split("\0"):
        while len(word) > _VALUE_WIDTH:
            lines.append(word[:_VALUE_WIDTH])
            word = word[_VALUE_WIDTH:]
        if len(lines[-1]) + len(word.rstrip()) > _VALUE_WIDTH:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines if line)


def _broken(name: str, width: int = 46) -> str:
    """Break a name too long for its column after a dot."""
    head, dot, leaf = name.rpartition(".")
    return name if len(name) <= width or not dot else f"{head}.\n    {leaf}"


def details(row: Row) -> Table:
    """Make the table of everything known of one knob."""
    return table(("", "*"), list(_facts(row)), row.name)


def _facts(row: Row) -> Iterator[tuple[str, str]]:
    knob = row.knob
    yield "what it does", knob.about
    if knob.kind != "function":
        yield "value", f"not readable: {row.unreadable}" if row.unreadable else repr(row.value)
        yield "settable", "yes" if row.settable else f"no: {row.unsettable}"
        yield "values", _allowed(knob)
        yield "scope", _SCOPES[knob.scope]
    yield "kind", knob.kind
    yield "the framework's", knob.where
    rest = {
        "since": knob.since, "needs": knob.builds, "deprecated": knob.deprecated,
        "instead": "" if knob.replaced_by == "itself" else knob.replaced_by,
        "changes with it": ", ".join(knob.couples), "also called": ", ".join(knob.aliases),
        "freezes": _FREEZES if knob.freezes else "", "trap": knob.trap,
    }  # fmt: skip
    yield from ((name, text) for name, text in rest.items() if text)


_SCOPES = {"process": "the whole process, every thread", "thread": "the thread that sets it"}
_FREEZES = "yes: there comes a moment after which it cannot be set"


def _allowed(knob: Knob) -> str:
    if isinstance(knob.allowed, tuple) and knob.allowed:
        return f"{knob.type}: {', '.join(map(repr, knob.allowed))}"
    least = "" if knob.low is None else f", {knob.low} or more"
    return f"{knob.type}{least}" + (f": {knob.allowed}" if knob.allowed else "")

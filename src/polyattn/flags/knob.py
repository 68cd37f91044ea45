"""A knob: what is known of one setting or query of a framework, and how it stands just now."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from polyattn.errors import FlagsError

__all__ = ["Directory", "Kind", "Knob", "Row", "Scope", "Type", "check_value"]

Kind = Literal["knob", "query", "function"]
Type = Literal["bool", "int", "float", "str", "list", "none"]
Scope = Literal["process", "thread"]


@dataclass(frozen=True, kw_only=True)
class Knob:
    """What is known of one setting, the same on every machine.

    `kind`: a *knob* has a value and, in the builds that have it, can be set; a *query* has a value
    that only the build or the machine changes; a *function* has none (it answers a question or does
    something) and is listed so that its name leads somewhere.

    `scope`: whether setting it changes the whole process or only the thread that sets it. `allowed`
    lists the values, or says in words which they are. `since` is the first version that has it
    (empty: before the oldest that is supported). `couples` names the knobs that change with it.
    """

    name: str
    kind: Kind
    type: Type
    about: str
    where: str
    allowed: tuple[Any, ...] | str = ""
    low: int | None = None
    high: int | None = None
    scope: Scope = "process"
    since: str = ""
    builds: str = ""
    deprecated: str = ""
    replaced_by: str = ""
    couples: tuple[str, ...] = ()
    trap: str = ""
    aliases: tuple[str, ...] = ()
    freezes: bool = False
    volatile: bool = False

    def __post_init__(self) -> None:
        if self.type == "bool" and not self.allowed:
            object.__setattr__(self, "allowed", (False, True))


@dataclass(frozen=True)
class Row:
    """A knob and how it stands now: its value, or why it cannot be read; why it cannot be set."""

    knob: Knob
    value: Any = None
    unreadable: str = ""
    unsettable: str = ""

    @property
    def name(self) -> str:
        """The knob's name."""
        return self.knob.name

    @property
    def readable(self) -> bool:
        """Whether `value` is what the framework says; if not, `unreadable` says why."""
        return not self.unreadable

    @property
    def settable(self) -> bool:
        """Whether it can be set in this build and now; if not, `unsettable` says why."""
        return not self.unsettable

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        state = {
            "value": self.value, "readable": self.readable, "unreadable": self.unreadable,
            "settable": self.settable, "unsettable": self.unsettable,
        }  # fmt: skip
        return asdict(self.knob) | state


_PYTHON: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
}


def check_value(knob: Knob, value: object) -> Any:
    """Return `value` if the knob can take it; raise FlagsError that says what it takes.

    >>> threads = Knob(name="num_threads", kind="knob", type="int", low=1, about="", where="")
    >>> check_value(threads, True)
    Traceback (most recent call last):
    polyattn.errors.FlagsError: got num_threads=True (bool), expected an int, 1 or more.
    """
    python = _PYTHON.get(knob.type, (object,))
    fits = isinstance(value, python) and (knob.type == "bool" or not isinstance(value, bool))
    if fits and isinstance(knob.allowed, tuple) and knob.allowed:
        fits = value in knob.allowed
    if fits and knob.low is not None:
        fits = isinstance(value, int) and knob.low <= value <= (knob.high or value)
    if not fits:
        raise FlagsError(
            f"got {knob.name}={value!r} ({_type_name(value)}), expected {expected(knob)}.",
            knob.name,
        )
    return value


def _type_name(value: object) -> str:
    """NumPy's bool calls itself ``bool`` too."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def expected(knob: Knob) -> str:
    """Say what values a knob takes."""
    if knob.type == "bool":
        return "True or False"
    if isinstance(knob.allowed, tuple) and knob.allowed:
        return "one of " + ", ".join(map(repr, knob.allowed))
    text = {"int": "an int", "float": "a float", "str": "a str", "list": "a list"}.get(
        knob.type, "a value"
    )
    if knob.low is not None:
        text += f" from {knob.low} to {knob.high}" if knob.high else f", {knob.low} or more"
    return f"{text}: {knob.allowed}" if knob.allowed else text


class Directory:
    """The knobs of a framework by name, alias, full dotted path and the framework's setter."""

    def __init__(self, knobs: Iterable[Knob], prefixes: tuple[str, ...] = ()) -> None:
        self._prefixes = prefixes
        self._knobs = {knob.name: knob for knob in knobs}
        self._names: dict[str, str] = {
            alias: k.name for k in self._knobs.values() for alias in k.aliases
        }
        self._names |= {name: name for name in self._knobs}
        places = Counter(knob.where for knob in self._knobs.values())
        for known in self._knobs.values():
            if places[known.where] == 1:  # one that sets several knobs stands for none of them
                self._names.setdefault(self.short(known.where), known.name)

    def short(self, name: str) -> str:
        """Return a dotted path without the parts that all paths of the framework begin with.

        >>> Directory([], ("torch.backends.", "torch.")).short("torch.backends.cudnn")
        'cudnn'
        """
        for prefix in self._prefixes:
            name = name.removeprefix(prefix)
        return name

    def find(self, name: object) -> Knob:
        """Return the knob of that name; raise FlagsError with near matches for an unknown one."""
        if isinstance(name, str):
            for spelling in (name, self.short(name)):
                if spelling in self._names:
                    return self._knobs[self._names[spelling]]
        raise FlagsError(
            f"got the knob {name!r}, which there is not.{self._near(name)} `table()` and "
            "`polyattn flags show` list them all.",
            str(name),
        )

    def _near(self, name: object) -> str:
        text = str(name)
        leaf = text.rpartition(".")[2]
        same_leaf = [known for known in self._names if known.rpartition(".")[2] == leaf]
        close = difflib.get_close_matches(text, self._names, n=3, cutoff=0.6)
        found = list(dict.fromkeys(self._names[near] for near in [*close, *same_leaf]))[:4]
        return f" Did you mean {' or '.join(map(repr, found))}?" if found else ""

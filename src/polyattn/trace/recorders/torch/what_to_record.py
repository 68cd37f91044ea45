"""What a trace is to record: which modules, which statistics, which steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import nn

from polyattn.errors import TraceError, near_matches
from polyattn.settings import steps_of
from polyattn.trace.format.field_checks import LONGEST_TEXT
from polyattn.trace.format.record import Record
from polyattn.trace.recorders.torch.user_statistics import Custom
from polyattn.trace.statistics.schema import DEFAULT_STATISTICS, MOMENTS, SCHEMA, STATISTICS

__all__ = [
    "Chosen", "Layers", "Nothing", "choose_modules", "choose_statistics", "choose_steps",
    "described", "fitting", "settled",
]  # fmt: skip

Layers = (
    str
    | re.Pattern[str]
    | Iterable[str | re.Pattern[str]]
    | Callable[[str, nn.Module], bool]
    | None
)

_ALWAYS = tuple(row.name for row in SCHEMA if row.kind == "fact")
_RESERVED = frozenset({one.name for one in fields(Record)} | {"note", "nested"}) - {
    *_ALWAYS,
    *MOMENTS,
}
"""Names that no function of the user's may have."""

_SHOWN = 12


class Chosen(NamedTuple):
    """Statistics: `names` of the format's own, and `custom` ones as (name, function)."""

    names: tuple[str, ...]
    custom: tuple[Custom, ...] = ()


@dataclass(frozen=True)
class Nothing:
    """What is said of an option that chooses none of a model's `modules`.

    `said`: what was asked for, and `sought` the part of it to find similar names for.
    """

    argument: str
    said: str
    sought: str
    model: str
    modules: tuple[str, ...]

    @property
    def some(self) -> str:
        """A few of the names that there are."""
        return _some(self.modules)

    def error(self) -> TraceError:
        """Return it as the error of a model traced by itself."""
        return TraceError(
            f"got {self.argument}={self.said}, which matches none of the {len(self.modules)} "
            f"modules of this {self.model}.{near_matches(self.sought, self.modules)} It has "
            f"{self.some}."
        )


def choose_modules(model: nn.Module, layers: Layers, argument: str = "layers") -> dict[str, Any]:
    """Return the modules that `layers` names, by name in the model's order.

    `layers`: None for all, the root ``""`` too; a regular expression that is searched for in each
    name; several compiled ones, any of which is; names; or a function of name and module. A module
    with several names has its first one. Raises TraceError where nothing is meant, with near
    matches.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> list(choose_modules(model, None)), list(choose_modules(model, r"^1$"))
    (['', '0', '1'], ['1'])
    """
    found = fitting(model, layers, argument)
    if isinstance(found, Nothing):
        raise found.error()
    return found


def fitting(model: nn.Module, layers: Layers, argument: str) -> dict[str, nn.Module] | Nothing:
    """Return what `choose_modules` does, or what is to be said where nothing fits.

    >>> fitting(nn.Linear(2, 2), "up", "layers").said
    "'up'"
    """
    modules = dict(model.named_modules())
    if layers is None:
        return modules
    found: dict[str, nn.Module]
    if callable(layers):
        found = {name: one for name, one in modules.items() if layers(name, one)}
        sought = getattr(layers, "__name__", type(layers).__name__)
        said = repr(sought)
    elif (patterns := _patterns(layers, argument)) is not None:
        found = {name: m for name, m in modules.items() if any(p.search(name) for p in patterns)}
        said, sought = " or ".join(repr(p.pattern) for p in patterns), patterns[0].pattern
    else:
        names = list(layers)  # type: ignore[arg-type]
        found = _named(model, modules, names, argument)
        said, sought = repr(names)[:200], str(names[0])
    return found or Nothing(argument, said, sought, type(model).__name__, tuple(modules))


def _patterns(layers: Any, argument: str) -> list[re.Pattern[str]] | None:
    """The regular expressions that `layers` is; None if it is names."""
    if isinstance(layers, str | re.Pattern):
        try:
            return [re.compile(layers)]
        except re.error as error:
            raise TraceError(
                f"got {argument}={layers!r}, expected a regular expression, and it is none: "
                f"{error}."
            ) from error
    several = list(layers)
    return several if several and all(isinstance(p, re.Pattern) for p in several) else None


def _named(
    model: nn.Module, modules: dict[str, nn.Module], names: list[Any], argument: str
) -> dict[str, nn.Module]:
    every = dict(model.named_modules(remove_duplicate=False))
    missing = [name for name in names if name not in every]
    if names and len(missing) == len(names):
        return {}
    if missing or not names:
        what = f"{missing[0]!r}, which is no module of" if missing else "no name of a module of"
        raise TraceError(
            f"got {argument} with {what} this {type(model).__name__}."
            f"{near_matches(missing[0], every) if missing else ''} It has {_some(modules)}."
        )
    wanted = {id(every[name]) for name in names}
    return {name: one for name, one in modules.items() if id(one) in wanted}


def _some(modules: Iterable[str]) -> str:
    names = [repr(name) for name in modules if name]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", ".join(names[:_SHOWN]) or "only itself, ''") + more


def choose_statistics(stats: Iterable[str | Custom] | None) -> Chosen:
    """Return what `stats` names: statistics of the format, or pairs of a name and a function.

    None is all that the format has by default. A function takes the tensor and returns a number or
    a tensor; it runs inside the forward, and what it raises goes into the record. Raises TraceError
    for an unknown name, and for a name given twice.

    >>> choose_statistics(["max", "abs_mean", "shape"]).names
    ('max', 'abs_mean')
    """
    if stats is None:
        return Chosen(tuple(name for name in DEFAULT_STATISTICS if name not in _ALWAYS))
    if isinstance(stats, str):
        stats = [name.strip() for name in stats.split(",")]
    names: set[str] = set()
    custom: dict[str, Custom] = {}
    for one in stats:
        if isinstance(one, str):
            if one not in STATISTICS:
                raise TraceError(
                    f"got the statistic {one!r}, expected some of {', '.join(STATISTICS)}."
                    f"{near_matches(one, STATISTICS)}"
                )
            names.add(one)
        else:
            pair = _custom(one)
            if pair[0] in custom:
                raise _twice(pair[0])
            custom[pair[0]] = pair
    if both := names & custom.keys() - set(_ALWAYS):
        raise _twice(min(both))
    chosen = (name for name in STATISTICS if name in names and name not in _ALWAYS)
    return Chosen(tuple(chosen), tuple(custom.values()))


def _custom(one: Any) -> Custom:
    pair = isinstance(one, tuple | list) and len(one) == 2
    named = pair and isinstance(one[0], str) and len(one[0]) <= LONGEST_TEXT
    if not named or not callable(one[1]) or one[0] in _RESERVED:
        raise TraceError(
            f"got the statistic {one!r:.80}, expected a name, or a pair of a name of your own, "
            f"of at most {LONGEST_TEXT} characters, or one of {', '.join((*_ALWAYS, *MOMENTS))}, "
            "and a function of a tensor."
        )
    return one[0], one[1]


def _twice(name: str) -> TraceError:
    return TraceError(f"got the statistic {name!r} twice, expected each once: leave one out.")


def choose_steps(steps: Any) -> frozenset[int] | None:
    """Return the steps to record: numbers, or a text as ``"0,5"`` or ``"0-3"``; None is all.

    >>> sorted(choose_steps("0-2"))
    [0, 1, 2]
    """
    if steps is None:
        return None
    try:
        if isinstance(steps, str):
            return steps_of(steps)
        found = frozenset(one.__index__() for one in ([steps] if type(steps) is int else steps))
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(
            f"got steps={steps!r:.80}, expected numbers, or a text as 0,5 or 0-3 ({error})."
        ) from None
    if not found:
        raise TraceError("got no steps, expected some; leave steps out for all of them.")
    return found


def described(layers: Layers) -> Any:
    """Return `layers` as the header says it."""
    if layers is None or isinstance(layers, str):
        return layers
    if isinstance(layers, re.Pattern):
        return layers.pattern
    if callable(layers):
        return f"function {getattr(layers, '__qualname__', type(layers).__name__)}"
    return [one.pattern if isinstance(one, re.Pattern) else one for one in layers]


def settled(layers: Layers) -> Layers:
    """Return `layers` so that it can be used more than once: an iterator is read.

    >>> settled(iter(["up", "down"]))
    ['up', 'down']
    """
    once = not (layers is None or callable(layers) or isinstance(layers, str | re.Pattern))
    return list(layers) if once else layers  # type: ignore[arg-type]

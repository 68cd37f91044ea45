"""How the frameworks' flags stood in a record: whether it says so soundly, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polyattn import flags as knobs
from polyattn.errors import FlagsError, PolyattnError

__all__ = ["check", "difference", "notes"]

_AGAIN = "make the record again with `polyattn bench`"


def check(record: Mapping[str, Any], where: str) -> None:
    """Raise if a record's snapshots are damaged; one from before they were recorded has none."""
    flags = record.get("flags", {})
    if not isinstance(flags, dict):
        raise PolyattnError(
            f"got {where} with {type(flags).__name__} under 'flags', expected a snapshot for each "
            f"framework; {_AGAIN}."
        )
    for framework, snapshot in flags.items():
        try:
            said = knobs.check(snapshot, f"the flags of {framework}")[knobs.META]["framework"]
        except FlagsError as error:
            raise PolyattnError(f"{where}: {error} Or {_AGAIN}.") from error
        if said != framework:
            raise PolyattnError(
                f"got {where} with a snapshot of {said!r} under {framework!r}, expected one of "
                f"{framework}; {_AGAIN}."
            )


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return, for each framework that both records speak of, the knobs that stood differently."""
    ours, theirs = a.get("flags", {}), b.get("flags", {})
    found = {name: knobs.diff(ours[name], theirs[name]) for name in ours if name in theirs}
    return {name: differing for name, differing in found.items() if differing}


def notes(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return what differs as text, a line a knob, and what one record does not say."""
    said = [
        f"flags of {framework} differ: {line}"
        for framework, differing in difference(a, b).items()
        for line in knobs.lines(differing)
    ]
    silent = [name for name, record in (("a", a), ("b", b)) if "flags" not in record]
    if silent:
        who = " and ".join(silent)
        verb = "do" if len(silent) > 1 else "does"
        return [f"{who} {verb} not say how the frameworks' flags stood: made before that was kept"]
    ours, theirs = a["flags"], b["flags"]
    only = [(name, "b") for name in ours if name not in theirs]
    only += [(name, "a") for name in theirs if name not in ours]
    return said + [f"{who} does not say how the flags of {name} stood" for name, who in only]

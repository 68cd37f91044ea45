"""The first line of a trace: what ran, where, with which weights."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import Any

from polyattn.trace.format import field_checks as checks
from polyattn.trace.format.field_checks import Malformed
from polyattn.trace.format.jsonline import exact

__all__ = ["META", "SCHEMA", "Header", "parse_header"]

META = "polyattn.trace"
SCHEMA = 1
_TEXTS = ("created", "framework")
_TABLES_OF_TEXT = ("versions", "modules")
_TABLES = ("flags", "selection")


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a trace says of its run before the first record. Every field has a default.

    `created`: ISO 8601. `world`: how many ranks there are, `rank` which one this file is of.
    `framework`: torch, jax, numpy or any other. `versions`: of libraries. `flags`: snapshots as of
    ``polyattn.flags``. `seed`. `dtypes`: how many parameters have each. `modules`: the class of
    each module by name. `selection`: what was asked to be recorded. `weights`: fingerprints by the
    parameter's name (:mod:`polyattn.trace.fingerprints`). `argv`: the command. `extra`: names that
    this version does not know, kept.

    >>> Header.new(framework="mlx", seed=3).framework
    'mlx'
    """

    schema: int = SCHEMA
    created: str = ""
    rank: int = 0
    world: int = 1
    framework: str = "numpy"
    versions: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    dtypes: Mapping[str, int] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    selection: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, Any] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def new(cls, **given: Any) -> Header:
        """Return a header of now, this Python and this command, with what is `given`."""
        versions = {"python": platform.python_version()}
        for name in ("polyattn", "numpy"):
            if (module := sys.modules.get(name)) is not None:
                versions[name] = module.__version__
        defaults: dict[str, Any] = {
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "argv": tuple(map(str, sys.argv)),
        }
        return cls(**defaults | given | {"versions": versions | dict(given.get("versions") or {})})

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, the fields in order, what is unknown after them."""
        known = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "extra"}
        return known | dict(self.extra)

    def line(self) -> str:
        """Return the first line of the file, without its newline."""
        return exact({META: self.to_dict()})


def parse_header(raw: Mapping[str, Any]) -> Header:
    """Return the header that the first line holds; raise :class:`Malformed` if it is none."""
    if META not in raw:
        raise Malformed(f"no {META!r} in the first line: this is not a trace of polyattn")
    data = checks.table(raw[META], META)
    schema = checks.integer(data.get("schema"), "schema", 1)
    if schema > SCHEMA:
        raise Malformed(
            f"a trace of schema {schema}, and this version reads up to {SCHEMA}: "
            "install a newer polyattn, or record the run again with this one"
        )
    values: dict[str, Any] = {"schema": schema}
    for name in _TEXTS:
        values[name] = checks.text(data.get(name, ""), name)
    values["rank"] = checks.integer(data.get("rank", 0), "rank")
    values["world"] = checks.integer(data.get("world", 1), "world", 1)
    if values["rank"] >= values["world"]:
        raise Malformed(f"rank {values['rank']} of a world of {values['world']}")
    if data.get("seed") is not None:
        values["seed"] = checks.integer(data["seed"], "seed", -(2**63), 2**64)
    for name in _TABLES_OF_TEXT:
        found = checks.table(data.get(name, {}), name)
        values[name] = {_name(k, name): checks.text(v, name) for k, v in found.items()}
    for name in _TABLES:
        values[name] = checks.plain(checks.table(data.get(name) or {}, name), name)
    dtypes = checks.table(data.get("dtypes", {}), "dtypes")
    values["dtypes"] = {_name(k, "dtypes"): checks.integer(v, "dtypes") for k, v in dtypes.items()}
    values["weights"] = _weights(data.get("weights") or {})
    argv = data.get("argv", [])
    if type(argv) is not list:
        raise Malformed(f"argv {checks.short(argv)}, not a list of texts")
    values["argv"] = tuple(checks.text(one, "argv", 1 << 20) for one in argv)
    known = {one.name for one in fields(Header)}
    extra = {name: checks.plain(data[name], name) for name in data.keys() - known}
    return Header(**values, extra=extra)


def _name(name: str, table: str) -> str:
    return checks.text(name, f"{table}: a name")


def _weights(raw: object) -> dict[str, Any]:
    found = checks.table(raw, "weights")
    for name, fingerprint in found.items():
        checks.plain(checks.table(fingerprint, f"weights of {_name(name, 'weights')!r:.80}"), name)
    return found

"""Records of other machines that are shipped: which are like this one, and what they say.

A record is a JSON file in ``records/``, made by ``scripts/evidence_record.py`` from the record of a
bench, or written down from one that was not ours; it says which. It counts for machines of the same
vendor, family, level of instruction sets and form of the kernels, with a release of torch and a
number of threads that it names, and for no other.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import PolyattnError
from polyattn.selection.evidence.figures import Figure
from polyattn.selection.evidence.problem_kinds import DTYPES, KINDS
from polyattn.selection.processor_kind import Machine

__all__ = ["SCHEMA", "Record", "find", "parse", "shipped"]

SCHEMA = "polyattn.evidence/1"


@dataclass(frozen=True)
class Record:
    """What was measured on one kind of machine, and which machines it counts for."""

    name: str
    hardware: str
    vendor: str
    families: tuple[int, ...]
    level: str
    isa: str
    bfloat16: str
    torch: tuple[str, ...]
    threads: tuple[int, int]
    command: str
    figures: Mapping[tuple[str, str], Figure]

    def fits(self, machine: Machine) -> bool:
        """Say whether the record counts for a machine; a release or threads not told are no bar."""
        return (
            machine.vendor == self.vendor
            and machine.family in self.families
            and machine.level == self.level
            and machine.isa in (None, self.isa)
            and (machine.torch is None or machine.torch in self.torch)
            and (machine.threads is None or self.threads[0] <= machine.threads <= self.threads[1])
        )

    def figures_for(self, machine: Machine) -> dict[tuple[str, str], Figure]:
        """Return the figures that count for a machine which the record fits.

        Where another form of the kernels runs bfloat16 there, those of many rows are not its own.
        """
        own = machine.bfloat16 in (None, self.bfloat16)
        return {
            (dtype, kind): figure
            for (dtype, kind), figure in self.figures.items()
            if own or dtype != "bfloat16" or "decode" in kind
        }


def find(machine: Machine, among: Iterable[Record] | None = None) -> Record | None:
    """Return the record that counts for a machine, if there is one.

    >>> find(Machine("GenuineIntel", 6, "amx", "2.13", 2)).name
    'intel-amx'
    >>> find(Machine("GenuineIntel", 6, "avx2", "2.13", 2)) is None
    True
    """
    return next((r for r in (shipped() if among is None else among) if r.fits(machine)), None)


@functools.lru_cache(maxsize=1)
def shipped() -> tuple[Record, ...]:
    """Return the records of this package, in order of their names."""
    from importlib import resources  # here: importing polyattn stays as quick as it was

    folder = resources.files("polyattn.selection.evidence") / "records"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".json")), key=lambda f: f.name)
    return tuple(parse(f.read_text(encoding="utf-8"), f.name) for f in files)


def parse(text: str, name: str) -> Record:
    """Read a record; `name` is its file's, for errors.

    Raises :class:`~polyattn.errors.PolyattnError` for what is no record of this schema.
    """
    try:
        return _read(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolyattnError(
            f"got {name}, expected a record of evidence ({type(error).__name__}: {error}); make it "
            "with scripts/evidence_record.py."
        ) from error


def _read(data: Any) -> Record:
    if data["schema"] != SCHEMA:
        raise ValueError(f"schema {data['schema']!r}, expected {SCHEMA!r}")
    fits, made = data["matches"], data["made"]
    low, high = fits["threads"]
    where = f"{data['hardware']}, {made['threads']} threads, torch {made['torch']}"
    source = f"by {made['command']} on {where}"
    return Record(
        str(data["name"]), str(data["hardware"]), str(fits["vendor"]),
        tuple(map(int, fits["families"])), str(fits["level"]), str(fits["isa"]),
        str(fits["bfloat16"]), tuple(map(str, fits["torch"])), (int(low), int(high)),
        str(made["command"]), dict(_figures(data["figures"], source)),
    )  # fmt: skip


def _figures(data: Any, source: str) -> Iterable[tuple[tuple[str, str], Figure]]:
    for dtype, kinds in data.items():
        for kind, one in kinds.items():
            if dtype not in DTYPES or kind not in KINDS:
                raise ValueError(f"figures of {dtype} {kind}, expected one of {', '.join(KINDS)}")
            low, median, high = float(one["low"]), float(one["median"]), float(one["high"])
            if not 0 < low <= median <= high or int(one["problems"]) < 1:
                raise ValueError(f"figures of {dtype} {kind} that do not ascend from above 0")
            yield (dtype, kind), Figure(low, median, high, source)

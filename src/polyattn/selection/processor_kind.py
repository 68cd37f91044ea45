"""The machine that evidence is about, as far as it makes kernels faster or slower."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.problem.machine import Facts
from polyattn.problem.processor import identity, instruction_sets, level_of

__all__ = ["Machine", "release_of"]


@dataclass(frozen=True)
class Machine:
    """A processor, torch's release there, and the threads; None: not told.

    `level`: the best instruction set that kernels are written for
    (:func:`polyattn.problem.processor.level_of`). `isa`: the form of the native kernels that runs;
    `bfloat16`: the one that runs bfloat16 problems with many rows.
    """

    vendor: str | None
    family: int | None
    level: str | None
    torch: str | None = None
    threads: int | None = None
    isa: str | None = None
    bfloat16: str | None = None

    @classmethod
    def here(
        cls, torch: str, threads: int, isa: str | None = None, bfloat16: str | None = None
    ) -> Machine:
        """Return this machine; `torch` is the installed version.

        >>> Machine.here("2.13.0+cpu", 2).torch
        '2.13'
        """
        who, level = identity(), level_of(instruction_sets())
        return cls(who.vendor, who.family, level, release_of(torch), threads, isa, bfloat16)

    @classmethod
    def told(cls, facts: Facts) -> Machine:
        """Return the machine that facts tell of; its threads are not told.

        >>> Machine.told(Facts.parse("zen4", {"torch": "2.13.0"}))
        Machine(vendor='AuthenticAMD', family=25, level='avx512bf16', torch='2.13', threads=None, \
isa=None, bfloat16=None)
        """
        version = facts.packages.get("torch")
        torch = None if version is None else release_of(version)
        return cls(facts.vendor, facts.family, level_of(facts.instructions), torch)


def release_of(version: str) -> str:
    """Return major and minor of a version.

    >>> release_of("2.13.0a1+cpu")
    '2.13'
    """
    return ".".join(version.split(".")[:2])

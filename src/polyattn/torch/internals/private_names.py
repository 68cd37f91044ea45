"""What is known of a private name of torch, and how one is looked up: safely, and only once.

A row says where the name is, in which versions it was seen, and what is done in a torch without
it. Every name that polyattn uses has one; `ROWS` holds them, and a test compares them with torch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import torch

from polyattn.errors import MissingDependency

__all__ = ["ALL", "LOOKED_AT", "MISSING", "ROWS", "Private", "deferred", "noted", "private"]

LOOKED_AT = ("2.9", "2.13", "2.15")
"""The versions of torch that the rows were compared with (`scripts/try_versions` does it again)."""
ALL = LOOKED_AT

MISSING: Any = type(
    "Missing", (), {"__repr__": lambda self: "MISSING", "__bool__": lambda _: False}
)()
"""What a look-up finds where there is nothing."""


@dataclass(frozen=True)
class Private:
    """One private name: its place, the versions it was seen in, and what happens without it.

    `build`: the builds that have it, where others do not. `sample` makes what a name is looked up
    on that its class does not show, such as an instance.
    """

    path: str
    otherwise: str
    seen: tuple[str, ...] = ALL
    build: str = ""
    sample: Callable[[], Any] | None = None

    @property
    def name(self) -> str:
        """The name itself, without its place."""
        return self.path.rpartition(".")[2]

    def find(self) -> Any:
        """Return what torch has under the name, or MISSING; imports what that takes."""
        if self.sample is not None:
            return getattr(self.sample(), self.name, MISSING)
        found: Any = torch
        parts = self.path.split(".")
        for count, part in enumerate(parts[1:], 2):
            # the module first: torch gives some of its functions the name of their file
            inside = sys.modules.get(".".join(parts[:count])) or getattr(found, part, MISSING)
            if inside is MISSING and isinstance(found, ModuleType):
                inside = _module(".".join(parts[:count]))
            if inside is MISSING:
                return MISSING
            found = inside
        return found

    def refuse(self, *_: object, **__: object) -> NoReturn:
        """Raise the error of what cannot be done without the name."""
        raise MissingDependency(
            f"got torch {torch.__version__}, which has no {self.path}, expected one that has "
            f"(polyattn saw it in {', '.join(self.seen)}). Without it: {self.otherwise}."
        )


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return MISSING


ROWS: dict[str, Private] = {}
"""Every private name of torch that polyattn uses, by its path."""


def noted(
    path: str,
    otherwise: str,
    *,
    seen: tuple[str, ...] = ALL,
    build: str = "",
    sample: Callable[[], Any] | None = None,
) -> Private:
    """Declare a name that is looked up by whoever asks for it."""
    return ROWS.setdefault(path, Private(path, otherwise, seen, build, sample))


def private(path: str, otherwise: str, instead: Any = MISSING, **facts: Any) -> Any:
    """Declare a name and return what it stands for: the very object, so that a call costs no more.

    Where torch lacks it: `instead`, or else a function that refuses with a clear error.
    """
    row = noted(path, otherwise, **facts)
    found = row.find()
    if found is not MISSING:
        return found
    return row.refuse if instead is MISSING else instead


def deferred(path: str, otherwise: str, instead: Any = MISSING, **facts: Any) -> Callable[[], Any]:
    """Declare a name in a part of torch that is slow to import; the function returned looks it up.

    Where torch lacks it: `instead`, or else the clear error at the first look-up.
    """
    row = noted(path, otherwise, **facts)

    @functools.cache
    def look_up() -> Any:
        found = row.find()
        if found is MISSING and instead is MISSING:
            row.refuse()
        return instead if found is MISSING else found

    return look_up

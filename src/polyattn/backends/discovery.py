"""Finds the folders of kernels, and has each declare what is in it."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

from polyattn import backends
from polyattn.selection.registry import Registry

__all__ = ["declare"]


class Declaration(Protocol):
    """A kernel's ``declared.py``. `PLACE`: where it stands among the others, from 0 on.

    That is the order of lists, and of choice on a device of which heuristics say nothing.
    """

    PLACE: int

    def declare(self, registry: Registry) -> None: ...


def declare(registry: Registry) -> None:
    """Register every kernel of this package."""
    folders = [found.name for found in pkgutil.iter_modules(backends.__path__) if found.ispkg]
    found: list[Declaration] = [
        importlib.import_module(f"{__package__}.{folder}.declared") for folder in folders
    ]
    for declaration in sorted(found, key=lambda each: each.PLACE):
        declaration.declare(registry)

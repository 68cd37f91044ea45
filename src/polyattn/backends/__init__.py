"""One folder a kernel: what it declares, and its implementation for each framework.

``<kernel>/declared.py`` imports no framework: it registers what the kernel can run. Beside it are
``torch.py``, ``jax.py`` or ``numpy.py``, or folders of these names, which are imported when the
kernel is loaded. No kernel knows of another. A new one is a new folder here, and a row of
`polyattn.selection.heuristics` if it may be chosen by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Protocol

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
    folders = [found.name for found in pkgutil.iter_modules(__path__) if found.ispkg]
    found: list[Declaration] = [
        importlib.import_module(f"{__name__}.{folder}.declared") for folder in folders
    ]
    for declaration in sorted(found, key=lambda each: each.PLACE):
        declaration.declare(registry)

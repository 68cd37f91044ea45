"""The extension, where it was compiled with this schema: another writes beyond what rows hold."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

from polyattn.errors import MissingDependency
from polyattn.native import module
from polyattn.trace.statistics.schema import LAYOUT

__all__ = ["load"]

logger = logging.getLogger("polyattn.trace")


@functools.cache
def load(protocol: str = "") -> ModuleType:
    """Return the extension; raise MissingDependency where there is none that fits, and log which.

    `protocol`: how it is to take events too (``recorders/torch/native_protocol.py``).
    """
    found = module.load()
    built = found.build()
    expected = {"statistics": LAYOUT} | ({"trace_protocol": protocol} if protocol else {})
    for name, wanted in expected.items():
        if (got := built.get(name)) != wanted:
            error = MissingDependency(
                f"got native CPU kernels that were built from other sources than this polyattn "
                f"({name} {got!r}, expected {wanted!r}), so traces are recorded without them, "
                f"slower. To have them: {module.how_to_build()}."
            )
            logger.warning("%s", error)
            raise error
    return found

"""XLA's own emitters for programs that do little but compile: MLIR's take twice as long to."""

from __future__ import annotations

from importlib import metadata

__all__ = ["short_compilation"]


def short_compilation() -> str:
    """Return the switch, or nothing where jaxlib is another: XLA ends a process over unknown ones.

    Not for programs that compute much, which it makes slower; most tests compile as users do.
    """
    try:
        known = metadata.version("jaxlib").startswith("0.10.")
    except metadata.PackageNotFoundError:
        return ""
    return "--xla_cpu_use_fusion_emitters=false" if known else ""

"""Isolation: each module of a port, run on the reference's own tensors. See ``docs/isolate.md``."""

from polyattn.trace.isolate.judging import isolate

__all__ = ["isolate"]

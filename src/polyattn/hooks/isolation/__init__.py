"""Isolation: each module of a port, run on the reference's own tensors. See ``docs/isolate.md``."""

from polyattn.hooks.isolation.isolate import isolate

__all__ = ["isolate"]

"""Knobs of frameworks: what is known of them, snapshots, and scopes that are undone exactly.

Framework-free; ``polyattn.torch.flags`` and ``polyattn.jax.flags`` hold the tables.
"""

from polyattn.knobs.knob import Knob, Row
from polyattn.knobs.snapshot import ABSENT, META, check, diff, lines, make, read, read_all
from polyattn.knobs.stack import FlagsConflictWarning

__all__ = [
    "ABSENT", "META", "FlagsConflictWarning", "Knob", "Row",
    "check", "diff", "lines", "make", "read", "read_all",
]  # fmt: skip

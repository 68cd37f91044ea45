"""Knobs of frameworks: what is known of them, snapshots, and scopes that are undone exactly.

Framework-free; ``polyattn.torch.flags`` and ``polyattn.jax.flags`` hold the tables.
"""

from polyattn.flags.knob import Knob, Row
from polyattn.flags.snapshot import ABSENT, META, check, diff, lines, make, read, read_all
from polyattn.flags.stack import FlagsConflictWarning

__all__ = [
    "ABSENT", "META", "FlagsConflictWarning", "Knob", "Row",
    "check", "diff", "lines", "make", "read", "read_all",
]  # fmt: skip

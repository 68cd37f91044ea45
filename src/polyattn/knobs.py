"""A face: what is known of the frameworks' switches is `polyattn.flags`, and keeps this name."""

from polyattn.flags import (
    ABSENT,
    META,
    FlagsConflictWarning,
    Knob,
    Row,
    check,
    diff,
    lines,
    make,
    read,
    read_all,
)

__all__ = [
    "ABSENT", "META", "FlagsConflictWarning", "Knob", "Row",
    "check", "diff", "lines", "make", "read", "read_all",
]  # fmt: skip

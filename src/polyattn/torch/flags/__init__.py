"""Torch's global switches under control: one table, snapshots, and scopes that are undone exactly.

``table()`` lists every knob and query of ``torch.backends`` and its relatives; ``flags(...)`` sets
some of them for a while; ``snapshot()``, ``diff(a, b)`` and ``apply(snapshot)`` record, compare and
restore how everything stands. Importing this changes nothing.

>>> from polyattn.torch.flags import diff, flags, snapshot
>>> before = snapshot()
>>> with flags(**{"cudnn.benchmark": True}):
...     diff(before, snapshot())
{'cudnn.benchmark': (False, True)}
>>> diff(before, snapshot())
{}
"""

from polyattn.flags import FlagsConflictWarning, Knob, Row, diff
from polyattn.torch.flags.can_use import (
    CanUse,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
    can_use_math_attention,
)
from polyattn.torch.flags.presets import Preset, deterministic, fastest, full_precision
from polyattn.torch.flags.priority import sdpa_priority
from polyattn.torch.flags.scope import FlagScope, apply, flags
from polyattn.torch.flags.tables import snapshot, table
from polyattn.torch.flags.torch_reasons import by_backend, torch_says, translate

__all__ = [
    "FlagScope", "FlagsConflictWarning", "Knob", "Preset", "Row",
    "flags", "snapshot", "diff", "apply", "table",
    "deterministic", "fastest", "full_precision", "sdpa_priority",
    "CanUse", "can_use_cudnn_attention", "can_use_efficient_attention", "can_use_flash_attention",
    "can_use_math_attention", "by_backend", "torch_says", "translate",
]  # fmt: skip

"""What a call of attention is part of: training, a prompt, a token, or a piece of a prompt."""

from __future__ import annotations

from typing import Any

from polyattn.errors import InvalidProblem, near_matches

__all__ = [
    "AUTOREGRESSIVE", "GENERATION_MODES", "INSERT", "MODES", "PREFILL", "TRAIN", "check_mode",
    "guess_mode",
]  # fmt: skip

TRAIN, PREFILL = "__train__", "__prefill__"
AUTOREGRESSIVE, INSERT = "__autoregressive__", "__insert__"
MODES = (TRAIN, PREFILL, AUTOREGRESSIVE, INSERT)
GENERATION_MODES = frozenset({AUTOREGRESSIVE, INSERT})
"""The modes in which keys are those of a cache."""


def check_mode(mode: Any) -> str:
    """Return a mode; raise :class:`InvalidProblem` for what is none.

    >>> check_mode("__prefill__")
    '__prefill__'
    """
    if mode not in MODES:
        raise InvalidProblem(
            f"got mode={mode!r}, expected one of {', '.join(MODES)}."
            f"{near_matches(str(mode), MODES)}"
        )
    return str(mode)


def guess_mode(q: Any, BTHD: bool = True) -> str:
    """Guess from the query: one row is a token that is generated, more are training.

    A prompt of one token and a piece of a prompt look like something else: say the mode there.
    """
    if getattr(q, "ndim", 0) != 4:
        raise InvalidProblem(
            f"got a query of shape {getattr(q, 'shape', None)}, expected four dims to guess the "
            "mode from; say the mode."
        )
    return AUTOREGRESSIVE if q.shape[1 if BTHD else 2] == 1 else TRAIN

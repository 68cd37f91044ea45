"""The coordinates at which masks are asked, and where their diagonal lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Align", "Index"]

Align = Literal["bottom_right", "top_left"]


@dataclass(frozen=True)
class Index:
    """The coordinates at which a mask is asked: integers or broadcastable integer arrays.

    `t` and `j` count within a sequence; `b` is the batch entry, or the sequence when packed.
    """

    b: Any
    n: Any
    t: Any
    j: Any
    q_len: Any
    kv_len: Any
    align: str = "bottom_right"
    same_sequence: Any = True
    q_token: Any = None  # the query's place in the packed row, when that is not `t`
    kv_token: Any = None

    @property
    def diagonal(self) -> Any:
        """The key position that query `t` stands at."""
        return self.t if self.align == "top_left" else self.t + (self.kv_len - self.q_len)

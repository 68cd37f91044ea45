"""Where the queries and keys of one call stand in their sequences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from polyattn.masks.index import Align

__all__ = ["Frame"]


@dataclass(frozen=True)
class Frame:
    """Query `t` of `queries` stands at ``t + q_offset``, key `j` of `keys` at ``j + kv_offset``."""

    batch: int
    queries: int
    keys: int
    q_offset: int
    kv_offset: int
    device: Any = "cpu"

    @property
    def distance(self) -> int:
        """The key at which the first query stands."""
        return self.q_offset - self.kv_offset

    @property
    def align(self) -> Align | None:
        """How masks that positions determine lie; None: as polyattn has no name for.

        >>> Frame(1, 2, 6, 4, 0).align, Frame(1, 2, 6, 0, 0).align, Frame(1, 2, 6, 3, 0).align
        ('bottom_right', 'top_left', None)
        """
        if self.distance == self.keys - self.queries:
            return "bottom_right"
        return "top_left" if self.distance == 0 else None

    def without_the_future(self) -> Frame:
        """Return the frame up to the last query's own key; the keys after it are seen by nobody.

        >>> Frame(1, 2, 9, 3, 0).without_the_future().keys
        5
        """
        end = self.distance + self.queries
        return replace(self, keys=end) if self.queries <= end <= self.keys else self

    def query_positions(self) -> torch.Tensor:
        """Where the queries stand, (T,)."""
        return torch.arange(self.queries, device=self.device) + self.q_offset

    def key_positions(self) -> torch.Tensor:
        """Where the keys stand, (S,)."""
        return torch.arange(self.keys, device=self.device) + self.kv_offset

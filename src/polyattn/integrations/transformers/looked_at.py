"""A mask function that is not the library's, read by what it says: a band of keys, or not.

Models bring functions of their own, windows to both sides above all. A few rows tell whether one
may be a band; then all that it says is compared with that band, so nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.integrations.transformers.frame import Frame
from polyattn.integrations.transformers.library import library
from polyattn.integrations.transformers.padding import is_readable
from polyattn.masks import Full, Mask, Window

__all__ = ["band"]


class _Band(NamedTuple):
    """Query t sees the keys from ``t + first`` to ``t + last``, each None where there is no end."""

    first: int | None
    last: int | None

    def holds(self, whole: Tensor) -> bool:
        """Say whether (B, 1, T, S) booleans are this band, all of them."""
        rows = torch.arange(whole.shape[-2], device=whole.device)[:, None]
        keys = torch.arange(whole.shape[-1], device=whole.device)
        seen = torch.ones((), dtype=torch.bool, device=whole.device)
        if self.first is not None:
            seen = seen & (keys >= rows + self.first)
        if self.last is not None:
            seen = seen & (keys <= rows + self.last)
        return bool((whole == seen).all())


def band(function: Callable[..., Any], frame: Frame, use_vmap: bool) -> Mask | None:
    """Return the Window, or Full, that a mask function is in `frame`; None if it is none.

    >>> function = lambda batch, head, q, k: (q - k).abs() < 3
    >>> band(function, Frame(1, 8, 8, 0, 0), False)
    Window(left=2, right=2)
    >>> band(lambda batch, head, q, k: (q + k) % 2 == 0, Frame(1, 8, 8, 0, 0), False)
    """
    if not is_readable(torch.empty(0, device=frame.device)):
        return None

    def said(first: int, queries: int) -> Tensor:
        found: Tensor = library().masking.sdpa_mask(
            frame.batch,
            queries,
            frame.keys,
            q_offset=frame.q_offset + first,
            kv_offset=frame.kv_offset,
            mask_function=function,
            attention_mask=None,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            use_vmap=use_vmap,
            device=frame.device,
        )
        return found

    rows = sorted({0, frame.queries // 2, frame.queries - 1})
    found = _through({row: said(row, 1) for row in rows})
    if found is None or not found.holds(said(0, frame.queries)):
        return None
    if found == (None, None):
        return Full()
    apart = frame.keys - frame.queries  # a Window is measured from the last query and key
    left = None if found.first is None else apart - found.first
    right = None if found.last is None else found.last - apart
    if (left is not None and left < 0) or (right is not None and right < 0):
        return None
    return Window(left=left, right=right)


def _through(rows: dict[int, Tensor]) -> _Band | None:
    """Return the band that goes through some rows, (B, 1, 1, S) each; None if there is none."""
    firsts, lasts = set(), set()
    for row, seen in rows.items():
        keys = seen[0].flatten().nonzero().flatten().tolist()
        if not keys or len(keys) != keys[-1] - keys[0] + 1:
            return None
        if keys[0]:
            firsts.add(keys[0] - row)
        if keys[-1] < seen.shape[-1] - 1:
            lasts.add(keys[-1] - row)
    if len(firsts) > 1 or len(lasts) > 1:
        return None
    return _Band(next(iter(firsts), None), next(iter(lasts), None))

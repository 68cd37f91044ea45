"""A mask function of transformers, read as a mask of polyattn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.integrations.transformers.composed import factory_of, held
from polyattn.integrations.transformers.frame import Frame
from polyattn.integrations.transformers.padding import keys_of, padding_mask
from polyattn.masks import Causal, Chunked, Full, Mask, Segments, Window

__all__ = ["read"]


def read(function: Callable[..., Any], frame: Frame, left_padding: bool) -> Mask | None:
    """Return the mask that `function` means in `frame`, or None if it is not known.

    `left_padding`: whether some sequence may begin after position 0.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> read(sliding_window_causal_mask_function(4), Frame(1, 8, 8, 0, 0), False)
    Window(left=3, right=None) & Causal()
    """
    try:
        mask = _Reader(frame, left_padding).read(function)
    except (KeyError, _Unknown):
        return None
    windows = any(isinstance(leaf, (Window, Chunked)) for leaf in mask.leaves())
    if windows and (mask.align or "bottom_right") != frame.align:
        return None  # nothing says that they are measured from the top left
    return mask


class _Unknown(Exception):
    """A mask function that is not the library's, or stands where none is expected."""


class _Reader:
    def __init__(self, frame: Frame, left_padding: bool) -> None:
        self.frame, self.left_padding = frame, left_padding
        self.positions: Tensor | None = None  # of tokens within packed sequences, (B, T)

    def read(self, function: Callable[..., Any]) -> Mask:
        kind = factory_of(function)
        if kind is None:
            raise _Unknown
        return _READERS[kind](self, function)

    def every(self, function: Any) -> Mask:
        members = held(function, "mask_functions")
        packed = [x for x in members if factory_of(x) == "packed"]
        mask: Mask = Full()
        for member in members:
            if packed and factory_of(member) == "positions":
                mask = mask & self.within(member)
            else:
                mask = mask & self.read(member)
        return mask

    def any(self, function: Any) -> Mask:
        members = held(function, "mask_functions")
        if not members:
            raise _Unknown
        mask = self.read(members[0])
        for member in members[1:]:
            mask = mask | self.read(member)
        return mask

    def within(self, function: Any) -> Mask:
        """Read what is said of positions within packed sequences, beside the mask of these.

        Positions rise by one within a sequence: what lies between two tokens is what lies
        between their places in the row.
        """
        if self.positions is not None or self.frame.q_offset or self.frame.kv_offset:
            raise _Unknown
        self.positions = held(function, "position_ids")
        try:
            return self.read(held(function, "mask_function"))
        finally:
            self.positions = None

    def causal(self, function: Any) -> Mask:
        if self.frame.align is None:
            raise _Unknown
        return Causal(self.frame.align)

    def everything(self, function: Any) -> Mask:
        return Full()

    def window(self, function: Any) -> Mask:
        return Window(left=_count(held(function, "sliding_window")) - 1)

    def both_sides(self, function: Any) -> Mask:
        size = _count(held(function, "sliding_window"))
        return Window(left=size, right=size)

    def chunk(self, function: Any) -> Mask:
        size, skipped = _count(held(function, "chunk_size")), held(function, "left_padding")
        whole = self.frame.kv_offset % size == 0 and self.frame.align is not None
        if whole and not self.left_padding and self.positions is None:
            return Chunked(size)
        if self.positions is not None:
            places = (self.positions - skipped[:, None]) // size
            return Segments(places, places)
        queries, keys = self.frame.query_positions(), self.frame.key_positions()
        return Segments((queries - skipped[:, None]) // size, (keys - skipped[:, None]) // size)

    def blocks(self, function: Any) -> Mask:
        ids, frame = held(function, "block_sequence_ids"), self.frame
        queries = self.part(ids, frame.q_offset, frame.queries)
        keys = self.part(ids, frame.kv_offset, frame.keys)
        # -1 is in no block, and so like no other
        return Segments(queries.clamp(min=-1), torch.where(keys < 0, -2, keys))

    def packed(self, function: Any) -> Mask:
        ids, frame = held(function, "packed_sequence_mask"), self.frame
        queries = self.part(ids, frame.q_offset, frame.queries)
        return Segments(queries, self.part(ids, frame.kv_offset, frame.keys))

    def padding(self, function: Any) -> Mask:
        real, frame = held(function, "padding_mask"), self.frame
        return padding_mask(keys_of(real, frame.batch, frame.kv_offset, frame.keys))

    def part(self, ids: Tensor, first: int, count: int) -> Tensor:
        found = ids[:, first : first + count]
        if found.shape[1] != count:
            raise _Unknown  # it reads past its end, for the library to say
        return found.expand(self.frame.batch, -1)


def _count(size: Any) -> int:
    if type(size) is not int or size < 1:
        raise _Unknown
    return size


_READERS: dict[str, Callable[[_Reader, Any], Mask]] = {
    "and": _Reader.every,
    "or": _Reader.any,
    "causal": _Reader.causal,
    "everything": _Reader.everything,
    "window": _Reader.window,
    "both sides": _Reader.both_sides,
    "chunk": _Reader.chunk,
    "blocks": _Reader.blocks,
    "packed": _Reader.packed,
    "padding": _Reader.padding,
}

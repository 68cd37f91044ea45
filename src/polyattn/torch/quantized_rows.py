"""The codes of rows that come one after the other: the keys of a cache, or its values.

Dims are (B, rows, K, H) throughout, whatever the layout in memory. The rows of the open block and
of the full one before it are kept as they came, in float32: whenever the largest magnitude of the
open block rises, or rows are taken back, its codes are made anew from these. So each entry is
rounded once, and codes and scales are those of :func:`~polyattn.torch.quantize.quantize_kv`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from polyattn.torch.kit.quantised import scales_of_rows
from polyattn.torch.quantize import (
    check_finite,
    encode,
    largest_of_blocks,
    largest_of_rows,
    scales_for,
)

__all__ = ["QuantizedRows"]


class QuantizedRows:
    """Codes and scales of `length` rows; `kept_from`: the first row that is kept as it came.

    `names`: what the rows are, for errors: equal parts of the batch.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, int, int, int],
        dtype: str,
        block_size: int,
        heads_second: bool,
        device: torch.device,
    ) -> None:
        batch, capacity, heads, dim = sizes
        self.names, self.dtype, self.block_size = names, dtype, block_size
        self.length = self.kept_from = 0
        self._heads_second = heads_second
        with torch.inference_mode(False):  # so that it can be written to outside of it, too
            rows = (batch, capacity, heads, dim)
            self.codes = _empty(rows, getattr(torch, dtype), device, heads_second)
            blocks, recent = -(-capacity // block_size), min(capacity, 2 * block_size)
            # float32 whatever the default is
            wide = functools.partial(torch.zeros, dtype=torch.float32, device=device)
            self.scales = wide((batch, heads, blocks))
            self._recent = wide((batch, recent, heads, dim))
            # of the open block: the largest magnitude of each head, and the scale, (B, 1, K, 1)
            self._largest = wide((batch, heads))
            self._scale = wide((batch, 1, heads, 1))

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and the rows that are kept, unused capacity included."""
        return sum(x.numel() * x.element_size() for x in (self.codes, self.scales, self._recent))

    def reserve(self, length: int) -> None:
        """Make room for `length` rows: twice what there was, or more."""
        if length > self.codes.shape[1]:
            rows = max(length, 2 * self.codes.shape[1])
            self.codes = _longer(self.codes, 1, rows, self.length, self._heads_second)
            blocks = -(-self.length // self.block_size)
            self.scales = _longer(self.scales, 2, -(-rows // self.block_size), blocks)
        held, most = self._recent.shape[1], 2 * self.block_size
        # rows that end a block are written before the block behind it takes their place
        needed = min(length - self.kept_from, most)
        if needed > held:
            rows = min(max(needed, 2 * held), most)
            self._recent = _longer(self._recent, 1, rows, self.length - self.kept_from)

    def staged(self, x: Tensor) -> Callable[[], None]:
        """Check further rows and return what adds them; until that runs, nothing has changed."""
        if self.length % self.block_size + x.shape[1] <= self.block_size:
            return self._staged_in_block(x)
        return self._staged_over_blocks(x)

    def _staged_in_block(self, x: Tensor) -> Callable[[], None]:
        """Add rows that the open block has room for, as decoding does: few operations."""
        length, count = self.length, x.shape[1]
        filled = length % self.block_size
        largest = largest_of_rows(x)
        largest = largest[:, 0] if count == 1 else largest.amax(1)
        rises = not (filled and bool((largest <= self._largest).all()))  # NaN is not <= anything
        if rises:
            self._check_finite(largest)
            largest = torch.maximum(self._largest, largest) if filled else largest

        def add() -> None:
            at = length - self.kept_from
            rows = self._recent[:, at : at + count]
            rows.copy_(x)
            self.length = length + count
            if rises:
                self._largest = largest
                self._encode_block()
            else:
                encode(self.codes[:, length : length + count], rows, self._scale)
            if filled + count == self.block_size:
                self._close()

        return add

    def _staged_over_blocks(self, x: Tensor) -> Callable[[], None]:
        """Add rows that reach beyond the open block, with those that it has."""
        length, block = self.length + x.shape[1], self.block_size
        filled = self.length % block
        start, at = self.length - filled, self.length - self.kept_from
        rows = torch.cat((self._recent[:, at - filled : at], x.float()), 1) if filled else x
        each = largest_of_rows(rows)
        self._check_finite(each)
        scales = scales_for(largest_of_blocks(each, block), self.dtype)
        of_rows = scales_of_rows(scales, rows.shape[1], block).transpose(1, 2)

        def add() -> None:
            encode(self.codes[:, start:length], rows, of_rows[..., None])
            self.scales[:, :, start // block : -(-length // block)] = scales
            self.length, self.kept_from = length, (length // block - 1) * block
            self._recent[:, : length - self.kept_from] = rows[:, self.kept_from - start :]
            if opened := length % block:
                self._largest = each[:, -opened:].amax(1)
                self._scale = scales[:, None, :, -1, None]

        return add

    def truncate(self, length: int) -> None:
        """Take rows back, to a length of which the rows are kept or that ends a block."""
        self.length = length
        self.kept_from = min(self.kept_from, length)
        if filled := length % self.block_size:
            at = length - self.kept_from
            self._largest = largest_of_rows(self._recent[:, at - filled : at]).amax(1)
            self._encode_block()

    def _encode_block(self) -> None:
        """Make scale and codes of the last block, which holds the last row, from its rows."""
        block = (self.length - 1) // self.block_size
        start, end = block * self.block_size, self.length
        scales = scales_for(self._largest, self.dtype)
        self.scales[:, :, block] = scales
        self._scale = scales[:, None, :, None]
        rows = self._recent[:, start - self.kept_from : end - self.kept_from]
        encode(self.codes[:, start:end], rows, self._scale)

    def _check_finite(self, largest: Tensor) -> None:
        for name, part in zip(self.names, largest.tensor_split(len(self.names)), strict=True):
            check_finite(name, part)

    def _close(self) -> None:
        """Keep of the rows only those of the block that has just become full."""
        block = self.block_size
        if self.length - self.kept_from == 2 * block:
            self._recent[:, :block] = self._recent[:, block:]
            self.kept_from += block


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, heads_second: bool
) -> Tensor:
    """Allocate an array; `heads_second`: its heads lie outside of its rows in memory."""
    if not heads_second:
        return torch.empty(shape, dtype=dtype, device=device)
    batch, rows, heads, width = shape
    return torch.empty((batch, heads, rows, width), dtype=dtype, device=device).transpose(1, 2)


def _longer(x: Tensor, dim: int, size: int, used: int, heads_second: bool = False) -> Tensor:
    """Return an array that is longer in one dim, with the `used` first entries."""
    shape = list(x.shape)
    shape[dim] = size
    with torch.inference_mode(False):
        made = _empty(tuple(shape), x.dtype, x.device, heads_second)
        made.narrow(dim, 0, used).copy_(x.narrow(dim, 0, used))
    return made

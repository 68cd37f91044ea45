"""``QuantizedCache``: keys and values that are quantised as they come, for decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.torch.kit.quantised import dequantised
from polyattn.torch.quantize import FLOATS, Codes, checked_form
from polyattn.torch.quantized import quantized_attention
from polyattn.torch.quantized_rows import QuantizedRows

__all__ = ["QuantizedCache"]


class QuantizedCache:
    """A growing cache of int8 or float8_e4m3fn keys and values, with a scale for each block.

    Codes and scales are those that :func:`polyattn.torch.quantize_kv` makes of all keys at once,
    bit for bit, however these were divided between appends; its error is stated there. For that the
    rows of the last one or two blocks are kept in float32. `block_size` keys share a scale.

    `capacity`: for how many keys memory is taken at first; it doubles when it is used up. `dtype`:
    of the codes, as `quantize_kv` takes it. `value_dim`: `head_dim` unless given.

    >>> import torch
    >>> cache = QuantizedCache(1, 2, 32)
    >>> cache.append(torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32))
    >>> cache.length, cache.keys.dtype, cache.key_scales.shape
    (100, torch.int8, torch.Size([1, 2, 2]))
    >>> cache.attention(torch.randn(1, 1, 8, 32)).shape
    torch.Size([1, 1, 8, 32])
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: Codes | torch.dtype = "int8",
        block_size: int = 64,
        layout: str = "BTNH",
        capacity: int = 256,
        device: str | torch.device = "cpu",
    ) -> None:
        codes = checked_form(dtype, block_size, layout)
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {
            "batch": batch, "kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim,
            "capacity": capacity,
        }  # fmt: skip
        for name, size in sizes.items():
            if type(size) is not int or size < (name in ("head_dim", "value_dim")):
                raise InvalidProblem(f"got {name}={size!r}, expected a size.")
        self.layout, self.block_size, self.device = layout, block_size, torch.device(device)
        form = codes, block_size, layout == "BNTH", self.device
        self._batch, self._heads, self._dims = batch, kv_heads, (head_dim, value_dim)
        if value_dim == head_dim:  # keys and values in the same few operations
            rows = 2 * batch, capacity, kv_heads, head_dim
            parts = [QuantizedRows(("key", "value"), rows, *form)]
        else:
            parts = [
                QuantizedRows((name,), (batch, capacity, kv_heads, dim), *form)
                for name, dim in zip(("key", "value"), self._dims, strict=True)
            ]
        self._parts = tuple(parts)
        self.device = self._parts[0].codes.device  # with its index

    @property
    def length(self) -> int:
        """How many keys there are."""
        return self._parts[0].length

    @property
    def keys(self) -> Tensor:
        """The codes of the keys in the layout: a view, up to the length."""
        return self._codes(slice(None, self._batch), 0)

    @property
    def values(self) -> Tensor:
        """The codes of the values in the layout: a view, up to the length."""
        return self._codes(slice(-self._batch or None, None), -1)

    @property
    def key_scales(self) -> Tensor:
        """The scales of the keys, (B, K, blocks): a view, of the blocks that are begun."""
        return self._scales(slice(None, self._batch), 0)

    @property
    def value_scales(self) -> Tensor:
        """The scales of the values, (B, K, blocks): a view, of the blocks that are begun."""
        return self._scales(slice(-self._batch or None, None), -1)

    @property
    def nbytes(self) -> int:
        """The bytes that the cache takes, unused capacity and kept rows included."""
        return sum(part.nbytes for part in self._parts)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add keys (B, T, K, H) and values (B, T, K, V), in the layout and of any float dtype.

        Raises :class:`~polyattn.errors.InvalidProblem`, and leaves the cache as it was, for NaN and
        infinity, for other shapes, and for what needs a gradient: use ``torch.no_grad()``.
        """
        keys, values = self._rows("key", key, 0), self._rows("value", value, 1)
        count = keys.shape[1]
        if count != values.shape[1]:
            raise InvalidProblem(
                f"got {count} keys and {values.shape[1]} values, expected as many of both."
            )
        if not count:
            return
        with torch.no_grad():
            given = (torch.cat((keys, values)),) if len(self._parts) == 1 else (keys, values)
            added = [part.staged(x) for part, x in zip(self._parts, given, strict=True)]
            for part in self._parts:
                part.reserve(part.length + count)
            for add in added:
                add()

    def attention(self, query: Tensor, **options: Any) -> Any:
        """Attend to all keys: :func:`polyattn.torch.quantized_attention` with its other options."""
        return quantized_attention(
            query,
            self.keys,
            self.values,
            self.key_scales,
            self.value_scales,
            block_size=self.block_size,
            layout=self.layout,
            **options,
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the codes stand for, multiplied in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        keys, values = (
            dequantised(codes, scales, self.block_size, self.layout, wide).to(dtype)
            for codes, scales in ((self.keys, self.key_scales), (self.values, self.value_scales))
        )
        return keys, values

    def truncate(self, length: int) -> None:
        """Take back all keys from `length` on, as if they had never come.

        That takes the rows of the last block as they came. They are kept for the open block and
        the full one before it: any length back to the begin of that one is possible, and any
        multiple of `block_size`; others raise :class:`~polyattn.errors.InvalidProblem`. After such
        a multiple, or rows taken back, no older ones are kept than before.
        """
        kept = self._parts[0].kept_from
        if type(length) is not int or not 0 <= length <= self.length:
            raise InvalidProblem(f"got length={length!r}, expected one of 0 to {self.length}.")
        if length < kept and length % self.block_size:
            low = length - length % self.block_size
            raise InvalidProblem(
                f"got length={length} of {self.length}, expected {kept} or more, or a multiple of "
                f"{self.block_size}: of older blocks only the codes are left. Truncate to {low} "
                f"and append {length - low} keys again."
            )
        if length != self.length:
            with torch.no_grad():
                for part in self._parts:
                    part.truncate(length)

    def reset(self) -> None:
        """Take back all keys; the memory stays."""
        self.truncate(0)

    def _codes(self, entries: slice, part: int) -> Tensor:
        codes = self._parts[part].codes[entries, : self.length]
        return codes if self.layout == "BTNH" else codes.transpose(1, 2)

    def _scales(self, entries: slice, part: int) -> Tensor:
        return self._parts[part].scales[entries, :, : -(-self.length // self.block_size)]

    def _rows(self, name: str, x: Any, which: int) -> Tensor:
        """Check what is appended and return it as (B, T, K, H)."""
        batch, heads, dim = self._batch, self._heads, self._dims[which]
        if isinstance(x, Tensor) and x.dim() == 4 and x.dtype in FLOATS and x.device == self.device:
            rows = x if self.layout == "BTNH" else x.transpose(1, 2)
            if rows.shape[0] == batch and rows.shape[2:] == (heads, dim):
                if x.requires_grad and torch.is_grad_enabled():
                    raise InvalidProblem(
                        f"got a {name} that needs a gradient, expected none: rounding has "
                        "none. Append under torch.no_grad(), or detach it."
                    )
                return rows
        got = f"{tuple(x.shape)} {x.dtype} on {x.device}" if isinstance(x, Tensor) else repr(x)
        wanted = (batch, "T", heads, dim) if self.layout == "BTNH" else (batch, heads, "T", dim)
        raise InvalidProblem(
            f"got {name} {got}, expected ({', '.join(map(str, wanted))}) of a float dtype on "
            f"{self.device}."
        )

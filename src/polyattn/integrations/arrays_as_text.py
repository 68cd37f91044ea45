"""Masks and biases as text: the real arrays of a program, small enough for a line of a record.

Broadcast dims (stride 0) are stored once, booleans as bits, everything compressed. An array that
stays larger than :data:`MOST_BYTES` is replaced by what times depend on: its shape and density.
Reading imports no torch; what was read is checked all the same.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polyattn.errors import TuningError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["MOST_BYTES", "StoredArray", "take"]

MOST_BYTES = 128 << 10
_MOST_ENTRIES = 1 << 28
_BYTES_OF = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_MEMBERS = {"dtype", "shape", "stored", "data", "visible"}


@dataclass(frozen=True)
class StoredArray:
    """An array of `shape`, of which `data` holds the dims that do not repeat (`stored`).

    `data` is None for an array that was too large; `visible` is the share of entries that let
    a query attend (True, or not minus infinity).
    """

    dtype: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    data: str | None
    visible: float

    def restore(self) -> Tensor:
        """Return the array, or one of the same shape and density where it was not kept."""
        import torch

        dtype = getattr(torch, self.dtype)
        if self.data is None:
            generator = torch.Generator().manual_seed(0)
            allowed = torch.rand(self.stored, generator=generator) < self.visible
            allowed[..., :1] = True
            array = allowed if dtype == torch.bool else _additive(allowed, dtype, generator)
        else:
            array = _from_bytes(_unpack(self.data, self._bytes()), dtype, self.stored)
        return array.expand(self.shape)

    def _bytes(self) -> int:
        count = math.prod(self.stored)
        return -(-count // 8) if self.dtype == "bool" else count * _BYTES_OF[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stored": list(self.stored),
            "data": self.data,
            "visible": self.visible,
        }

    @classmethod
    def from_dict(cls, plain: Any) -> StoredArray:
        """Read what :meth:`to_dict` wrote; TuningError for anything else."""
        if not isinstance(plain, dict) or set(plain) != _MEMBERS:
            raise TuningError(f"attn_mask: got {str(plain)[:60]!r}; expected {sorted(_MEMBERS)}")
        shape, stored = _shape(plain["shape"]), _shape(plain["stored"])
        fits = len(shape) == len(stored) and all(
            s in (1, full) for s, full in zip(stored, shape, strict=True)
        )
        visible = plain["visible"]
        if not fits or math.prod(stored) > _MOST_ENTRIES:
            raise TuningError(f"attn_mask: got shapes {shape} and {stored}; expected broadcasting")
        if (
            plain["dtype"] not in _BYTES_OF
            or not isinstance(visible, float)
            or not 0 <= visible <= 1
        ):
            raise TuningError(f"attn_mask: got dtype {plain['dtype']!r}, visible {visible!r}")
        made = cls(plain["dtype"], shape, stored, plain["data"], visible)
        if made.data is not None:
            _unpack(made.data, made._bytes())  # damage fails here, not in the middle of tuning
        return made


def take(array: Tensor) -> StoredArray:
    """Store an array of a call."""
    import torch

    array = array.detach()
    repeats = [
        size > 1 and stride == 0 for size, stride in zip(array.shape, array.stride(), strict=True)
    ]
    base = array[tuple(slice(0, 1) if again else slice(None) for again in repeats)]
    base = base.cpu().contiguous()
    allowed = base if base.dtype == torch.bool else base > torch.finfo(base.dtype).min / 2
    visible = float(allowed.float().mean()) if base.numel() else 1.0
    packed = zlib.compress(_to_bytes(base), 6)
    data = base64.b64encode(packed).decode() if len(packed) <= MOST_BYTES else None
    name = str(base.dtype).removeprefix("torch.")
    return StoredArray(name, tuple(array.shape), tuple(base.shape), data, visible)


def _additive(allowed: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    import torch

    values = torch.randn(allowed.shape, generator=generator).to(dtype)
    return torch.where(allowed, values, float("-inf"))


def _to_bytes(array: Tensor) -> bytes:
    import numpy
    import torch

    if array.dtype == torch.bool:
        return bytes(numpy.packbits(array.numpy().reshape(-1)).tobytes())
    return bytes(array.reshape(-1).view(torch.uint8).numpy().tobytes())


def _from_bytes(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    import numpy
    import torch

    flat = numpy.frombuffer(bytearray(raw), dtype=numpy.uint8)
    if dtype == torch.bool:
        bits = numpy.unpackbits(flat, count=math.prod(shape))
        return torch.from_numpy(bits.astype(bool)).reshape(shape)
    return torch.from_numpy(flat).view(dtype).reshape(shape)


def _unpack(data: Any, size: int) -> bytes:
    """Return exactly `size` bytes; TuningError for damaged text or another length."""
    try:
        unzip = zlib.decompressobj()
        raw = unzip.decompress(base64.b64decode(data, validate=True), size + 1)
    except (binascii.Error, zlib.error, TypeError, ValueError) as error:
        raise TuningError(f"attn_mask: got damaged data ({error}); record again") from None
    if len(raw) != size:
        raise TuningError(f"attn_mask: got {len(raw)} bytes or more; expected {size}; record again")
    return raw


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(x) is not int or x < 0 for x in value):
        raise TuningError(f"attn_mask: got shape {value!r}; expected sizes >= 0")
    return tuple(value)

"""From tensors and masks to what the extension takes: pointers, memory, and strides in entries.

An array is (pointer, bytes, batch stride, head stride, row stride); the last dim is contiguous.
`bytes` is what the storage has from the pointer on, whatever the sizes of the call: the extension
refuses what would leave it. Whoever asks for a pointer keeps its tensor alive until the call has
ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.masks import BlockMap, Mask
from polyattn.native.program import (
    PACKED,
    WIDTH,
    Offsets,
    Terms,
    arrays_of,
    dense_program,
    encode,
    terms,
)
from polyattn.torch.internals import address_of
from polyattn.torch.kit.layouts import to_bnth
from polyattn.torch.kit.masking import Dims, block_bits, four_dims, materialise

__all__ = [
    "DTYPES",
    "Sizes",
    "array",
    "bias_argument",
    "memory",
    "program_of",
    "quantised_argument",
    "rows",
    "sinks_argument",
    "sizes_of",
    "slopes_argument",
    "terms_of",
]

Array = tuple[int, int, int, int, int]
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def memory(x: Tensor) -> tuple[int, int]:
    """Return the address of the first entry, and how many bytes the storage has from there on.

    The address is 0 where there is no memory, also of views into a storage that has none, as that
    of a tensor which stands for others (torch's asynchronous collectives): the extension refuses 0.
    """
    here, address = int(x.storage_offset()) * x.element_size(), address_of(x)
    return 0 if address == here else address, max(x.untyped_storage().nbytes() - here, 0)


class Sizes(NamedTuple):
    """The sizes of one call as the extension takes them; when packed, B counts sequences."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int


def sizes_of(q: Tensor, k: Tensor, v: Tensor, layout: str, batch: int | None = None) -> Sizes:
    """Take the sizes from tensors in the layout; `batch` is the number of packed sequences."""
    if layout == "packed":
        (t, n, h), (s, heads, _) = q.shape, k.shape
        return Sizes(batch or 0, n, heads, t, s, h, v.shape[2])
    if layout == "BTNH":
        (b, t, n, h), (_, s, heads, _) = q.shape, k.shape
    else:
        (b, n, t, h), (_, heads, s, _) = q.shape, k.shape
    return Sizes(b, n, heads, t, s, h, v.shape[3])


def array(x: Tensor, layout: str) -> Array:
    """Return pointer, bytes and strides of a tensor in the layout."""
    if layout == "BTNH":
        batch, row, head, _ = x.stride()
    elif layout == "BNTH":
        batch, head, row, _ = x.stride()
    else:
        batch, (row, head, _) = 0, x.stride()
    return *memory(x), batch, head, row


def rows(x: Tensor, layout: str) -> Array:
    """Return pointer, bytes and strides of a float32 a query: (B, N, T), (N, total) packed."""
    batch, head, row = (0, *x.stride()) if layout == "packed" else x.stride()
    return *memory(x), batch, head, row


def bias_argument(bias: Tensor) -> tuple[int, int, int, int, int, int, int]:
    """Return pointer, bytes, dtype and strides of four dims; 0 where the bias broadcasts."""
    strides = (0 if n == 1 else s for n, s in zip(bias.shape, bias.stride(), strict=True))
    batch, head, row, column = (*(0,) * (4 - bias.dim()), *strides)
    return *memory(bias), DTYPES[bias.dtype], batch, head, row, column


def slopes_argument(slopes: Tensor) -> tuple[int, int, int, int]:
    """Return pointer, bytes, batch and head strides of float32 slopes (N,), (1, N) or (B, N)."""
    batch = slopes.stride(0) if slopes.dim() == 2 and slopes.shape[0] > 1 else 0
    return *memory(slopes), batch, slopes.stride(-1)


def sinks_argument(sinks: Tensor) -> tuple[int, int, int]:
    """Return pointer, bytes and count of contiguous float32 sinks (N,) or (N, M)."""
    return *memory(sinks), 1 if sinks.dim() == 1 else sinks.shape[1]


def quantised_argument(
    codes: Tensor, key_scales: Tensor, value_scales: Tensor, block_size: int
) -> tuple[int, ...]:
    """Return what codes are, and of float32 scales (B, K, blocks) pointer, bytes, two strides."""
    (k_batch, k_head, _), (v_batch, v_head, _) = key_scales.stride(), value_scales.stride()
    keys, values = (*memory(key_scales), k_batch, k_head), (*memory(value_scales), v_batch, v_head)
    return CODES[codes.dtype], block_size, *keys, *values


class _Torch:
    """torch, as :class:`polyattn.native.ArrayLibrary` asks for it."""

    def __init__(self, device: torch.device, kv_len: int) -> None:
        self._device, self._kv_len = device, kv_len

    def integers(self, payload: Any) -> Tensor:
        return torch.as_tensor(payload, dtype=torch.int64, device=self._device).contiguous()

    def bits(self, mask: BlockMap) -> Tensor:
        bits: Tensor = block_bits(mask, self._kv_len) if mask.bits is None else mask.bits
        return bits.view(torch.uint8)

    def allowed(self, payload: Any) -> Tensor:
        dense = torch.as_tensor(payload, device=self._device)
        return four_dims(dense).view(torch.uint8)

    def memory(self, array: Tensor) -> tuple[int, int]:
        return memory(array)

    def strides(self, array: Tensor) -> Sequence[int]:
        return array.stride()


_pointers = _Torch(torch.device("cpu"), 0)


def program_of(
    mask: Mask | None, q: Tensor, k: Tensor, layout: str
) -> tuple[Sequence[int], list[Tensor]]:
    """Return the codes of a mask and their arrays; what has no program becomes a dense mask."""
    if mask is None:
        return (), []
    program = encode(mask)
    sequence = {"BNTH": 2, "BTNH": 1, "packed": 0}[layout]
    library = _Torch(q.device, k.shape[sequence])
    if program is None:
        dims = Dims.of(to_bnth(q, layout), to_bnth(k, layout))
        program = dense_program(materialise(mask, dims, q.device))
    return program.codes, arrays_of(program, library)


def terms_of(
    codes: Sequence[int], arrays: Sequence[Tensor], layout: str
) -> tuple[Terms, Offsets | None, int | None]:
    """Return terms and packed offsets with pointers, and how many sequences are packed.

    A packed call whose mask became dense is one sequence, of all tokens.
    """
    found, packed = terms(codes, arrays, _pointers)
    if layout != "packed":
        return found, packed, None
    return found, packed, _sequences(codes, arrays) if packed else 1


def _sequences(codes: Sequence[int], arrays: Sequence[Tensor]) -> int:
    at = next(i for i in range(0, len(codes), WIDTH) if codes[i] == PACKED)
    return arrays[codes[at + 1]].shape[0] - 1

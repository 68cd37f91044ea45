"""Masks with NumPy arrays in them: bound, checked, and made dense where no program says them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.masks import BlockMap, Index, Mask, Packed
from polyattn.native.program import Program, dense_program, encode
from polyattn.numpy.arrays import Array, memory, readable, strides
from polyattn.problem.admission.masks import Lengths

__all__ = ["Library", "bind_mask", "program_of"]


def bind_mask(mask: Mask) -> Mask:
    """Return `mask` with its arrays as NumPy arrays; those of other libraries on the CPU, too."""

    def turn(name: str, payload: Any) -> Any:
        if payload is None or isinstance(payload, np.ndarray):
            return payload
        try:
            array = np.asarray(payload)
        except Exception as error:  # each library raises its own: on a device, quantised, ...
            raise InvalidProblem(
                f"got a mask whose {name} NumPy cannot read ({type(payload).__name__}: {error}), "
                "expected a NumPy array or a list; copy it to the CPU."
            ) from error
        return array if array.size else array.astype(bool if name == "mask" else np.int64)

    return mask.map(turn)


class Library:
    """NumPy, as :class:`polyattn.native.ArrayLibrary` asks for it; for `kv_len` keys."""

    def __init__(self, kv_len: int) -> None:
        self._kv_len = kv_len

    def integers(self, payload: Any) -> Array:
        return np.ascontiguousarray(payload, dtype=np.int64)

    def bits(self, mask: BlockMap) -> Array:
        return _block_bits(mask, self._kv_len).view(np.uint8)

    def allowed(self, payload: Any) -> Array:
        dense = readable(np.asarray(payload))
        return dense.reshape((1,) * (4 - dense.ndim) + dense.shape).view(np.uint8)

    def memory(self, array: Array) -> tuple[int, int]:
        return memory(array)

    def strides(self, array: Array) -> Sequence[int]:
        return strides(array)


def program_of(mask: Mask, lengths: Lengths) -> Program:
    """Return the program of a bound mask; what has none becomes a dense mask."""
    program = encode(mask)
    return dense_program(_materialise(mask, lengths)) if program is None else program


def _block_bits(mask: BlockMap, kv_len: int) -> Array:
    """Return which blocks of keys each block of queries visits: (B|1, N|1, nQ, nK) bool."""
    blocks = -(-kv_len // mask.block_k)
    listed = np.arange(mask.indices.shape[-1]) < mask.counts[..., None]
    target = np.where(listed, mask.indices, blocks).astype(np.int64)
    bits = np.zeros((*target.shape[:-1], blocks + 1), dtype=bool)
    np.put_along_axis(bits, target, True, axis=-1)
    return bits[..., :blocks]


def _materialise(mask: Mask, lengths: Lengths) -> Array:
    """Return the dense mask, (B|1, N|1, T|1, S|1) bool."""
    return np.asarray(_with_bits(mask, lengths.kv_len).allows(_grid(mask, lengths)))


def _with_bits(mask: Mask, kv_len: int) -> Mask:
    """Return `mask` with every BlockMap given its bit map, so that it can be asked anywhere."""
    if mask.parts:
        return mask.of_parts(tuple(_with_bits(part, kv_len) for part in mask.parts))
    if isinstance(mask, BlockMap):
        bits = _block_bits(mask, kv_len)
        return BlockMap(mask.block_q, mask.block_k, mask.indices, mask.counts, bits)
    return mask


def _grid(mask: Mask, lengths: Lengths) -> Index:
    """Return coordinates that broadcast to (B, N, T, S) for :meth:`Mask.allows`."""
    t = np.arange(lengths.q_len).reshape(1, 1, -1, 1)
    j = np.arange(lengths.kv_len).reshape(1, 1, 1, -1)
    n = np.arange(lengths.heads).reshape(1, -1, 1, 1)
    align = mask.align or "bottom_right"
    packed = next((leaf for leaf in mask.leaves() if isinstance(leaf, Packed)), None)
    if packed is None:
        b = np.arange(lengths.batch).reshape(-1, 1, 1, 1)
        return Index(b, n, t, j, lengths.q_len, lengths.kv_len, align)
    cu_q, cu_kv = (x.astype(np.int64) for x in (packed.cu_q, packed.cu_kv))
    seq_q = np.searchsorted(cu_q, t, side="right") - 1
    seq_k = np.searchsorted(cu_kv, j, side="right") - 1
    return Index(
        seq_q, n, t - cu_q[seq_q], j - cu_kv[seq_k], np.diff(cu_q)[seq_q], np.diff(cu_kv)[seq_q],
        align, seq_q == seq_k, t, j,
    )  # fmt: skip

"""Masks and biases as torch tensors: moved to the device, checked, and made dense.

Shapes: a dense mask broadcasts to (B, N, T, S), True = attend; its dims of size 1 are kept.
"""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.masks import BlockMap, Dense, Index, LeftPadding, Mask, Packed, Padding
from polyattn.masks.biases import Alibi, Bias
from polyattn.masks.simplify import sees_everything
from polyattn.problem.admission.masks import Lengths
from polyattn.problem.admission.masks import check_mask as check_arrays
from polyattn.torch.internals import (
    are_transforms_active,
    dispatch_modes,
    is_exported,
    is_mapped,
    may_be_traced_before_autograd,
)

__all__ = [
    "Dims",
    "Visible",
    "bind_mask",
    "check_mask",
    "dense_bias",
    "expand_blocks",
    "four_dims",
    "grid",
    "is_there",
    "is_traced_by_proxies",
    "known",
    "materialise",
    "may_be_kept",
    "stream_of",
    "visible",
]

_CACHE_BYTES = 64 << 20


class Dims(NamedTuple):
    """The sizes of one call, taken from its tensors, so that they may be symbolic."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> Dims:
        """Take the sizes of (B, N, T, H) arrays."""
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


class Visible:
    """A dense mask and, when asked for, what follows from it.

    `mask`: (B|1, N|1, T|1, S) bool, True = attend. `is_whole`: the lengths alone show that every
    query sees a key, and every key is seen.
    """

    def __init__(self, mask: Tensor, dims: Dims, is_whole: bool = False) -> None:
        self.mask, self.dims, self.is_whole = mask, dims, is_whole
        self._empty: Tensor | None = None
        self._seen: Tensor | None = None

    @property
    def empty(self) -> Tensor:
        """Rows that see no key: (B|1, N|1, T|1, 1)."""
        if self._empty is None:
            self._empty = ~self.mask.any(-1, keepdim=True)
        return self._empty

    @property
    def seen(self) -> Tensor:
        """Keys that some query sees: (B|1, K|1, S, 1)."""
        if self._seen is None:
            seen = self.mask.squeeze(-2) if self.mask.shape[-2] == 1 else self.mask.any(-2)
            if seen.shape[1] > 1 and self.dims.heads != self.dims.kv_heads:
                seen = seen.unflatten(1, (self.dims.kv_heads, -1)).any(2)
            self._seen = seen.unsqueeze(-1)
        return self._seen


def bind_mask(mask: Mask, device: torch.device) -> Mask:
    """Return `mask` with its arrays as tensors on `device`."""

    def move(name: str, payload: Any) -> Any:
        if payload is None or is_there(payload, device):
            return payload
        array = _compared(torch.as_tensor(payload, device=device))
        return array if array.numel() else array.to(torch.bool if name == "mask" else torch.int32)

    if all(_is_bound(leaf, device) for leaf in mask.leaves()):
        return mask
    return mask.map(move)


def _is_bound(leaf: Mask, device: torch.device) -> bool:
    """Whether a mask has arrays of its device alone, or none: a new one would say the same."""
    return leaf.static or (
        type(leaf) in (Padding, LeftPadding, Dense)
        and all(x is None or is_there(x, device) for x in leaf.arguments)
    )


_UNCOMPARED = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""Integers that torch holds and hardly computes with."""


def is_there(payload: Any, device: torch.device) -> bool:
    """Say whether :func:`bind_mask` leaves an array of a mask as it is."""
    is_tensor = isinstance(payload, Tensor)
    return is_tensor and payload.device == device and payload.dtype not in _UNCOMPARED


def _compared(array: Tensor) -> Tensor:
    """Return integers that torch compares; those past its own are negative, which no mask takes."""
    return array.to(torch.int64) if array.dtype in _UNCOMPARED else array


def check_mask(mask: Mask, lengths: Lengths) -> None:
    """Raise :class:`InvalidProblem` where an array of the mask does not fit the problem."""
    check_arrays(mask, lengths, known, functools.partial(torch.arange, device="cpu"))


def known(payload: Any) -> Tensor | None:
    """Return the payload when reading its values costs no synchronisation with a device."""
    if torch.compiler.is_compiling() or is_traced_by_proxies():
        return None
    if not isinstance(payload, Tensor):
        return _compared(torch.as_tensor(payload, device="cpu"))
    if type(payload) is not Tensor or not payload.is_cpu or is_mapped(payload):
        return None
    return _compared(payload)


def is_traced_by_proxies() -> bool:
    """Say whether make_fx records what plain tensors go through: it refuses to read them.

    Other dispatch modes (counters of operations, say) let values be read.
    """
    if not (dispatch_modes() or may_be_traced_before_autograd()):
        return False
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")  # loaded by who uses it
    return tracing is not None and tracing.get_proxy_mode() is not None


def grid(mask: Mask, dims: Dims, device: torch.device) -> Index:
    """Return coordinates that broadcast to (B, N, T, S) for :meth:`Mask.allows`."""
    t = torch.arange(dims.q_len, device=device).view(1, 1, -1, 1)
    j = torch.arange(dims.kv_len, device=device).view(1, 1, 1, -1)
    n = torch.arange(dims.heads, device=device).view(1, -1, 1, 1)
    align = mask.align or "bottom_right"
    packed = next((leaf for leaf in mask.leaves() if isinstance(leaf, Packed)), None)
    if packed is None:
        b = torch.arange(dims.batch, device=device).view(-1, 1, 1, 1)
        return Index(b, n, t, j, dims.q_len, dims.kv_len, align)
    cu_q, cu_kv = packed.cu_q.long(), packed.cu_kv.long()
    seq_q = torch.searchsorted(cu_q, t.reshape(-1), right=True).view(t.shape) - 1
    seq_k = torch.searchsorted(cu_kv, j.reshape(-1), right=True).view(j.shape) - 1
    return Index(
        seq_q, n, t - cu_q[seq_q], j - cu_kv[seq_k], cu_q.diff()[seq_q], cu_kv.diff()[seq_q],
        align, seq_q == seq_k, t, j,
    )  # fmt: skip


def materialise(mask: Mask, dims: Dims, device: torch.device) -> Tensor:
    """Return the dense mask, (B|1, N|1, T|1, S) bool."""
    dense = _dense(mask, dims, _Coordinates(mask, dims, device))
    return dense.expand(-1, -1, -1, dims.kv_len)


class _Coordinates:
    """The coordinates of :func:`grid`, made when the first mask asks for them."""

    def __init__(self, mask: Mask, dims: Dims, device: torch.device) -> None:
        self._mask, self._dims, self._device = mask, dims, device
        self._index: Index | None = None
        self.is_packed = any(isinstance(leaf, Packed) for leaf in mask.leaves())

    def get(self) -> Index:
        if self._index is None:
            self._index = grid(self._mask, self._dims, self._device)
        return self._index


def _dense(mask: Mask, dims: Dims, coordinates: _Coordinates) -> Tensor:
    if mask.parts:
        return mask.combined([_dense(part, dims, coordinates) for part in mask.parts])
    if isinstance(mask, Dense):  # as it is: gathering it entry by entry would be a copy
        return four_dims(mask.mask)
    if type(mask) is Padding and not coordinates.is_packed:
        rows, keys = mask.arguments
        if rows is None and keys is not None:
            return torch.arange(dims.kv_len, device=keys.device) < keys.view(-1, 1, 1, 1)
    if type(mask) is BlockMap:
        return _of_blocks(mask, dims)
    return four_dims(expand_blocks(mask, dims.kv_len).allows(coordinates.get()))


def four_dims(x: Tensor) -> Tensor:
    """View what broadcasts to (B, N, T, S) with all four dims."""
    return x if x.dim() == 4 else x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def expand_blocks(mask: Mask, kv_len: int) -> Mask:
    """Return `mask` with every BlockMap given its bit map, so that it can be asked anywhere."""
    if mask.parts:
        return mask.of_parts(tuple(expand_blocks(part, kv_len) for part in mask.parts))
    if isinstance(mask, BlockMap):
        bits = block_bits(mask, kv_len)
        return BlockMap(mask.block_q, mask.block_k, mask.indices, mask.counts, bits)
    return mask


def _of_blocks(mask: BlockMap, dims: Dims) -> Tensor:
    """Write a bit map out: entry by entry, by an index, takes a hundred times as long."""
    rows = torch.arange(dims.q_len, device=mask.counts.device) // mask.block_q
    keys = torch.arange(dims.kv_len, device=mask.counts.device) // mask.block_k
    bits = block_bits(mask, dims.kv_len)
    return bits.index_select(-2, rows).index_select(-1, keys)


def block_bits(mask: BlockMap, kv_len: int) -> Tensor:
    """Return which blocks of keys each block of queries visits: (B, N, nQ, nK) bool."""
    blocks = -(-kv_len // mask.block_k)
    indices = mask.indices.long()
    listed = torch.arange(indices.shape[-1], device=indices.device) < mask.counts[..., None]
    target = torch.where(listed, indices, blocks)
    bits = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.bool, device=indices.device)
    return bits.scatter(-1, target, True)[..., :blocks]


def visible(mask: Mask, dims: Dims, device: torch.device) -> Visible:
    """Return the dense mask; small ones that the lengths determine are kept."""
    # under a compiler, a dispatch mode (fake tensors, tracing) or a function transform tensors are
    # its own; where a program is written down, so are sizes
    modes = torch.compiler.is_dynamo_compiling() or dispatch_modes() or are_transforms_active()
    modes = modes or is_exported()
    whole = not modes and mask.is_static and sees_everything(mask, dims.q_len, dims.kv_len)
    if modes or not mask.is_static or not may_be_kept(device):
        return Visible(materialise(mask, dims, device), dims, whole)
    key = (mask.signature, dims, device, stream_of(device))
    return _static.get(key, lambda: Visible(materialise(mask, dims, device), dims, whole))


def may_be_kept(device: torch.device) -> bool:
    """Say whether what is made now may serve later calls: not what a CUDA graph will fill."""
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def stream_of(device: torch.device) -> int | None:
    """Return what orders the work on a device now: others may run before it is done."""
    return torch.cuda.current_stream(device).stream_id if device.type == "cuda" else None


class _Kept:
    """A small cache of dense static masks, bounded in bytes, least recently used first out."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._entries: OrderedDict[Any, tuple[Visible, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any, make: Any) -> Visible:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        made: Visible = make()
        size = made.mask.untyped_storage().nbytes() * 2
        # inference tensors must not be handed to a later call that trains
        if size <= self._limit // 4 and not torch.is_inference_mode_enabled():
            with self._lock:
                self._entries[key] = (made, size)
                self._bytes += size
                while self._bytes > self._limit:
                    self._bytes -= self._entries.popitem(last=False)[1][1]
        return made


_static = _Kept(_CACHE_BYTES)


def dense_bias(bias: Bias, dims: Dims, dtype: torch.dtype) -> Tensor:
    """Return the bias as a tensor of `dtype` that broadcasts to (B, N, T, S), four dims."""
    array: Tensor = bias.payload
    if not isinstance(bias, Alibi):
        return four_dims(array).to(dtype)
    t = torch.arange(dims.q_len, device=array.device).view(-1, 1)
    j = torch.arange(dims.kv_len, device=array.device)
    distance = (t + dims.kv_len - dims.q_len - j).abs()
    slopes = array.to(dtype).reshape(-1 if array.dim() == 2 else 1, dims.heads, 1, 1)
    return -slopes * distance.to(dtype)

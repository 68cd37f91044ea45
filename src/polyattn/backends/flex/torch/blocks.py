"""Which blocks of keys each block of queries visits: counted, and kept until a mask changes."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyattn.backends.flex.torch.terms import Terms, allowed
from polyattn.masks import Mask
from polyattn.torch.internals import version_of
from polyattn.torch.kit.masking import Dims, may_be_kept, stream_of

__all__ = ["Blocks", "block_cache", "build", "rows_at_once"]

_BUILD_PAIRS = 1 << 24  # pairs of query and key looked at together while blocks are counted
_CACHE_BYTES = 64 << 20
_NAMES = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip


class Blocks(NamedTuple):
    """A BlockMask's eight tensors, and what `isolation.hide` wants to know of the mask.

    `seen`: keys that some query sees, (B|1, K|1, S, 1). `empty`: rows that see none.
    """

    tensors: tuple[Tensor, ...]
    seen: Tensor
    empty: Tensor


def _ask(terms: Terms, dims: Dims, device: torch.device, start: Any, stop: Any) -> Tensor:
    b = torch.arange(dims.batch, device=device).view(-1, 1, 1, 1)
    n = torch.arange(dims.heads, device=device).view(1, -1, 1, 1)
    t = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
    j = torch.arange(dims.kv_len, device=device).view(1, 1, 1, -1)
    dense: Tensor = allowed(terms, b, n, t, j, dims.q_len, dims.kv_len)
    dense = dense.reshape((1,) * (4 - dense.dim()) + tuple(dense.shape))
    return dense.expand(-1, -1, stop - start, dims.kv_len)


def rows_at_once(terms: Terms, dims: Dims, block: tuple[int, int], device: torch.device) -> int:
    """Return how many queries :func:`build` may look at together."""
    pairs = _ask(terms, dims, device, 0, 1).numel()
    return max(block[0], _BUILD_PAIRS // max(pairs, 1) // block[0] * block[0])


def build(
    terms: Terms, dims: Dims, block: tuple[int, int], device: torch.device, rows: int
) -> Blocks:
    """Count the visible pairs of each block, `rows` queries at a time, never all pairs at once."""
    from torch.nn.attention.flex_attention import BlockMask

    cuts = [*range(0, dims.q_len, rows), dims.q_len]
    parts = [
        _count(terms, dims, block, device, start, stop) for start, stop in itertools.pairwise(cuts)
    ]
    count = torch.cat([p[0] for p in parts], -2)
    full = count == block[0] * block[1]
    found = BlockMask.from_kv_blocks(
        *_listed((count > 0) & ~full),
        *_listed(full),
        BLOCK_SIZE=block,
        seq_lengths=(dims.q_len, dims.kv_len + (1 if terms.sinks is not None else 0)),
    )
    seen = functools.reduce(torch.logical_or, (p[1] for p in parts))
    if seen.shape[1] > 1 and dims.heads != dims.kv_heads:
        seen = seen.unflatten(1, (dims.kv_heads, -1)).any(2)
    tensors = tuple(getattr(found, name) for name in _NAMES)
    return Blocks(tensors, seen.unsqueeze(-1), torch.cat([p[2] for p in parts], -2))


def _count(
    terms: Terms, dims: Dims, block: tuple[int, int], device: torch.device, start: Any, stop: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the visible pairs of each block, the keys seen, and the rows that see none."""
    dense = _ask(terms, dims, device, start, stop)
    seen, empty = dense.any(-2), ~dense.any(-1, keepdim=True)
    if terms.sinks is not None:
        dense = pad(dense, (0, 1), value=True)
    dense = pad(dense, (0, -dense.shape[-1] % block[1], 0, -(stop - start) % block[0]))
    dense = dense.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    return dense.sum((-1, -3), dtype=torch.int32), seen, empty


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


class _BlockCache:
    """Blocks of masks by signature and sizes, bounded in bytes, least recently used first out.

    Never stale: on CPUs the arrays of the mask are compared with a copy; elsewhere, where that
    would wait for the device, they must be the same tensors with the same version counter.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes, self.built = limit, 0, 0
        self._entries: OrderedDict[Any, tuple[Any, Blocks, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any, mask: Mask, device: torch.device, make: Callable[[], Blocks]) -> Blocks:
        """Return the blocks of `mask`, made anew if an array of it has changed."""
        if not may_be_kept(device):
            return make()
        key = (*key, device, stream_of(device))
        arrays = _arrays(mask)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is not None and _unchanged(entry[0], arrays):
            return entry[1]
        with torch.inference_mode(False):  # what is kept may serve a call that trains
            witness = _witness(arrays)
            made = make()
        self.built += 1
        size = sum(x.nbytes for x in (*made.tensors, made.seen, made.empty, *arrays))
        if witness is not None and size <= self._limit:
            self._keep(key, (witness, made, size))
        return made

    def _keep(self, key: Any, entry: tuple[Any, Blocks, int]) -> None:
        with self._lock:
            self._bytes += entry[2] - self._entries.pop(key, (None, None, 0))[2]
            self._entries[key] = entry
            while self._bytes > self._limit:
                self._bytes -= self._entries.popitem(last=False)[1][2]


def _arrays(mask: Mask) -> list[Tensor]:
    found: list[Tensor] = []

    def note(name: str, array: Any) -> Any:
        if array is not None:
            found.append(array)
        return array

    if mask is not None and not mask.is_static:
        mask.map(note)
    return found


def _witness(arrays: list[Tensor]) -> list[Any] | None:
    """Return what will show that the arrays have not changed; None if nothing can."""
    if any(x.is_inference() and x.device.type != "cpu" for x in arrays):
        return None  # no version counter
    return [
        x.clone() if x.device.type == "cpu" else (weakref.ref(x), version_of(x)) for x in arrays
    ]


def _unchanged(witness: list[Any], arrays: list[Tensor]) -> bool:
    return all(
        torch.equal(w, x)
        if isinstance(w, Tensor)
        else not x.is_inference() and (w[0]() is x and w[1] == version_of(x))
        for w, x in zip(witness, arrays, strict=True)
    )


block_cache = _BlockCache(_CACHE_BYTES)
"""The blocks of this process."""

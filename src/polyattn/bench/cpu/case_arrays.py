"""The arrays of a case, its mask as a value, and the same mask as torch takes it."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.bench.cpu.cases import BLOCK, WINDOW, Case, blocks_of_row, padded_lengths
from polyattn.masks import BlockMap, Causal, Mask, Padding, Window

__all__ = ["Inputs"]


@dataclass(frozen=True)
class Inputs:
    """q (B, N, T, H), k and v (B, K, S, H), in the layout of the case; `grad_out` like q."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    @classmethod
    def of(cls, case: Case, device: str = "cpu") -> Inputs:
        """Make the arrays on a device; the same case gets the same numbers there."""
        generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
        s, dtype = case.size, getattr(torch, case.dtype)

        def array(heads: int, length: int) -> Tensor:
            middle = (heads, length) if case.layout == "BNTH" else (length, heads)
            shape = (s.batch, *middle, s.head_dim)
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        q, k, v, g = (
            array(s.heads, s.q_len),
            array(s.kv_heads, s.kv_len),
            array(s.kv_heads, s.kv_len),
            array(s.heads, s.q_len),
        )
        if case.train:
            for x in (q, k, v):
                x.requires_grad_()
        return cls(case, q, k, v, g)

    def on(self, device: str) -> Inputs:
        """Return the same arrays on another device."""
        every = {name: getattr(self, name) for name in ("q", "k", "v", "grad_out")}
        moved = {
            name: x.detach().to(device).requires_grad_(x.requires_grad) for name, x in every.items()
        }
        return dataclasses.replace(self, **moved)

    @property
    def lengths(self) -> list[int]:
        """The key lengths of a padding case."""
        return padded_lengths(self.case.size)

    @functools.cached_property
    def block_bits(self) -> Tensor:
        """Which blocks of keys each block of queries visits, (T / 64, S / 64), for all heads."""
        s = self.case.size
        generator = torch.Generator().manual_seed(0)
        rows, columns = s.q_len // BLOCK, s.kv_len // BLOCK
        bits = torch.zeros(rows, columns, dtype=torch.bool)
        for row in range(rows):
            bits[
                row, torch.randperm(columns, generator=generator)[: blocks_of_row(row, columns)]
            ] = True
        return bits

    @functools.cached_property
    def mask(self) -> Mask | None:
        """The mask as polyattn takes it."""
        mask, device = self._mask(), self.q.device
        if mask is None or device.type == "cpu":
            return mask

        def there(name: str, x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        return mask.map(there)

    def _mask(self) -> Mask | None:
        match self.case.mask:
            case "causal":
                return Causal()
            case "window":
                return Window(left=WINDOW - 1, right=0)
            case "padding":
                return Padding(kv_lengths=torch.tensor(self.lengths))
            case "causal padding":
                return Causal() & Padding(kv_lengths=torch.tensor(self.lengths))
            case "blocks":
                bits = self.block_bits
                order = bits.int().argsort(dim=-1, descending=True, stable=True).int()
                counts = bits.sum(-1, dtype=torch.int32)
                return BlockMap(BLOCK, BLOCK, order[None, None], counts[None, None])
        return None

    @functools.cached_property
    def allowed(self) -> Tensor | None:
        """The mask as a boolean array that broadcasts to (B, N, T, S), made without polyattn."""
        allowed = self._allowed()
        return None if allowed is None else allowed.to(self.q.device)

    def _allowed(self) -> Tensor | None:
        s = self.case.size
        t, j = torch.arange(s.q_len)[:, None], torch.arange(s.kv_len)[None]
        match self.case.mask:
            case "causal":
                return (j <= t)[None, None]
            case "window":
                return ((j <= t) & (j > t - WINDOW))[None, None]
            case "padding":
                return (j < torch.tensor(self.lengths)[:, None])[:, None, None]
            case "causal padding":
                return ((j <= t) & (j < torch.tensor(self.lengths)[:, None, None]))[:, None]
            case "blocks":
                bits = self.block_bits.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                return bits[None, None]
        return None

    def heads_second(self, x: Tensor) -> Tensor:
        """Return an array of the case as (B, heads, length, H), a view."""
        return x if self.case.layout == "BNTH" else x.transpose(1, 2)

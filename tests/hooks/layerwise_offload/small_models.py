"""A small model that can do all that blocks of real ones do: skip, repeat, fail, be recomputed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D = 64


class Block(nn.Module):
    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 4 * d)
        self.down = nn.Linear(4 * d, d)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a block fails")
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 6, d: int = D) -> None:
        super().__init__()
        self.first = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(blocks))
        self.last = nn.Linear(d, 10)
        self.order = list(range(blocks))
        self.recomputed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        return self.last(x)


def frozen(seed: int = 1, blocks: int = 6) -> Model:
    torch.manual_seed(seed)
    return Model(blocks).eval().requires_grad_(False)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(3, 5, D, generator=torch.Generator().manual_seed(seed))

"""A training step in plain torch: nanoGPT's model, whose attention is torch's own function.

Source of the architecture: Karpathy, *nanoGPT* (https://github.com/karpathy/nanoGPT).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as functions
from torch import Tensor, nn

from polyattn.bench.programs.switched_program import Program, of_torch

__all__ = ["TRAINING", "Text"]


@dataclass(frozen=True)
class Text:
    """Sizes of the model and of its batch."""

    width: int = 384
    heads: int = 6
    layers: int = 4
    length: int = 1024
    batch: int = 2
    vocabulary: int = 512


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.rows, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        rows = self.rows(self.before(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = (one.transpose(1, 2) for one in rows.unbind(2))
        seen = functions.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(functions.gelu(self.wide(self.between(x))))


class _NanoGPT(nn.Module):
    def __init__(self, sizes: Text) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = nn.Embedding(sizes.length, sizes.width)
        self.blocks = nn.ModuleList(_Block(sizes.width, sizes.heads) for _ in range(sizes.layers))
        self.last = nn.LayerNorm(sizes.width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.last(x) @ self.tokens.weight.T


def _nanogpt(sizes: Text, dtype: str, seed: int) -> Program:
    """A step computes the loss and the gradients; weights stay, so that all steps are alike."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _NanoGPT(sizes).to(getattr(torch, dtype))
    source = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length + 1), generator=source)

    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        logits = model(ids[:, :-1])
        loss = functions.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        grad = model.blocks[0].rows.weight.grad  # type: ignore[union-attr]
        assert isinstance(grad, Tensor)
        return grad.float() / grad.float().std()

    return of_torch(step)


TRAINING: Mapping[str, tuple[Callable[[Text, str, int], Program], Text]] = {
    "nanogpt training step": (_nanogpt, Text())
}
"""Each program: what builds it, and its usual sizes."""

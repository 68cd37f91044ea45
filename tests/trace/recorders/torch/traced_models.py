"""Small real models with seeded weights, and what a trace of a call holds."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import trace
from polyattn.trace import Record, Trace, read


def llama(layers: int = 2, **options: Any) -> nn.Module:
    """A decoder of transformers, with random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        attn_implementation="eager",
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def tokens(count: int = 16) -> torch.Tensor:
    """The same token ids each time."""
    return torch.arange(count)[None] * 7 % 100


class Block(nn.Module):
    """Takes and returns what modules take and return: tuples, dictionaries, keywords."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(size, size)
        self.second = nn.Linear(size, size)

    def forward(self, x: Any, *, scale: Any = None) -> Any:
        y = torch.relu(self.first(x))
        y = self.second(y)
        return y if scale is None else y * scale


def recorded(model: nn.Module, path: Path, *args: Any, **options: Any) -> Trace:
    """The trace of one call without gradients."""
    with torch.no_grad(), trace(model, path, overwrite=True, **options):
        model(*args)
    return read(path)


def places(trace: Trace) -> list[tuple[str, str, str]]:
    """Module, phase and tensor of each record, in order."""
    return [(r.module, r.phase, r.tensor) for r in trace.records]


def one(trace: Trace, module: str, phase: str, tensor: str | None = None) -> Record:
    """The only record of that place."""
    found = [
        r
        for r in trace.records
        if (r.module, r.phase) == (module, phase) and tensor in (None, r.tensor)
    ]
    assert len(found) == 1, found
    return found[0]

"""FlexAttention compiled for a CUDA device: large calls, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn import BlockMap, Causal, Padding, PrefixLM, Segments, Window
from polyattn.masks.biases import Alibi
from polyattn.torch import attention

pytestmark = pytest.mark.gpu

B, N, T, H = 2, 4, 1024, 64


def _blocks() -> BlockMap:
    generator = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(T // 128, generator=generator) for _ in range(T // 64)])
    counts = torch.randint(1, 4, (T // 64,), generator=generator)
    return BlockMap(64, 128, order.int()[None, None].cuda(), counts.int()[None, None].cuda())


def _ids() -> Tensor:
    return (torch.arange(T, device="cuda") // 300).to(torch.int32)


CASES: dict[str, Any] = {
    "window": lambda: {"mask": Window(128, 0)},
    "causal with lse": lambda: {"mask": Causal(), "return_lse": True},
    "segments": lambda: {"mask": Segments(_ids(), _ids()) & Causal()},
    "padding": lambda: {"mask": Padding(kv_lengths=torch.tensor([0, 700], device="cuda"))},
    "prefix": lambda: {"mask": PrefixLM(torch.tensor([5, 700], device="cuda"))},
    "blocks": lambda: {"mask": _blocks()},
    "soft cap": lambda: {"mask": Causal(), "softcap": 20.0},
    "sinks": lambda: {"mask": Window(128, 0), "sinks": torch.ones(N, device="cuda")},
    "alibi": lambda: {"bias": Alibi(torch.full((N,), 0.1, device="cuda")), "mask": Causal()},
    "grouped": lambda: {"mask": Window(256, 0), "kv_heads": 2, "return_lse": True},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_compiled_is_right(name: str, dtype: str) -> None:
    options = CASES[name]()
    kv_heads = options.pop("kv_heads", N)
    generator = torch.Generator().manual_seed(4)
    shapes = ((B, N, T, H), (B, kv_heads, T, H), (B, kv_heads, T, H))
    drawn = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
    results = []
    for wide in (dtype, "float64"):
        q, k, v = (x.to(getattr(torch, dtype)).to(getattr(torch, wide)) for x in drawn)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        backend = "reference" if wide == "float64" else "flex"
        given = attention(q, k, v, layout="BNTH", backend=backend, **options)
        out, lse = given if isinstance(given, tuple) else (given, None)
        weight = torch.sin(torch.arange(H, device="cuda"))
        total = (out.double() * weight).sum()
        if lse is not None:
            total = total + lse.double().nan_to_num(neginf=0).sum()
        results.append([out, *torch.autograd.grad(total, leaves)])
        if lse is not None:
            results[-1].append(lse)
    room = 0.05 if dtype == "bfloat16" else 2e-4
    for mine, exact in zip(*results, strict=True):
        assert torch.allclose(mine.double(), exact, rtol=room, atol=room), float(
            (mine.double() - exact).nan_to_num().abs().max()
        )

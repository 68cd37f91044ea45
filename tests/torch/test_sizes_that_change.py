"""Sizes that change, or that the caller marked: compiled again only where the choice changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.fx.experimental import symbolic_shapes

from polyattn import Causal, Chunked, Dense, FirstKeys, Padding, PrefixLM, Problem, Segments, Window
from polyattn.selection.evidence import Evidence, Figure
from polyattn.selection.evidence.of_machine import assume
from polyattn.selection.prepare import select_here
from polyattn.selection.wishes import current_wishes
from polyattn.torch import attention
from polyattn.torch import scaled_dot_product_attention as sdpa
from polyattn.torch.call_model import ARRAY, B, S, T
from polyattn.torch.open_lengths import limits_of


def attend(q: Any, k: Any, v: Any) -> Any:
    return attention(q, k, v, layout="BNTH")


def counted(function: Any, **options: Any) -> tuple[Any, Any]:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


TELLS_SIZES = hasattr(symbolic_shapes, "optimization_hint")
"""Whether this torch tells what an open size is; else each power of two is compiled."""

SIZES = {
    "batch": [(b, 16, 16) for b in (1, 2, 3, 5, 9, 17, 33, 65, 129, 257)],
    "queries": [(2, t, 2 * t + 1) for t in (3, 7, 20, 40, 70, 130, 300, 600, 1200)],
    "both": [(b, 8 * b, 8 * b) for b in (2, 3, 5, 9, 17, 33, 40)],
}


@pytest.mark.parametrize("door", [sdpa, attend])
@pytest.mark.parametrize("what", SIZES)
def test_sizes_that_change_are_not_compiled_for_each_power_of_two(what: str, door: Any) -> None:
    compiled, graphs = counted(lambda q, k: door(q, k, k), dynamic=True)
    for b, t, s in SIZES[what] if TELLS_SIZES else SIZES[what][:4]:
        q, k = torch.randn(b, 2, t, 8), torch.randn(b, 2, s, 8)
        want = F.scaled_dot_product_attention(q, k, k)
        assert torch.allclose(compiled(q, k), want, atol=1e-5)
    assert graphs.frame_count <= 4


@pytest.mark.parametrize("door", [sdpa, attend])
@pytest.mark.parametrize(
    ("shape", "dim", "bounds"),
    [
        ((2, 4, 64, 32), 0, {}),
        ((4, 4, 64, 32), 0, {"min": 2, "max": 64}),
        ((4, 4, 64, 32), 2, {"min": 2, "max": 4096}),
        ((4, 4, 2, 32), 2, {}),
    ],
)
def test_a_size_that_is_marked_is_compiled_once(
    shape: Any, dim: int, bounds: Any, door: Any
) -> None:
    compiled, graphs = counted(lambda x: door(x, x, x))
    for size in (shape[dim], 3, 16, 17, 41, 64):
        x = torch.randn(*shape[:dim], size, *shape[dim + 1 :])
        torch._dynamo.mark_dynamic(x, dim, **bounds)
        assert torch.allclose(compiled(x), F.scaled_dot_product_attention(x, x, x), atol=1e-5)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("door", [sdpa, attend])
def test_a_batch_without_a_number(door: Any) -> None:
    compiled, graphs = counted(lambda x: door(x, x, x))
    for size in (4, 1, 2, 33):
        x = torch.randn(size, 4, 24, 32)
        torch._dynamo.decorators.mark_unbacked(x, 0)
        assert torch.allclose(compiled(x), F.scaled_dot_product_attention(x, x, x), atol=1e-5)
    assert graphs.frame_count == 1


MASKS = {
    "causal": lambda b, t: Causal(),
    "window": lambda b, t: Causal() & Window(left=5),
    "first keys": lambda b, t: Causal() & (Window(left=4) | FirstKeys(2)),
    "chunked": lambda b, t: Chunked(8) & Causal(),
    "padding": lambda b, t: Padding(kv_lengths=torch.arange(b) % t),
    "prefix": lambda b, t: PrefixLM(torch.arange(b) % t),
    "segments": lambda b, t: Segments(torch.arange(t).expand(b, t) // 3),
    "dense": lambda b, t: Dense(torch.rand(b, 1, t, t) > 0.3),
}


@pytest.mark.parametrize("bounds", [{}, {"min": 2, "max": 128}], ids=["open", "bounded"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_marked_sizes(name: str, bounds: Any) -> None:
    """Of the masks' arrays the sizes are marked, too."""
    compiled, graphs = counted(lambda q, mask: attention(q, q, q, mask=mask))
    for b, t in ((4, 64), (3, 7), (40, 100), (64, 4)):
        q, mask = torch.randn(b, t, 2, 32), MASKS[name](b, t)
        arrays = [x for leaf in mask.leaves() for x in leaf.arguments if torch.is_tensor(x)]
        for x, dims in ((q, (0, 1)), *((x, range(x.dim())) for x in arrays)):
            for dim in dims:
                if x.shape[dim] > 1:
                    torch._dynamo.mark_dynamic(x, dim, **bounds)
        want = attention(q, q, q, mask=mask, backend="reference")
        assert torch.allclose(compiled(q, mask), want, atol=1e-5)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("marked", [False, True])
def test_few_keys_after_many_keep_a_nan(marked: bool) -> None:
    """torch's kernel loses it below 16 keys: what is traced at more must not count for those."""
    compiled, _ = counted(
        lambda q, k: attention(q, k, k, layout="BNTH", backend="sdpa_flash"),
        dynamic=None if marked else True,
    )
    for t, s in ((100, 300), (3, 7), (5, 12), (30, 200)):
        q, k = torch.randn(2, 2, t, 16), torch.randn(2, 2, s, 16)
        q[0, 0, 0] = float("nan")
        for x in (q, k):
            if marked:
                torch._dynamo.mark_dynamic(x, 2)
        assert compiled(q, k)[0, 0, 0].isnan().all()


def described(**facts: Any) -> Any:
    def of(model: Any) -> Any:
        (_, (b, n, t, h), *_), (_, (_, kv, s, _), *_) = model[:2]
        problem = Problem(
            batch=b, q_len=t, kv_len=s, heads=n, kv_heads=kv, head_dim=h, layout="BNTH",
            compiled=True, **facts,
        )  # fmt: skip
        return problem, current_wishes()

    return of


def model() -> Any:
    rest = (torch.float32, "cpu", False, True, "strided")
    return tuple((ARRAY, (B, 8, length, 64), *rest) for length in (T, S, S))


def chosen(batch: int) -> str:
    problem = Problem(
        batch=batch, q_len=16, kv_len=16, heads=8, kv_heads=8, head_dim=64, layout="BNTH",
        compiled=True,
    )  # fmt: skip
    return select_here(problem, current_wishes()).backend


def some_figures() -> Evidence:
    """The native kernels are the faster ones where work is not small."""
    fast, slow = Figure(2.0, 2.0, 2.0, "a test"), Figure(0.5, 0.5, 0.5, "a test")
    return Evidence({("float32", "short"): fast, ("float32", "small"): slow})


@pytest.mark.parametrize("batch", [2, 8, 64, 1024])
def test_the_limit_of_one_open_size_is_where_the_choice_changes(batch: int) -> None:
    with assume(some_figures()):
        allowed, ranges, _ = limits_of(
            model(), (batch, 0, 0, 16), (True, False, False), None, described()
        )
        low, high = ranges[0]
        assert allowed is None
        assert chosen(max(low + 1, 2)) == chosen(batch)
        if low > 1:
            assert chosen(low) != chosen(batch)
        if high:
            assert chosen(high) == chosen(batch) != chosen(high + 1)
        assert (low > 1) != bool(high)  # the choice changes once


def test_several_open_sizes_are_limited_by_their_work() -> None:
    with assume(some_figures()):
        _, ranges, _ = limits_of(model(), (4, 0, 0, 16), (True, False, True), None, described())
    assert len(ranges) == 4
    assert ranges[0][1] == ranges[2][1] == 0  # none by itself
    assert ranges[3] == (0, 4 * 16 * 16)

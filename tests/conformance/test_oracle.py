"""The oracle itself: against pictures drawn by hand, element-wise loops, and finite differences."""

import math

import numpy as np
import pytest
import torch

from polyattn import (
    Causal,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.backends.reference.torch import reference_attention
from polyattn.conformance.cases import Case
from polyattn.conformance.inputs import build
from polyattn.conformance.oracle import allowed, naive
from polyattn.conformance.tolerance import Yardstick, measure
from polyattn.masks import BlockMap
from polyattn.problem import Problem

DRAWN = {
    "causal": (Causal(), 2, 4, ["###.", "####"]),
    "causal-more-queries": (Causal(), 4, 2, ["..", "..", "#.", "##"]),
    "top-left": (Causal("top_left"), 2, 4, ["#...", "##.."]),
    "window": (Window(left=1, right=0), 4, 4, ["#...", "##..", ".##.", "..##"]),
    "window-bottom-right": (Window(left=1, right=1), 2, 4, [".###", "..##"]),
    "window-top-left": (Causal("top_left") & Window(1, 1), 2, 4, ["#...", "##.."]),
    "padding": (Padding([3], [2]), 4, 4, ["##..", "##..", "##..", "...."]),
    "left-padding": (LeftPadding([1], [2]), 3, 4, ["....", "..##", "..##"]),
    "chunks": (Chunked(3), 3, 5, ["###..", "...##", "...##"]),
    "chunks-more-queries": (Chunked(2), 5, 3, ["...", "...", "##.", "##.", "..#"]),
    "chunks-top-left": (Causal("top_left") & Chunked(2), 2, 4, ["#...", "##.."]),
    "steps": (Dilated(2), 3, 5, ["#.#.#", ".#.#.", "#.#.#"]),
    "steps-more-queries": (Dilated(3), 4, 2, [".#", "..", "#.", ".#"]),
    "first-keys": (FirstKeys(1), 2, 3, ["#..", "#.."]),
    "not": (~Causal(), 2, 4, ["...#", "...."]),
    "not-of-several": (~(Causal() & ~FirstKeys(1)), 2, 4, ["#..#", "#..."]),
    "segments": (Segments([0, 0, 1], [0, 1, 1, 2]), 3, 4, ["#...", "#...", ".##."]),
    "prefix": (PrefixLM([2]), 3, 4, ["##..", "###.", "####"]),
    "blocks": (BlockMap(2, 3, [[[[1, 0], [0, 1]]]], [[[1, 2]]]), 3, 5, ["...##", "...##", "#####"]),
    "dense": (Dense([[True, False], [False, True]]), 2, 2, ["#.", ".#"]),
    "or": (Causal() | Dense([[True, False, True]]), 2, 3, ["###", "###"]),
}


@pytest.mark.parametrize("name", DRAWN)
def test_masks_are_painted_as_drawn(name: str) -> None:
    mask, t, s, rows = DRAWN[name]
    painted = allowed(Case(t=t, s=s), mask)[0, 0]
    assert ["".join(".#"[int(x)] for x in row) for row in painted] == rows


def test_packed_sequences_are_painted_each_by_itself() -> None:
    packed = Packed([0, 1, 1, 3], [0, 2, 3, 5])
    for mask, rows in (
        (Causal(), ["##...", "...#.", "...##"]),
        (~Causal(), [".....", "....#", "....."]),
        (FirstKeys(1), ["#....", "...#.", "...#."]),
        (LeftPadding(q_starts=[0, 0, 1]), ["##...", ".....", "...##"]),
    ):
        painted = allowed(Case(b=3, t=3, s=5, layout="packed"), packed & mask)[0, 0]
        assert ["".join(".#"[int(x)] for x in row) for row in painted] == rows


ELEMENTS = {
    "plain": Case(seed=1, t=3, s=4, h=5, v=2, dtype="float64", layout="BNTH"),
    "grouped": Case(seed=2, b=2, t=3, s=5, n=4, k=2, dtype="float64", layout="BNTH"),
    "all": Case(
        seed=3,
        b=2,
        t=4,
        s=3,
        n=2,
        k=1,
        h=3,
        v=4,
        dtype="float64",
        layout="BNTH",
        softcap=2.0,
        scale=-0.7,
        mask=("Causal", "bottom_right"),
        bias=("dense", "bnts", "own", True),
        sinks=2,
    ),
    "alibi": Case(
        seed=4, t=3, s=5, n=2, k=2, dtype="float64", layout="BNTH", bias=("alibi", False, "own")
    ),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_output_and_lse_follow_the_formula_element_by_element(name: str) -> None:
    case = ELEMENTS[name].with_(lse=True)
    inputs = build(case)
    seen = allowed(case, inputs.mask)
    answer = naive(inputs, seen)
    q, k, v = (x.numpy() for x in (inputs.q, inputs.k, inputs.v))
    for b, n, t in np.ndindex(case.b, case.n, case.t):
        head, terms, total = n // (case.n // case.k), np.zeros(case.v), 0.0
        for j in range(case.s):
            if not seen[b, n, t, j]:
                continue
            score = (case.scale or 1 / math.sqrt(case.h)) * sum(
                q[b, n, t, x] * k[b, head, j, x] for x in range(case.h)
            )
            if case.softcap:
                score = case.softcap * math.tanh(score / case.softcap)
            if case.bias and case.bias[0] == "dense":
                score += float(inputs.bias.payload[b, n, t, j])
            elif case.bias:
                score -= float(inputs.bias.payload[n]) * abs(t + case.s - case.t - j)
            total += math.exp(score)
            terms += math.exp(score) * v[b, head, j]
        if inputs.sinks is not None:
            total += sum(math.exp(x) for x in inputs.sinks[n].tolist())
        expected = terms / total if total else terms
        assert np.allclose(answer.values["out"][b, n, t], expected, rtol=1e-12, atol=1e-14)
        lse = math.log(total) if total else -math.inf
        assert float(answer.values["lse"][b, n, t]) == pytest.approx(lse, rel=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    case = ELEMENTS["all"].with_(grad="qkvbs", lse=True, bias=("dense", "nts", "own", False))
    inputs = build(case)
    seen = allowed(case, inputs.mask)
    answer = naive(inputs, seen)

    def loss() -> float:
        values = naive(inputs, seen).values
        finite = torch.where(values["lse"].isfinite(), values["lse"], 0)
        return float((values["out"] * inputs.grad_out).sum() + (finite * inputs.grad_lse).sum())

    for name, leaf in inputs.leaves.items():
        flat = leaf.detach().view(-1)
        for i in range(0, flat.numel(), 3):
            before, step = float(flat[i]), 1e-6
            flat[i] = before + step
            up = loss()
            flat[i] = before - step
            down = loss()
            flat[i] = before
            slope = float(answer.values[name].reshape(-1)[i])
            assert slope == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_oracle_and_the_reference_are_the_same_baseline(dtype: torch.dtype) -> None:
    case = Case(seed=5, b=2, t=17, s=33, n=4, k=2, h=24, v=24, layout="BNTH", lse=True)
    inputs = build(case)
    ours = naive(inputs, allowed(case, None), dtype)
    problem = Problem(batch=2, q_len=17, kv_len=33, heads=4, kv_heads=2, head_dim=24, layout="BNTH")
    out, lse = reference_attention(problem, inputs.q, inputs.k, inputs.v, dtype=dtype)
    assert torch.allclose(ours.values["out"], out, rtol=1e-5, atol=1e-6)
    assert torch.allclose(ours.values["lse"], lse, rtol=1e-5, atol=1e-6)


def _yardstick(exact: torch.Tensor) -> Yardstick:
    return Yardstick("out", exact, exact.abs(), 1.0, lambda: exact)


def test_tolerance_takes_rounding_and_nothing_more() -> None:
    exact = torch.tensor([1.0, 1e-3, 100.0], dtype=torch.float64)
    assert measure(exact.float(), _yardstick(exact)) is None
    assert measure(exact.bfloat16(), _yardstick(exact)) is None
    assert measure((exact * (1 + 1e-5)).float(), _yardstick(exact)) is not None
    small_one_wrong = exact.clone()
    small_one_wrong[1] *= 1.001
    assert "[1]" in str(measure(small_one_wrong.float(), _yardstick(exact)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_tolerance_looks_at_finiteness_first(bad: float) -> None:
    exact = torch.zeros(3, dtype=torch.float64)
    assert measure(torch.tensor([0.0, bad, 0.0]), _yardstick(exact)) is not None


def test_tolerance_wants_infinities_where_they_belong() -> None:
    exact = torch.tensor([-math.inf, 0.0], dtype=torch.float64)
    yardstick = Yardstick("lse", exact, torch.ones(2).double(), 1.0, lambda: exact)
    assert measure(torch.tensor([-math.inf, 0.0]), yardstick) is None
    assert measure(torch.tensor([0.0, 0.0]), yardstick) is not None
    assert measure(torch.tensor([-1e30, 0.0]), yardstick) is not None


def _against_what_is_lost(seen: torch.Tensor, kept: torch.Tensor) -> list[str]:
    """Name the gradients that are out of bounds once the keys that are not `kept` have gone."""
    truth, without = naive(STEEP, seen), naive(STEEP, kept)
    found = []
    for name in ("key", "value"):
        exact, scale = truth.values[name], truth.scale[name]
        baseline = naive(STEEP, seen, torch.float32).values[name]
        yardstick = Yardstick(
            name, exact, scale, truth.score, lambda x=baseline: x, beyond=truth.beyond.get(name)
        )
        if measure(without.values[name].float(), yardstick) is not None:
            found.append(name)
    return found


STEEP = build(
    Case(seed=256461451, b=1, t=1, s=463, n=8, k=8, layout="BNTH",
         bias=("alibi", False, "own"), grad="qkv")
)  # fmt: skip


def test_gradients_of_probabilities_that_underflow_may_be_0_and_no_others() -> None:
    seen = allowed(STEEP.case, None)
    p = naive(STEEP, seen).scale["value"].sum(-1) / STEEP.grad_out.double().abs().sum(-1)
    tiny = torch.finfo(torch.float32).tiny
    assert _against_what_is_lost(seen, seen & (p[:, :, None] > 4 * tiny)) == []
    assert _against_what_is_lost(seen, seen & (p[:, :, None] > 1e3 * tiny)) == ["key", "value"]

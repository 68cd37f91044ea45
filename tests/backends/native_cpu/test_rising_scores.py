"""Blocks in tiles look for no maximum: scores that rise later raise the base of those before."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.masks import Causal, Mask, Padding, Window
from polyattn.masks.biases import DenseBias
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the native kernels are not built here"
)
# from key to key: the base is raised in few chunks, in some blocks, in each
STEPS = (0.003, 0.05, 0.6, 4.0, -0.05, -4.0)


def rising(
    rows: int, keys: int, dim: int, step: float, heads: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries whose scores rise by `step` a key, or fall in each other row; and noise."""
    torch.manual_seed(rows + keys + dim)
    q, k, v = (0.1 * torch.randn(1, n, heads, dim) for n in (rows, keys, keys))
    place = torch.arange(keys) - keys / 2
    k[0, :, :, 0] = (place / 16).round()[:, None]  # both parts are exact
    k[0, :, :, 1] = (place - 16 * (place / 16).round())[:, None]
    size = step * math.sqrt(dim) * torch.ones(rows)
    size[1::2] *= -1
    size[2::7] = 0
    q[0, :, :, 0], q[0, :, :, 1] = 16 * size[:, None], size[:, None]
    return q.bfloat16(), k.bfloat16(), (10 * v).bfloat16()


def held(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    """Hold output and lse, and the output alone, whose powers are shorter, to the definition."""
    exact, exact_lse = attention(
        q.double(), k.double(), v.double(), return_lse=True, backend="reference", **options
    )
    out, lse = attention(q, k, v, return_lse=True, backend="native_cpu", **options)
    torch.testing.assert_close(lse.double(), exact_lse.double(), atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(out.double(), exact.double(), atol=1e-2, rtol=2e-2)
    alone = attention(q, k, v, backend="native_cpu", **options)
    torch.testing.assert_close(alone.double(), exact.double(), atol=1e-2, rtol=2e-2)


@pytest.mark.parametrize("dim", [32, 64, 72, 128, 256])
@pytest.mark.parametrize("step", STEPS)
def test_scores_that_rise(step: float, dim: int, tiles: str) -> None:
    held(*rising(70, 700, dim, step))


@pytest.mark.parametrize(
    "mask", [Causal(), Window(left=150, right=3), Padding(kv_lengths=torch.tensor([333]))], ids=str
)
@pytest.mark.parametrize("step", STEPS)
def test_under_masks(step: float, mask: Mask, tiles: str) -> None:
    held(*rising(200, 600, 64, step), mask=mask)


@pytest.mark.parametrize("step", [0.05, 4.0])
@pytest.mark.parametrize("options", ["softcap", "bias", "sinks", "scale"])
def test_in_other_units(options: str, step: float, tiles: str) -> None:
    q, k, v = rising(70, 600, 64, step)
    chosen: dict[str, Any] = {
        "softcap": {"softcap": 40.0},
        "bias": {"bias": DenseBias(torch.linspace(-900, 900, 600).expand(1, 1, 70, 600))},
        "sinks": {"sinks": torch.tensor([30.0])},
        "scale": {"scale": -0.2},
    }
    held(q, k, v, **chosen[options])


def test_an_additive_mask_of_the_least_float(tiles: str) -> None:
    q, k, v = rising(70, 600, 64, 0.05)
    bias = torch.zeros(1, 1, 70, 600)
    bias[..., :300] = torch.finfo(torch.float32).min
    held(q, k, v, bias=DenseBias(bias))


@pytest.mark.parametrize("size", [30.0, 300.0])
def test_scores_beyond_those_that_may_be_shifted_in_one_step(size: float, tiles: str) -> None:
    """Up to 65,536 a fused product against the base is exact enough; beyond it is rounded first."""
    q, k, v = rising(70, 600, 64, 4.0)
    out = attention(q * size, k, v, backend="native_cpu")
    exact = attention((q * size).double(), k.double(), v.double(), backend="reference")
    torch.testing.assert_close(out.double()[:, ::2], exact[:, ::2], atol=1e-2, rtol=2e-2)


def test_parts_of_the_keys_meet(tiles: str) -> None:
    """One head's keys are split, and each part has bases of its own."""
    held(*rising(40, 4096, 64, 0.05))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("row", [0, 17, 69])
def test_a_row_that_is_not_finite_changes_no_other(row: int, bad: float, tiles: str) -> None:
    q, k, v = rising(70, 700, 64, 0.6)
    clean = attention(q, k, v, backend="native_cpu")
    q[0, row, 0, 5] = bad
    struck = attention(q, k, v, backend="native_cpu")
    others = torch.arange(70) != row
    assert torch.equal(struck[:, others], clean[:, others])
    assert struck[:, row].isnan().all()


@pytest.mark.parametrize("unseen", ["keys", "values"])
@pytest.mark.parametrize("step", [0.05, 4.0])
def test_what_is_masked_changes_no_bit(step: float, unseen: str, tiles: str) -> None:
    q, k, v = rising(200, 600, 64, step)
    mask = Window(left=100, right=0) & Padding(kv_lengths=torch.tensor([555]))
    clean = attention(q, k, v, mask=mask, backend="native_cpu")
    (k if unseen == "keys" else v)[:, 555:] = math.nan
    assert torch.equal(attention(q, k, v, mask=mask, backend="native_cpu"), clean)


@pytest.mark.parametrize("step", STEPS)
def test_a_row_is_the_same_in_any_company(step: float, tiles: str) -> None:
    """Which rows an item has changes no bit: the base depends on the row's own keys."""
    q, k, v = rising(192, 600, 64, step)
    whole = attention(q, k, v, backend="native_cpu")
    part = attention(q[:, 64:128], k, v, backend="native_cpu")
    assert torch.equal(whole[:, 64:128], part)

"""The drop-in's output lies in memory as that of torch's own function, eager and compiled."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from polyattn import use_backend
from polyattn.torch import scaled_dot_product_attention
from polyattn.torch.dropin import torch_sdpa

B, N, T, H = 2, 3, 5, 8
LAID: dict[str, Callable[[int, int], torch.Tensor]] = {
    "contiguous": lambda n, h: torch.randn(B, n, T, h),
    "heads-third": lambda n, h: torch.randn(B, T, n, h).transpose(1, 2),
    "one-batch": lambda n, h: torch.randn(1, n, T, h).expand(B, n, T, h),
    "one-batch-heads-third": lambda n, h: (
        torch.randn(1, T, n, h).transpose(1, 2).expand(B, n, T, h)
    ),
    "one-head": lambda n, h: torch.randn(B, 1, T, h).expand(B, n, T, h),
    "one-head-heads-third": lambda n, h: torch.randn(B, T, 1, h).transpose(1, 2).expand(B, n, T, h),
    "one-row": lambda n, h: torch.randn(B, n, 1, h).expand(B, n, T, h),
    "one-of-all": lambda n, h: torch.randn(1, 1, 1, h).expand(B, n, T, h),
    "cut-out": lambda n, h: torch.randn(B + 1, n + 2, T + 1, h + 3)[:B, 1 : n + 1, :T, :h],
    "cut-out-heads-third": lambda n, h: torch.randn(B, T + 2, n + 1, h + 3)[
        :, 1 : T + 1, :n, :h
    ].transpose(1, 2),
    "batch-second": lambda n, h: torch.randn(n, B, T, h).transpose(0, 1),
    "rows-first": lambda n, h: torch.randn(T, B, n, h).permute(1, 2, 0, 3),
    "strided-last": lambda n, h: torch.randn(B, n, T, 2 * h)[..., ::2],
    "dims-before-rows": lambda n, h: torch.randn(B, n, h, T).transpose(2, 3),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": torch.ones(T, T, dtype=torch.bool).tril()},
    "additive": {"attn_mask": torch.zeros(B, 1, T, T)},
    "trained": {"attn_mask": torch.zeros(T, T, requires_grad=True)},
    "dropout": {"dropout_p": 0.25},
}
NAMES = [None, "sdpa_flash", "native_cpu"]


def _asked(name: str | None) -> Any:
    return (
        contextlib.nullcontext() if name is None else use_backend(name, on_unsupported="fallback")
    )


def _calls() -> list[tuple[str, str, int, int, str]]:
    """Every way that queries lie, with every option; and some that keys and values lie."""
    first = itertools.product(LAID, ["contiguous"], [N], [H], ["plain", "boolean"])
    second = itertools.product(["heads-third"], LAID, [N], [H], ["plain", "causal"])
    third = itertools.product(
        ["one-head", "heads-third"], ["contiguous"], [N, 2 * N], [H, 12], OPTIONS
    )
    return [*first, *second, *third]


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_strides_are_torchs(name: str | None) -> None:
    for q_laid, kv_laid, heads, dim, option in _calls():
        q, k, v = LAID[q_laid](heads, H), LAID[kv_laid](N, H), LAID[kv_laid](N, dim)
        options = OPTIONS[option] | ({"enable_gqa": True} if heads != N else {})
        for trains in (False, True):
            leaf = q.detach().requires_grad_(trains)
            expected = torch_sdpa(leaf, k, v, **options)
            with _asked(name):
                got = scaled_dot_product_attention(leaf, k, v, **options)
            about = f"{q_laid} {kv_laid} {heads} {dim} {option} {trains}"
            assert got.stride() == expected.stride(), about


@pytest.mark.parametrize("name", ["sdpa_flash", "native_cpu"])
@pytest.mark.parametrize("q_laid", ["heads-third", "one-head"])
def test_compiled_strides_are_those_of_eager_code(q_laid: str, name: str) -> None:
    q, k = LAID[q_laid](N, H), LAID["contiguous"](N, H)
    for option, trains in (("plain", False), ("boolean", True)):
        torch.compiler.reset()
        leaf = q.detach().requires_grad_(trains)

        @torch.compile(fullgraph=True, backend="aot_eager", dynamic=False)
        def attend(q: torch.Tensor, option: str = option) -> torch.Tensor:
            return scaled_dot_product_attention(q, k, k, **OPTIONS[option])

        with use_backend(name):
            eager = scaled_dot_product_attention(leaf, k, k, **OPTIONS[option])
            got = attend(leaf)
        assert got.stride() == eager.stride()
        torch.testing.assert_close(got, eager)


def test_a_nan_does_not_change_the_strides() -> None:
    q, k = LAID["heads-third"](N, H), LAID["contiguous"](N, H)
    k[:, :, 3] = float("nan")
    for option in ("causal", "boolean"):
        expected = torch_sdpa(q, k, k, **OPTIONS[option])
        with use_backend("sdpa_flash"):
            got = scaled_dot_product_attention(q, k, k, **OPTIONS[option])
        assert got.stride() == expected.stride()
        assert got[:, :, :3].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("shape", "order"),
    [((T, N, H), (1, 0, 2)), ((B, B, T, N, H), (0, 1, 3, 2, 4)), ((H, T), (1, 0))],
)
def test_of_other_ranks(shape: tuple[int, ...], order: tuple[int, ...], causal: bool) -> None:
    q = torch.randn(shape).permute(order)
    expected = torch_sdpa(q, q, q, is_causal=causal)
    compiled = torch.compile(scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    for function in (scaled_dot_product_attention, compiled):
        out = function(q, q, q, is_causal=causal)
        assert out.stride() == expected.stride()
        torch.testing.assert_close(out, expected)

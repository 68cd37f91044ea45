"""What a call costs in a program: between two of them layers work, and empty the caches.

A loop of nothing but one call finds all of its code and data in the first cache. A model makes a
short call between matrices that fill the second one; there the way to a kernel takes ten times as
long, torch's own too. So each call here is timed by itself after the layers of a small decoder have
run, torch's function and polyattn's by turns, with the choice left to polyattn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["CALLS_PER_ROUND", "Call", "calls", "rows"]

CALLS_PER_ROUND = 12
"""Calls of each function in a round."""
_WIDTH, _INNER = 512, 2048  # whose weights are 11 MB in float32, more than most second caches hold


@dataclass(frozen=True)
class Call:
    """A call: heads, rows, head dim; `mask` is none, causal or booleans."""

    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    dtype: str
    head_dim: int = 64
    mask: str = "none"

    @property
    def name(self) -> str:
        """Return what the row is called."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        rows = f"{self.q_len}x{self.kv_len}" if self.q_len != self.kv_len else f"{self.q_len}"
        mask = "" if self.mask == "none" else f" {self.mask}"
        return f"(1,{heads},{rows},{self.head_dim}){mask} {self.dtype}"


def calls() -> Iterator[Call]:
    """Yield what is timed: steps of decoders, and a short prompt."""
    for dtype in ("float32", "bfloat16"):
        yield Call(8, 8, 1, 60, dtype)
        yield Call(8, 8, 1, 1500, dtype)
        yield Call(16, 4, 1, 200, dtype)
        yield Call(16, 4, 1, 200, dtype, mask="booleans")
        yield Call(8, 8, 64, 64, dtype, mask="causal")


def rows(rounds: int) -> list[dict[str, Any]]:
    """Time every call and return its row: microseconds of both functions, and torch's over ours."""
    work = _layers()
    return [_row(call, work, rounds * CALLS_PER_ROUND) for call in calls()]


def _layers() -> Callable[[], Any]:
    """Return what a program does between two calls: the layers of a small decoder, one token."""
    import torch
    from torch import nn

    made = nn.Sequential(
        nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _INNER), nn.GELU(), nn.Linear(_INNER, _WIDTH),
        nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH),
    ).requires_grad_(False)  # fmt: skip
    token = torch.randn(1, 1, _WIDTH)
    return lambda: made(token)


def _row(call: Call, work: Callable[[], Any], count: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    from polyattn import record_selections
    from polyattn.torch import scaled_dot_product_attention as ours

    given, options = _arguments(call)
    with torch.inference_mode():
        with record_selections() as made:
            ours(*given, **options)
        functions = {"torch": F.scaled_dot_product_attention, "ours": ours}
        for function in functions.values():  # the first calls of a kind
            for _ in range(3):
                function(*given, **options)
        taken = _by_turns(functions, lambda f: f(*given, **options), work, count)
    low, ratio, high = _quartiles([a / b for a, b in zip(*taken.values(), strict=True)])
    medians = {name: round(statistics.median(x) * 1e6, 2) for name, x in taken.items()}
    return {
        "name": call.name, "torch_us": medians["torch"], "ours_us": medians["ours"],
        "ratio": {"median": ratio, "q1": low, "q3": high}, "ran": made[0].backend,
    }  # fmt: skip


def _by_turns(
    functions: dict[str, Any], run: Callable[[Any], Any], work: Callable[[], Any], count: int
) -> dict[str, list[float]]:
    """Return the seconds of each call; who comes first changes from turn to turn."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    for _ in range(count):
        for name in names:
            work()
            begin = time.perf_counter()
            run(functions[name])
            taken[name].append(time.perf_counter() - begin)
        names.reverse()
    return taken


def _arguments(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arrays as a decoder has them, and the options of the call."""
    import torch

    dtype = getattr(torch, call.dtype)
    q = torch.randn(1, call.q_len, call.heads, call.head_dim).to(dtype).transpose(1, 2)
    k, v = (torch.randn(1, call.kv_heads, call.kv_len, call.head_dim).to(dtype) for _ in range(2))
    options: dict[str, Any] = {"scale": call.head_dim**-0.5}
    if call.heads != call.kv_heads:
        options["enable_gqa"] = True
    if call.mask == "causal":
        options["is_causal"] = True
    elif call.mask == "booleans":
        options["attn_mask"] = (torch.arange(call.kv_len) < call.kv_len * 3 // 4)[None, None, None]
    return (q, k, v), options


def _quartiles(ratios: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return round(low, 3), round(middle, 3), round(high, 3)

"""The statistics of a tensor by operations of torch: for every device, and without the extension.

In blocks, so that memory is bounded; nothing waits for the device.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from polyattn.errors import TraceError
from polyattn.trace.statistics.schema import (
    BUCKETS,
    COUNTS,
    MOMENTS,
    SAMPLED,
    SAMPLES,
    SORTS,
    WIDTH,
)

__all__ = ["real_values", "torch_statistics"]

CPU_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 22
"""Elements converted to float64 at a time, multiples of 64: in the CPU's cache, and enough of them
to keep a device busy."""

_TABLES = 256
"""Blocks whose signs are kept, 64 kB each on the CPU; a 64th of that on a device."""

_SAFE = 400
"""Squares of numbers from 2**-400 to 2**400, and sums of them, stay within float64."""


def real_values(t: Tensor) -> Tensor:
    """Return a dense tensor of real numbers with the elements of `t`, complex ones as two.

    A view of `t` where there is one. Raises TraceError for layouts that are no plain numbers.
    """
    if t.layout is not torch.strided or t.is_quantized or t.is_nested:
        kind = "nested" if t.is_nested else "quantised" if t.is_quantized else str(t.layout)
        raise TraceError(
            f"got a tensor that is {kind}, expected a dense one; record t.to_dense(), "
            "t.dequantize() or its values."
        )
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    if t.is_neg():
        return t.resolve_neg()
    if t.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return t.to(_wide(t.device))
    if t.is_floating_point() and t.dtype.itemsize == 1:
        return t.to(torch.float32)
    return t


def torch_statistics(t: Tensor) -> Tensor:
    """Return the row of a tensor of `real_values`, on its device.

    >>> torch_statistics(torch.tensor([2.0, 0.0, float("-inf")]))[:7].tolist()
    [3.0, 0.0, 0.0, 1.0, 1.0, 0.0, 2.0]
    """
    flat = t.reshape(-1)
    n = flat.numel()
    if n == 0:
        return _empty(t.device)
    half, size = _half_scale(flat), _block_size(t.device)
    parts = torch.stack(
        [_block(flat[start : start + size], start // size, half) for start in range(0, n, size)]
    )
    at = [i * (n - 1) // (SAMPLED - 1) for i in range(SAMPLED)]
    index = torch.tensor(at, device=t.device)
    return torch.cat([_join(parts, n, half), flat[index].to(parts.dtype), _sketch(parts, half)])


def _block_size(device: torch.device) -> int:
    return CPU_BLOCK if device.type == "cpu" else DEVICE_BLOCK


_SUMS = (*SORTS, "finite", "low", "high", "absolute", "mean", "m2")
"""The first numbers of what `_block` returns; the buckets follow."""


def _block(block: Tensor, number: int, half: Tensor | None) -> Tensor:
    """Return the sums of one block as one vector."""
    x = block.to(_wide(block.device))
    fine = None if x.is_cpu else x.isfinite()
    if fine is None:  # a look at its extremes waits for nothing
        low, high = x.aminmax()
        finite, nan = low.new_tensor(len(x)), low.new_zeros(())
        plus = minus = nan
        if not (math.isfinite(low) and math.isfinite(high)):
            fine = x.isfinite()
    if fine is not None:
        finite, nan = fine.sum(), x.isnan().sum()
        plus, minus = (x == math.inf).sum(), (x == -math.inf).sum()
        low, high = x.where(fine, math.inf).amin(), x.where(fine, -math.inf).amax()
    zero = len(x) - x.count_nonzero()
    if fine is not None:
        x = x.where(fine, 0)
    if half is not None:
        x = x * half * half
    mean = x.sum() / finite.clamp(min=1)
    distance = x - mean
    if fine is not None:
        distance = distance.where(fine, 0)
    sums = {
        "nan": nan, "pinf": plus, "ninf": minus, "zero": zero, "finite": finite, "low": low,
        "high": high, "absolute": torch.linalg.vector_norm(x, 1), "mean": mean,
        "m2": distance.dot(distance),
    }  # fmt: skip
    rest = -len(x) % BUCKETS
    rows = (torch.nn.functional.pad(x, (0, rest)) if rest else x).view(-1, BUCKETS)
    sketch = (rows * _signs(block.device, number, rows)).sum(0)
    return torch.cat([torch.stack([sums[name].to(x.dtype) for name in _SUMS]), sketch])


def _join(parts: Tensor, n: int, half: Tensor | None) -> Tensor:
    """Return the fields of a row from the blocks' vectors."""
    of = dict(zip(_SUMS, parts[:, : len(_SUMS)].unbind(1), strict=True))
    counts = parts[:, : len(SORTS) + 1].sum(0)
    finite = counts[-1]
    safe = finite.clamp(min=1)
    mean = (of["mean"] * (of["finite"] / safe)).sum()
    m2 = (of["m2"] + of["finite"] * (of["mean"] - mean).square()).sum()
    l1 = of["absolute"].sum()
    scaled = {
        "sum": mean * finite, "mean": mean, "std": (m2 / safe).sqrt(), "abs_mean": l1 / safe,
        "l1": l1, "l2": (m2 + finite * mean.square()).sqrt(),
    }  # fmt: skip
    unscaled = _unscaled(torch.stack(list(scaled.values())), half).unbind()
    found = dict(zip(scaled, unscaled, strict=True))
    found |= {"min": of["low"].min(), "max": of["high"].max()}
    numbers = torch.stack([found[name] for name in MOMENTS]).where(finite > 0, math.nan)
    return torch.cat([counts.new_full((1,), n), counts[:-1], numbers])


def _sketch(parts: Tensor, half: Tensor | None) -> Tensor:
    return _unscaled(parts[:, len(_SUMS) :].sum(0), half)


def _half_scale(flat: Tensor) -> Tensor | None:
    """Return the square root of what the elements are to be multiplied by: only for float64."""
    if flat.dtype is not torch.float64:
        return None
    fine = flat.where(flat.isfinite(), 0)
    exponent = fine.abs().amax().frexp().exponent
    exponent = exponent.where(exponent.abs() > _SAFE, 0)
    one = torch.ones((), dtype=torch.float64, device=flat.device)
    return torch.ldexp(one, torch.div(-exponent, 2, rounding_mode="floor"))


def _unscaled(x: Tensor, half: Tensor | None) -> Tensor:
    if half is not None:
        x = x / half / half
    largest = torch.finfo(x.dtype).max
    return x.clamp(-largest, largest)


def _empty(device: torch.device) -> Tensor:
    row = torch.zeros(WIDTH, dtype=_wide(device), device=device)
    row[len(COUNTS) : SAMPLES.stop] = math.nan
    return row


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _signs(device: torch.device, number: int, like: Tensor) -> Tensor:
    """Return the signs of the rows `like`, which are of one block."""
    table = _cpu_table if device.type == "cpu" else _device_table
    return table(device, number)[: len(like)]


def _table(device: torch.device, number: int) -> Tensor:
    """Return the signs of one block of elements, int8 of shape (rows, BUCKETS).

    Shorter blocks take the first rows. Made on the CPU, from where a copy is complete before any
    stream of the device can use it.
    """
    rows = _block_size(device) // BUCKETS
    with torch.inference_mode(False):
        words = _splitmix64(torch.arange(number * rows, (number + 1) * rows))
        bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
        signs = (1 - 2 * bits).to(torch.int8)[words.view(torch.uint8).long()]
        return signs.view(rows, BUCKETS).to(device)


_cpu_table = functools.lru_cache(maxsize=_TABLES)(_table)
_device_table = functools.lru_cache(maxsize=_TABLES // 64)(_table)


def _splitmix64(words: Tensor) -> Tensor:
    """Return the hash of each word; int64 arithmetic wraps around as the unsigned one does."""

    def shifted(z: Tensor, by: int) -> Tensor:  # without the sign
        return (z >> by) & ((1 << (64 - by)) - 1)

    z = words + (0x9E3779B97F4A7C15 - 2**64)
    z = (z ^ shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    z = (z ^ shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
    return z ^ shifted(z, 31)

"""The model of a traced call of three dense tensors and nothing else, as most calls are."""

from __future__ import annotations

from typing import Any

from polyattn.torch.call_model import ARRAY, B, S, T, has_unit_stride

__all__ = ["model_of_plain", "plain_model_of"]


def plain_model_of(
    q: Any, k: Any, v: Any, turned: bool, asked: Any, limits: Any, bounds_of: Any
) -> Any:
    """Return what `polyattn.torch.call_model.model_of` does, but the model not written out.

    `turned`: heads come second. Sizes are compared where they stand: which of the arrays' dims are
    the same one is known here. Most calls are such, and a compiler guards every global and built-in
    that is read, at each call: so nothing is read here, and what is called is nested.
    """

    def number_of(size: int) -> int:
        low, high = 0, bound_of(size)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if size <= middle else (middle + 1, high)
        return high

    def bound_of(size: int) -> int:
        # by comparisons only: those with powers of two guard a range of a symbolic size
        high = 1
        while high < size:
            high *= 2
        return high if size else 0

    ti, ni = (2, 1) if turned else (1, 2)
    b, t, s, n = q.shape[0], q.shape[ti], k.shape[ti], q.shape[ni]
    sizes = (b, t, s, n)
    fits = k.shape[0] == b and v.shape[0] == b and v.shape[ti] == s
    if not (fits and v.shape[ni] == k.shape[ni] and k.shape[3] == q.shape[3]):
        return sizes, None, None
    fixed = [number_of(x) for x in (n, k.shape[ni], q.shape[3], v.shape[3])]
    arrays = []
    for x in (q, k, v):
        arrays.append([x.dtype, x.device, x.requires_grad, has_unit_stride(x)])
    found = (turned, fixed, arrays)
    return sizes, found, bounds_of(b, t, s, found, asked, limits)


def model_of_plain(found: Any) -> Any:
    """Return the model that :func:`plain_model_of` describes."""
    turned, (n, kv, h, last), arrays = found
    heads = [(n, T, h), (kv, S, h), (kv, S, last)]
    made = []
    for (dtype, device, grad, unit), (count, length, dim) in zip(arrays, heads, strict=True):
        shape = (B, count, length, dim) if turned else (B, length, count, dim)
        made.append((ARRAY, shape, dtype, str(device), grad, unit, "strided"))
    return (*made, None, None, None)

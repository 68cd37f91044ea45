"""Partial attention results and how to join them.

Attention over the keys ``S`` can be computed over parts of them. A part gives ``(out, lse)``: its
softmax-weighted values and the natural log of the sum of ``exp`` of its scores. Two parts join to

::

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

which is the result over the keys of both. The laws:

- **Neutral.** ``lse = -inf`` means "saw no key". Such a part contributes nothing, whatever its
  ``out`` holds, NaN included. Two such parts give ``out = 0`` and ``lse = -inf``, never NaN.
- **Commutative** and, up to rounding, **associative**: the order of the parts is free.
- **Gradients** are finite, and zero into a part that saw no key.
- **Dtypes.** ``lse`` is float32 (float64 stays float64); ``out`` is joined at least in the dtype of
  ``lse`` and returned in its own.

The arrays may be NumPy, torch or JAX arrays; this module imports none of the three.

>>> import numpy as np
>>> scores, values = np.array([0.0, 1.0, 2.0, 3.0]), np.array([[1.0], [2.0], [3.0], [4.0]])
>>> def part(keys):
...     weights = np.exp(scores[keys])
...     return Partial(weights @ values[keys] / weights.sum(), np.log(weights.sum()))
>>> whole, joined = part(slice(0, 4)), merge(part(slice(0, 1)), part(slice(1, 4)))
>>> bool(np.allclose(whole.out, joined.out)), bool(np.allclose(whole.lse, joined.lse))
(True, True)
>>> nothing = Partial(np.array([np.nan]), np.array(-np.inf))
>>> merge(nothing, nothing)
Partial(out=array([0.]), lse=array(-inf))
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from polyattn.errors import InvalidProblem

__all__ = ["Partial", "merge", "merge_all", "rescale_for_sink"]

Array: TypeAlias = Any
Namespace: TypeAlias = Any


class Partial(NamedTuple):
    """Attention over some of the keys: `out` (..., T, H) and `lse` (..., T), in the same order.

    With the layout ``BTNH`` the lse is ``(B, N, T)``; move its dims to ``(B, T, N)`` first.
    """

    out: Array
    lse: Array


def merge(a: Partial, b: Partial) -> Partial:
    """Join two partial results over different keys of the same queries.

    Raises InvalidProblem if the shapes do not fit or the arrays are of different libraries.

    >>> import numpy as np
    >>> seen = Partial(np.array([[1.0, 2.0]]), np.array([0.5]))
    >>> empty = Partial(np.array([[np.nan, np.nan]]), np.array([-np.inf]))
    >>> merge(seen, empty)
    Partial(out=array([[1., 2.]]), lse=array([0.5]))
    """
    return merge_all((a, b))


def merge_all(partials: Iterable[Partial]) -> Partial:
    """Join any number of partial results, one after the other; `out` is rounded once, at the end.

    >>> import numpy as np
    >>> parts = [Partial(np.array([[float(i)]]), np.array([0.0])) for i in range(4)]
    >>> merge_all(parts).out
    array([[1.5]])
    """
    rest = iter(partials)
    first = next(rest, None)
    if first is None:
        raise InvalidProblem("merge_all: got no partial; expected one at least; pass every part")
    first = Partial(*first)
    xp = _namespace(first)
    out_dtype = first.out.dtype
    joined = _widened(xp, first)
    joined = Partial(_without_empty(xp, joined), joined.lse)
    for part in rest:
        part = Partial(*part)
        _check_alike(first, part, xp)
        out_dtype = xp.promote_types(out_dtype, part.out.dtype)
        joined = _join(xp, joined, _widened(xp, part))
    return Partial(_cast(joined.out, out_dtype), joined.lse)


def rescale_for_sink(out: Array, lse: Array, sink_lse: Array) -> Partial:
    """Add sinks to the softmax denominator of a result that was computed without them.

    `sink_lse` is the log-sum-exp of the sinks of each row, in any shape that broadcasts to `lse`:
    for sinks (N,) and lse (B, N, T) pass ``sinks[:, None]``. A sink takes weight and has no value:
    ``lse' = log(exp(lse) + exp(sink_lse))``, ``out' = out * exp(lse - lse')``. A row without keys
    gives ``out = 0`` and ``lse = sink_lse``; a sink of ``-inf`` changes nothing. Apply it once, to
    the whole: a sink added to each part would count several times.

    >>> import numpy as np
    >>> rescale_for_sink(np.array([[4.0]]), np.array([0.0]), np.array([0.0])).out
    array([[2.]])
    """
    given = Partial(out, lse)
    xp = _namespace(given)
    _check_sink(xp, lse, sink_lse)
    wide = _widened(xp, given)
    sink = xp.broadcast_to(_cast(sink_lse, wide.lse.dtype), wide.lse.shape)
    weight, _, joined = _weights(xp, wide.lse, sink)
    return Partial(_cast(weight[..., None] * _without_empty(xp, wide), out.dtype), joined)


def _join(xp: Namespace, a: Partial, b: Partial) -> Partial:
    weight_a, weight_b, lse = _weights(xp, a.lse, b.lse)
    out_a, out_b = _without_empty(xp, a), _without_empty(xp, b)
    return Partial(weight_a[..., None] * out_a + weight_b[..., None] * out_b, lse)


def _weights(xp: Namespace, a: Array, b: Array) -> tuple[Array, Array, Array]:
    """The share of each side and the joined lse.

    Both the argument and the result of `exp` and `log` are chosen by `where`: with only the result
    chosen, the gradient of the side that was not chosen would be 0 * inf = NaN.
    """
    empty_a, empty_b = a == -math.inf, b == -math.inf
    both = empty_a & empty_b
    zero = xp.zeros_like(a)
    largest = xp.where(both, zero, xp.maximum(a, b))
    exp_a = xp.where(empty_a, zero, xp.exp(xp.where(empty_a, largest, a) - largest))
    exp_b = xp.where(empty_b, zero, xp.exp(xp.where(empty_b, largest, b) - largest))
    total = xp.where(both, xp.ones_like(a), exp_a + exp_b)
    lse = xp.where(both, xp.full_like(a, -math.inf), largest + xp.log(total))
    return exp_a / total, exp_b / total, lse


def _without_empty(xp: Namespace, part: Partial) -> Array:
    return xp.where((part.lse == -math.inf)[..., None], xp.zeros_like(part.out), part.out)


def _widened(xp: Namespace, part: Partial) -> Partial:
    lse = _cast(part.lse, xp.promote_types(part.lse.dtype, xp.float32))
    return Partial(_cast(part.out, xp.promote_types(part.out.dtype, lse.dtype)), lse)


def _cast(array: Array, dtype: Any) -> Array:
    return array.to(dtype) if hasattr(array, "to") else array.astype(dtype)


def _loaded(name: str) -> Any:
    """A module that is loaded already, or None: an array's own library always is."""
    return sys.modules.get(name)


def _namespace(part: Partial) -> Namespace:
    """The library of the arrays of `part`, whose shapes are checked too."""
    xp = _library(part.lse)
    if xp is None or _library(part.out) is not xp:
        raise InvalidProblem(
            f"partial: got out {type(part.out).__name__} and lse {type(part.lse).__name__}; "
            "expected two arrays of one library: numpy, torch or jax; convert one of them"
        )
    if tuple(part.out.shape[:-1]) != tuple(part.lse.shape) or not part.out.shape:
        raise InvalidProblem(
            f"partial: got out {tuple(part.out.shape)} and lse {tuple(part.lse.shape)}; expected "
            "(..., T, H) and (..., T); move the dims of one so that their orders agree"
        )
    return xp


def _library(array: Array) -> Namespace | None:
    torch, jax, numpy = _loaded("torch"), _loaded("jax"), _loaded("numpy")
    if torch is not None and isinstance(array, torch.Tensor):
        return torch
    if jax is not None and isinstance(array, jax.Array):
        return _loaded("jax.numpy")
    if numpy is not None and isinstance(array, (numpy.ndarray, numpy.generic)):
        return numpy
    return None


def _check_alike(a: Partial, b: Partial, xp: Namespace) -> None:
    if _namespace(b) is not xp or tuple(a.out.shape) != tuple(b.out.shape):
        raise InvalidProblem(
            f"merge: got out {tuple(a.out.shape)} and {tuple(b.out.shape)} of "
            f"{type(a.out).__name__} and {type(b.out).__name__}; expected partial results of the "
            "same queries in one library; broadcast or convert them first"
        )


def _check_sink(xp: Namespace, lse: Array, sink_lse: Array) -> None:
    fits = _library(sink_lse) is xp and len(sink_lse.shape) <= len(lse.shape)
    pairs = zip(reversed(sink_lse.shape), reversed(lse.shape), strict=False) if fits else ()
    if not fits or any(sink not in (1, row) for sink, row in pairs):
        raise InvalidProblem(
            f"rescale_for_sink: got sink_lse {tuple(getattr(sink_lse, 'shape', ()))} of "
            f"{type(sink_lse).__name__} for lse {tuple(lse.shape)}; expected an array of the same "
            "library that broadcasts to lse; pass sinks[:, None] for lse (B, N, T)"
        )

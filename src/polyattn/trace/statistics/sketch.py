"""The position-sensitive sketch of a tensor, ``polyattn.sketch/1``: its definition and reference.

A sketch is 64 float64 numbers, "buckets". For each element x[i], with i its flat index in C order
in the *whole* tensor (not in the shard or slice at hand):

    bucket(i) = i mod 64
    sign(i)   = +1 if bit (i mod 64) of splitmix64(i div 64) is 0, else -1
    sketch[bucket(i)] += sign(i) * x[i]

    splitmix64(z):                                   all modulo 2**64
        z += 0x9E3779B97F4A7C15
        z = (z xor (z >> 30)) * 0xBF58476D1CE4E5B9
        z = (z xor (z >> 27)) * 0x94D049BB133111EB
        return z xor (z >> 31)

NaN and infinities count as 0 (they are counted apart). Complex numbers are two elements, real and
imaginary: a last dimension of 2. Integers and bools are their numbers. A bucket that passes the
range of float64 is its largest number.

It is linear, so the sketches of shards, slices and partial sums add up to that of the whole; it
sees permutations, which sums and norms do not; and the expectation of its squared norm is that of
the tensor, so that relative distances of sketches estimate those of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from polyattn.errors import TraceError
from polyattn.trace.statistics.sketch_text import BUCKETS, pack, unpack
from polyattn.trace.statistics.values import CHUNK, LARGEST, as_array, chunks, row

__all__ = ["BUCKETS", "NAME", "decode", "distance", "encode", "flat_index", "sketch", "splitmix64"]

NAME = "polyattn.sketch/1"

Sketch = NDArray[np.float64]
_Words = NDArray[np.uint64]
_BITS = np.uint64(63)
_ROOM = 64
"""Powers of two that no sum of float64 numbers can need: there are fewer than 2**64 of them."""


def splitmix64(words: _Words) -> _Words:
    """Return the hash of each 64-bit word.

    >>> [hex(word) for word in splitmix64(np.arange(2, dtype=np.uint64))]
    ['0xe220a8397b1dcdaf', '0x910a2dec89025cc1']
    """
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sketch(array: ArrayLike, *, offset: int = 0, index: ArrayLike | None = None) -> Sketch:
    """Return the 64 buckets of an array, or of a part of a larger one.

    `offset`: the flat index, in the whole tensor, of the array's first element, for a part that is
    one run of it. `index`: the flat index of each element, an array of the same shape, for any
    other part; :func:`flat_index` makes it from slices. Both count elements of the array, complex
    ones too. Raises TraceError for what is no array of numbers or an index that is none.

    >>> x = np.arange(1000.0)
    >>> bool(np.allclose(sketch(x), sketch(x[:300]) + sketch(x[300:], offset=300)))
    True
    """
    found = as_array(array)
    parts = 2 if found.dtype.kind == "c" else 1
    values = row(found)
    if index is None:
        if not isinstance(offset, int | np.integer) or not 0 <= offset < 2**62:
            raise TraceError(f"got offset {offset!r}, expected an index of an element, 0 or more.")
        start = int(offset) * parts
        return _saturated(lambda scale: _of_run(values, start, scale))
    places = _places(index, found.shape, offset, parts)
    return _saturated(lambda scale: _of_places(values, places, scale))


def _places(index: ArrayLike, shape: tuple[int, ...], offset: int, parts: int) -> _Words:
    places = np.asarray(index)
    if offset or places.shape != shape or places.dtype.kind not in "iu" or np.any(places < 0):
        raise TraceError(
            f"got an index of shape {places.shape} and dtype {places.dtype} (offset {offset}), "
            f"expected integers of 0 or more in the array's shape {shape}, and no offset beside it."
        )
    flat = places.reshape(-1).astype(np.uint64)
    if parts == 1:
        return flat
    pairs = np.repeat(flat * np.uint64(2), 2)
    pairs[1::2] += np.uint64(1)
    return pairs


def _saturated(total: Callable[[int | None], Sketch]) -> Sketch:
    """`total(None)`, unless it is not finite: then without what is not, and within float64."""
    with np.errstate(all="ignore"):
        buckets = total(None)
        if np.isfinite(buckets).all():
            return buckets
        buckets = np.ldexp(total(-_ROOM), _ROOM)
        return np.clip(buckets, -LARGEST, LARGEST, out=buckets)


def _prepared(values: NDArray[Any], scale: int | None) -> Iterator[Sketch]:
    for chunk in chunks(values):
        if scale is not None:
            chunk = np.ldexp(np.where(np.isfinite(chunk), chunk, 0.0), scale)
        yield chunk


def _of_run(values: NDArray[Any], start: int, scale: int | None) -> Sketch:
    """A run of elements: one hash for each 64 of them, whose bits flip the signs in place."""
    total = np.zeros(BUCKETS)
    for chunk in _prepared(values, scale):
        word, lead = divmod(start, BUCKETS)
        start += chunk.size
        if lead or chunk.size % BUCKETS:
            rows = -(-(lead + chunk.size) // BUCKETS)
            padded = np.zeros(rows * BUCKETS)
            padded[lead : lead + chunk.size] = chunk
            chunk = padded
        count = chunk.size // BUCKETS
        words = splitmix64(np.arange(count, dtype=np.uint64) + np.uint64(word))
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")
        signs = chunk.view(np.uint64)
        signs ^= bits.astype(np.uint64) << _BITS
        total += chunk.reshape(count, BUCKETS).sum(axis=0)
    return total


def _of_places(values: NDArray[Any], places: _Words, scale: int | None) -> Sketch:
    total = np.zeros(BUCKETS)
    for number, chunk in enumerate(_prepared(values, scale)):
        at = places[number * CHUNK : number * CHUNK + chunk.size]
        bucket = at & _BITS
        signs = chunk.view(np.uint64)
        signs ^= (splitmix64(at >> np.uint64(6)) >> bucket) << _BITS
        total += np.bincount(bucket.astype(np.intp), weights=chunk, minlength=BUCKETS)
    return total


def flat_index(shape: Sequence[int], slices: Sequence[slice]) -> NDArray[np.int64]:
    """Return the flat index of each element of ``whole[slices]``, `whole` being of `shape`.

    >>> flat_index((4, 6), (slice(2, 4), slice(0, 6, 3)))
    array([[12, 15],
           [18, 21]])
    """
    if len(slices) > len(shape) or not all(isinstance(s, slice) for s in slices):
        raise TraceError(f"got slices {slices!r} of a tensor of shape {tuple(shape)}: no part.")
    full = [*slices, *[slice(None)] * (len(shape) - len(slices))]
    place, stride = np.zeros((), np.int64), 1
    for size, part in reversed(list(zip(shape, full, strict=True))):
        along = np.arange(*part.indices(size), dtype=np.int64) * stride
        place = along.reshape(-1, *[1] * place.ndim) + place
        stride *= size
    return place


def encode(buckets: ArrayLike) -> str:
    """Return a sketch as text for a record; see :mod:`polyattn.trace.statistics.sketch_text`."""
    return pack(np.asarray(buckets, np.float64).reshape(-1).tolist())


def decode(text: str) -> Sketch:
    """Return the sketch that :func:`encode` wrote, rounded to float32, as 64 float64.

    >>> float(distance(decode(encode(sketch(np.arange(99.0)))), sketch(np.arange(99.0)))) < 1e-7
    True
    """
    return np.array(unpack(text))


def distance(a: ArrayLike | str, b: ArrayLike | str) -> float:
    """Return the relative L2 distance of two sketches: ``|a - b| / max(|a|, |b|)``, from 0 to 2.

    0 if both are 0. Either may be text. It estimates the same of the tensors, with a standard
    deviation of about a tenth of it; rounding to float32 in a record adds about 6e-8.
    """
    one, other = (decode(x) if isinstance(x, str) else np.asarray(x, np.float64) for x in (a, b))
    largest = max(float(np.abs(one).max()), float(np.abs(other).max()))
    if largest == 0:
        return 0.0
    one, other = one / largest, other / largest
    norm = max(np.linalg.norm(one), np.linalg.norm(other))
    return float(np.linalg.norm(one - other) / norm)

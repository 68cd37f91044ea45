"""A mask as a program that the native kernels run: a few integers, and the arrays they name.

The program is flat, so that it fits into the schema of an operator: :data:`WIDTH` integers for
each term, in postfix order. It has no pointers; these come in last, by :func:`terms`.

===========  ==========================  =========================================
kind         its three numbers           meaning, for query t and key j
===========  ==========================  =========================================
EVERYTHING                               true
BAND         low, high, bottom_right     low <= j - (t + offset) <= high
KV_LIMIT     lengths                     j < lengths[b]
Q_LIMIT      lengths                     t < lengths[b]
SEGMENTS     q_ids, kv_ids               q_ids[b][t] == kv_ids[b][j]
BLOCKS       bits, block_q, block_k      bits[b][n][t // block_q][j // block_k]
DENSE        allowed                     allowed[b][n][t][j]
BOTH                                     the last two terms, joined by "and"
EITHER                                   the last two terms, joined by "or"
PACKED       cu_q, cu_kv                 no term: where the sequences lie; comes first
===========  ==========================  =========================================

Arrays are named by their place in :attr:`Program.arrays`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from polyattn.masks import (
    And,
    BlockMap,
    Causal,
    Dense,
    Full,
    Mask,
    Or,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.payload import shape_of

__all__ = [
    "MOST_DEPTH",
    "MOST_TERMS",
    "UNBOUNDED",
    "WIDTH",
    "ArrayLibrary",
    "Offsets",
    "Payload",
    "Program",
    "Terms",
    "arrays_of",
    "dense_program",
    "encode",
    "terms",
]

WIDTH = 4
MOST_TERMS = 32
MOST_DEPTH = 8
UNBOUNDED = 1 << 62

(EVERYTHING, BAND, KV_LIMIT, Q_LIMIT, SEGMENTS, BLOCKS, DENSE, BOTH, EITHER, PACKED) = range(10)


class Payload(NamedTuple):
    """An array of the mask and what it is for.

    `role`: ``integers`` (lengths, ids, offsets), ``bits`` (then `value` is the BlockMap) or
    ``allowed`` (of a Dense).
    """

    role: str
    value: Any


class Program(NamedTuple):
    """`codes`: :data:`WIDTH` integers a term; `arrays`: what they name by number."""

    codes: tuple[int, ...]
    arrays: tuple[Payload, ...]


class ArrayLibrary(Protocol):
    """What this module asks of torch, NumPy or another library of arrays."""

    def integers(self, payload: Any) -> Any:
        """Return an array or nested tuples as a C-contiguous array of int64."""

    def bits(self, mask: BlockMap) -> Any:
        """Return which blocks are visited, (B|1, N|1, blocks of T, blocks of S) uint8."""

    def allowed(self, payload: Any) -> Any:
        """Return a boolean array as uint8 of four dims, at any strides."""

    def memory(self, array: Any) -> tuple[int, int]:
        """Return the address of the first entry, and the bytes of its memory from there on."""

    def strides(self, array: Any) -> Sequence[int]:
        """Return the strides in entries."""


def encode(mask: Mask | None) -> Program | None:
    """Return the program of a mask; None where only a dense mask can say it.

    That is so of masks with more than :data:`MOST_TERMS` terms or deeper than
    :data:`MOST_DEPTH`, and of packed sequences whose segment ids are told for each sequence.

    >>> encode(Causal() & Window(left=3)).codes == (BAND, -3, 0, 1)
    True
    >>> encode(Causal("top_left") & Padding(None, [2])).codes
    (1, -4611686018427387904, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0)
    """
    if mask is None:
        return Program((), ())
    codes: list[int] = []
    arrays: list[Payload] = []
    parts = mask.parts if isinstance(mask, And) else (mask,)
    packed = [part for part in parts if isinstance(part, Packed)]
    for part in packed:
        codes += (PACKED, _add(arrays, part.cu_q), _add(arrays, part.cu_kv), 0)
    if packed and any(_is_batched(leaf) for leaf in mask.leaves()):
        return None
    parts = tuple(part for part in parts if not isinstance(part, Packed))
    depth = 0
    if parts:
        depth = _joined(parts, BOTH, int(mask.align != "top_left"), codes, arrays)
    if len(codes) // WIDTH - len(packed) > MOST_TERMS or depth > MOST_DEPTH:
        return None
    return Program(tuple(codes), tuple(arrays))


def dense_program(allowed: Any) -> Program:
    """Return the program of a dense mask, whatever it stands for; (B|1, N|1, T|1, S|1) bool."""
    return Program((DENSE, 0, 0, 0), (Payload("allowed", allowed),))


def _is_batched(mask: Mask) -> bool:
    """Say whether ids are told for each sequence; the kernels look them up by packed token."""
    return isinstance(mask, Segments) and 2 in (
        len(shape_of(mask.q_ids)),
        len(shape_of(mask.kv_ids)),
    )


def _add(arrays: list[Payload], value: Any, role: str = "integers") -> int:
    arrays.append(Payload(role, value))
    return len(arrays) - 1


def _joined(
    parts: Sequence[Mask], join: int, bottom_right: int, codes: list[int], arrays: list[Payload]
) -> int:
    """Write parts joined by `join`; return how deep the stack of the postfix order becomes."""
    depth = written = 0
    if join == BOTH:
        low, high, parts = _common_band(parts)
        if low > -UNBOUNDED or high < UNBOUNDED:
            codes += (BAND, low, high, bottom_right)
            depth = written = 1
    for part in parts:
        inner = _write(part, bottom_right, codes, arrays)
        depth = max(depth, inner + (written > 0))
        written += 1
        if written > 1:
            codes += (join, 0, 0, 0)
    if not written:
        codes += (EVERYTHING, 0, 0, 0)
    return max(depth, 1)


def _common_band(parts: Sequence[Mask]) -> tuple[int, int, list[Mask]]:
    """Make one band of all that are joined by "and"; return it and the other parts."""
    low, high, others = -UNBOUNDED, UNBOUNDED, []
    for part in parts:
        if isinstance(part, Causal):
            high = min(high, 0)
        elif isinstance(part, Window):
            low = low if part.left is None else max(low, -part.left)
            high = high if part.right is None else min(high, part.right)
        elif not isinstance(part, Full):
            others.append(part)
    return low, high, others


def _write(mask: Mask, bottom_right: int, codes: list[int], arrays: list[Payload]) -> int:
    """Write one mask; return how deep the stack becomes."""
    if isinstance(mask, (And, Or)):
        join = BOTH if isinstance(mask, And) else EITHER
        return _joined(mask.parts, join, bottom_right, codes, arrays)
    if isinstance(mask, (Causal, Window, Full)):
        return _joined((mask,), BOTH, bottom_right, codes, arrays)
    if isinstance(mask, Padding):
        limits = ((Q_LIMIT, mask.q_lengths), (KV_LIMIT, mask.kv_lengths))
        there = [(kind, lengths) for kind, lengths in limits if lengths is not None]
        for kind, lengths in there:
            codes += (kind, _add(arrays, lengths), 0, 0)
        codes += (BOTH, 0, 0, 0) if len(there) == 2 else () if there else (EVERYTHING, 0, 0, 0)
        return max(len(there), 1)
    if isinstance(mask, PrefixLM):
        codes += (KV_LIMIT, _add(arrays, mask.lengths), 0, 0)
        codes += (BAND, -UNBOUNDED, 0, 1, EITHER, 0, 0, 0)
        return 2
    if isinstance(mask, Segments):
        codes += (SEGMENTS, _add(arrays, mask.q_ids), _add(arrays, mask.kv_ids), 0)
    elif isinstance(mask, BlockMap):
        codes += (BLOCKS, _add(arrays, mask, "bits"), mask.block_q, mask.block_k)
    elif isinstance(mask, Dense):
        codes += (DENSE, _add(arrays, mask.mask, "allowed"), 0, 0)
    else:
        raise TypeError(f"got a {type(mask).__name__} to encode, expected a mask of this package")
    return 1


def arrays_of(program: Program, library: ArrayLibrary) -> list[Any]:
    """Turn the payloads of a program into arrays that :func:`terms` can point at."""
    turn = {"integers": library.integers, "bits": library.bits, "allowed": library.allowed}
    return [turn[payload.role](payload.value) for payload in program.arrays]


Terms = tuple[tuple[int, ...], ...]
Offsets = tuple[int, int, int, int]  # of queries and of keys: where they lie, and the bytes there


def terms(
    codes: Sequence[int], arrays: Sequence[Any], library: ArrayLibrary
) -> tuple[Terms, Offsets | None]:
    """Return the terms and the packed offsets as the extension takes them, with pointers.

    The pointers are those of `arrays`, which have to outlive the call.
    """
    written: list[tuple[int, ...]] = []
    packed = None
    for at in range(0, len(codes), WIDTH):
        kind, a, b, c = codes[at : at + WIDTH]
        if kind == PACKED:
            packed = *library.memory(arrays[a]), *library.memory(arrays[b])
        elif kind == BAND:
            written.append((BAND, a, b, c))
        elif kind in (KV_LIMIT, Q_LIMIT):
            written.append((kind, *library.memory(arrays[a])))
        elif kind == SEGMENTS:
            written.append((kind, *_rows(arrays[a], library), *_rows(arrays[b], library)))
        elif kind == BLOCKS:
            written.append((kind, *_broadcast(arrays[a], library), b, c))
        elif kind == DENSE:
            written.append((kind, *_broadcast(arrays[a], library)))
        else:
            written.append((kind,))
    return tuple(written), packed


def _rows(ids: Any, library: ArrayLibrary) -> tuple[int, int, int]:
    """Return pointer, bytes and batch stride of ids (L,), (1, L) or (B, L)."""
    shared = len(ids.shape) == 1 or ids.shape[0] == 1
    return *library.memory(ids), 0 if shared else library.strides(ids)[0]


def _broadcast(array: Any, library: ArrayLibrary) -> tuple[int, ...]:
    """Return pointer, bytes and four strides, 0 for dims of size 1."""
    strides = zip(array.shape, library.strides(array), strict=True)
    return *library.memory(array), *(0 if size == 1 else step for size, step in strides)

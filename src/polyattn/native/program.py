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

Arrays are named by their place in :attr:`Program.arrays`. Each class of masks writes its own terms
through a :class:`polyattn.masks.needs.Writer`; here they are joined, counted and given pointers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from polyattn.masks import And, BlockMap, Mask, Not, Packed

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

    That is so of classes that have no terms, of masks with more than :data:`MOST_TERMS` terms or
    deeper than :data:`MOST_DEPTH`, and of packed sequences whose segment ids are told for each.

    >>> from polyattn.masks import Causal, Padding, Window
    >>> encode(Causal() & Window(left=3)).codes == (BAND, -3, 0, 1)
    True
    >>> encode(Causal("top_left") & Padding(None, [2])).codes
    (1, -4611686018427387904, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0)
    """
    if mask is None:
        return Program((), ())
    parts: Sequence[Mask] = mask.parts if isinstance(mask, And) else (mask,)
    to = _Writer(mask)
    for part in parts:
        if isinstance(part, Packed):
            to.offsets(part)
    if to.packed:
        parts = [part for part in parts if not isinstance(part, Packed)]
    if parts:
        to.joined(parts, BOTH)
    return to.program()


def dense_program(allowed: Any) -> Program:
    """Return the program of a dense mask, whatever it stands for; (B|1, N|1, T|1, S|1) bool."""
    return Program((DENSE, 0, 0, 0), (Payload("allowed", allowed),))


class _Writer:
    """The program of one mask while it is written; see :class:`polyattn.masks.needs.Writer`."""

    __slots__ = ("_arrays", "_bottom_right", "_codes", "_depth", "_known", "_stack", "packed")

    def __init__(self, mask: Mask) -> None:
        self._codes: list[int] = []
        self._arrays: list[Payload] = []
        self._bottom_right = int(mask.align != "top_left")
        self._stack = self._depth = 0
        self._known, self.packed = True, False

    def program(self) -> Program | None:
        """Return what was written, if the kernels can run it."""
        count = len(self._codes) // WIDTH - self.packed
        if not self._known or count > MOST_TERMS or self._depth > MOST_DEPTH:
            return None
        return Program(tuple(self._codes), tuple(self._arrays))

    def joined(self, parts: Sequence[Mask], join: int) -> None:
        """Write parts joined by `join`; all bands that are joined by "and" become one."""
        written = self._stack
        if join == BOTH:
            low, high, parts = _common_band(parts)
            if low > -UNBOUNDED or high < UNBOUNDED:
                self._term(BAND, low, high, self._bottom_right)
        for part in parts:
            if isinstance(part, Not):
                self.unknown()
            elif part.parts:
                self.joined(part.parts, BOTH if isinstance(part, And) else EITHER)
            else:
                part.write(self)
            if self._stack > written + 1:
                self._join(join)
        if self._stack == written:
            self.everything()

    def offsets(self, packed: Packed) -> None:
        """Say where the packed sequences lie."""
        self.packed = True
        self._codes += (PACKED, self._named(packed.cu_q), self._named(packed.cu_kv), 0)

    def unknown(self) -> None:
        self._known = False
        self.everything()

    def everything(self) -> None:
        self._term(EVERYTHING)

    def band(self, low: int | None, high: int | None) -> None:
        low, high = -UNBOUNDED if low is None else low, UNBOUNDED if high is None else high
        if low == -UNBOUNDED and high == UNBOUNDED:
            self._term(EVERYTHING)
        else:
            self._term(BAND, low, high, self._bottom_right)

    def query_limit(self, lengths: Any) -> None:
        self._term(Q_LIMIT, self._named(lengths))

    def key_limit(self, lengths: Any) -> None:
        self._term(KV_LIMIT, self._named(lengths))

    def same_ids(self, q_ids: Any, kv_ids: Any) -> None:
        self._term(SEGMENTS, self._named(q_ids), self._named(kv_ids))

    def blocks(self, mask: BlockMap) -> None:
        self._term(BLOCKS, self._named(mask, "bits"), mask.block_q, mask.block_k)

    def dense(self, allowed: Any) -> None:
        self._term(DENSE, self._named(allowed, "allowed"))

    def both(self) -> None:
        self._join(BOTH)

    def either(self) -> None:
        self._join(EITHER)

    def _term(self, kind: int, a: int = 0, b: int = 0, c: int = 0) -> None:
        self._codes += (kind, a, b, c)
        self._stack += 1
        if self._stack > self._depth:
            self._depth = self._stack

    def _join(self, join: int) -> None:
        self._codes += (join, 0, 0, 0)
        self._stack -= 1

    def _named(self, value: Any, role: str = "integers") -> int:
        self._arrays.append(Payload(role, value))
        return len(self._arrays) - 1


def _common_band(parts: Sequence[Mask]) -> tuple[int, int, list[Mask]]:
    """Make one band of all that are joined by "and"; return it and the other parts."""
    low, high, others = -UNBOUNDED, UNBOUNDED, []
    for part in parts:
        band = part.band
        if band is None:
            others.append(part)
            continue
        least, most = band
        low = low if least is None else max(low, least)
        high = high if most is None else min(high, most)
    return low, high, others


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

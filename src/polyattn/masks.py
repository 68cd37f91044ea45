"""Masks: small frozen values that say which keys a query may attend (True = attend).

They join with ``&`` (both allow) and ``|`` (either allows), print a short deterministic
``repr``, and draw themselves (``#`` = attends, rows = queries, columns = keys):

>>> print((Causal() & Window(left=1)).picture())
#...
##..
.##.
..##

The definition of each mask is its ``allows``: plain operators on index arrays, so that one
line of code serves float64 references, FlexAttention's ``mask_mod`` and every array library.

Letters: `B` batch, `T` query length, `S` key length, `N` query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from polyattn.errors import InvalidProblem
from polyattn.payload import at, describe, integers, same, shape_of

__all__ = [
    "And",
    "BlockMap",
    "Causal",
    "Dense",
    "Full",
    "Mask",
    "Or",
    "Packed",
    "Padding",
    "PrefixLM",
    "Segments",
    "Window",
]

Align = Literal["bottom_right", "top_left"]


@dataclass(frozen=True)
class Index:
    """The coordinates at which a mask is asked: integers or broadcastable integer arrays.

    `t` and `j` count within a sequence; `b` is the batch entry, or the sequence when packed.
    """

    b: Any
    n: Any
    t: Any
    j: Any
    q_len: Any
    kv_len: Any
    align: str = "bottom_right"
    same_sequence: Any = True
    q_token: Any = None  # the query's place in the packed row, when that is not `t`
    kv_token: Any = None

    @property
    def diagonal(self) -> Any:
        """The key position that query `t` stands at."""
        return self.t if self.align == "top_left" else self.t + (self.kv_len - self.q_len)


class Mask:
    """The base of all masks; see the module's text for what masks share."""

    def __and__(self, other: object) -> Mask:
        """Allow what both allow."""
        return _join(And, self, other)

    def __or__(self, other: object) -> Mask:
        """Allow what either allows."""
        return _join(Or, self, other)

    def __bool__(self) -> bool:
        raise InvalidProblem(
            f"got bool({self!r}), which has no meaning: expected masks joined with & and |, "
            "not `and` and `or`; compare with `is None` to ask whether there is a mask."
        )

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(same(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]

    def __hash__(self) -> int:
        return hash(self.signature)

    def __repr__(self) -> str:
        return self.signature

    @property
    def signature(self) -> str:
        """The mask without the contents of its arrays: what a choice of backend may depend on."""
        raise NotImplementedError

    @property
    def align(self) -> Align | None:
        """The alignment this mask fixes, or None when it takes that of what it is joined with."""
        return None

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that an And or Or joins; empty for a leaf."""
        return ()

    def leaves(self) -> tuple[Mask, ...]:
        """All masks of the tree that are not And or Or."""
        return tuple(leaf for part in self.parts for leaf in part.leaves()) or (self,)

    @property
    def kinds(self) -> frozenset[str]:
        """The class names in the tree, e.g. ``{"And", "Causal", "Window"}``."""
        return frozenset({type(self).__name__}).union(*(p.kinds for p in self.parts))

    def allows(self, ix: Index) -> Any:
        """Say, for each coordinate of `ix`, whether the query may attend the key."""
        raise NotImplementedError

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        """Return this mask with every array `a` of field `f` replaced by ``change(f, a)``."""
        return self

    def picture(self, q_len: int = 4, kv_len: int = 4, batch: int = 0, head: int = 0) -> str:
        """Draw the mask of one batch entry and head, ``#`` where a query attends a key."""
        align = self.align or "bottom_right"
        return "\n".join(
            "".join(
                ".#"[bool(self.allows(Index(batch, head, t, j, q_len, kv_len, align)))]
                for j in range(kv_len)
            )
            for t in range(q_len)
        )


@dataclass(frozen=True, repr=False, eq=False)
class Full(Mask):
    """Every query attends every key; the neutral element of ``&``.

    >>> print(Full().picture(2, 2))
    ##
    ##
    >>> Full() & Causal() == Causal(), Full() | Causal() == Full()
    (True, True)
    """

    @property
    def signature(self) -> str:
        return "Full()"

    def allows(self, ix: Index) -> Any:
        return (ix.t >= 0) & (ix.j >= 0)


@dataclass(frozen=True, repr=False, eq=False)
class Causal(Mask):
    """A query attends its own position and what came before.

    `align` says where the diagonal lies when the lengths differ: ``bottom_right`` (default;
    the last query sees every key, as in decoding) or ``top_left`` (torch's ``is_causal``).

    >>> print(Causal().picture())
    #...
    ##..
    ###.
    ####
    >>> print(Causal().picture(2, 4)); print(Causal("top_left").picture(2, 4))
    ###.
    ####
    #...
    ##..
    """

    align: Align = "bottom_right"

    def __post_init__(self) -> None:
        if self.align not in ("bottom_right", "top_left"):
            raise InvalidProblem(
                f"got Causal(align={self.align!r}), expected 'bottom_right' or 'top_left'."
            )

    @property
    def signature(self) -> str:
        return "Causal()" if self.align == "bottom_right" else "Causal('top_left')"

    def allows(self, ix: Index) -> Any:
        return ix.j <= ix.diagonal


@dataclass(frozen=True, repr=False, eq=False)
class Window(Mask):
    """A query attends at most `left` keys before and `right` keys after its own position.

    The counts are of *other* keys (a query always sees itself); ``None`` is unbounded. The
    position is measured on the alignment of the causal mask it is joined with, bottom-right
    otherwise.

    >>> print(Window(left=1, right=0).picture())
    #...
    ##..
    .##.
    ..##
    """

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("left", self.left), ("right", self.right)):
            if count is not None and (type(count) is not int or count < 0):
                raise InvalidProblem(
                    f"got Window({name}={count!r}), expected a count of keys >= 0, or None for "
                    "unbounded (some libraries write -1 for that)."
                )

    @property
    def signature(self) -> str:
        return f"Window(left={self.left}, right={self.right})"

    def allows(self, ix: Index) -> Any:
        allowed = (ix.t >= 0) & (ix.j >= 0)
        if self.left is not None:
            allowed = allowed & (ix.j >= ix.diagonal - self.left)
        if self.right is not None:
            allowed = allowed & (ix.j <= ix.diagonal + self.right)
        return allowed


@dataclass(frozen=True, repr=False, eq=False)
class Padding(Mask):
    """Queries and keys past a length are masked; the output of such queries is 0.

    `q_lengths`, `kv_lengths`: (B,) integers, or None for no padding on that side.

    >>> print(Padding(q_lengths=[3], kv_lengths=[2]).picture())
    ##..
    ##..
    ##..
    ....
    """

    q_lengths: Any = None
    kv_lengths: Any = None

    def __post_init__(self) -> None:
        for name in ("q_lengths", "kv_lengths"):
            _set(self, name, integers(f"Padding({name}=...)", getattr(self, name), (1,), "(B,)"))

    @property
    def signature(self) -> str:
        return f"Padding(q={describe(self.q_lengths)}, kv={describe(self.kv_lengths)})"

    def allows(self, ix: Index) -> Any:
        allowed = (ix.t >= 0) & (ix.j >= 0)
        if self.q_lengths is not None:
            allowed = allowed & (ix.t < at(self.q_lengths, ix.b))
        if self.kv_lengths is not None:
            allowed = allowed & (ix.j < at(self.kv_lengths, ix.b))
        return allowed

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Padding(change("q_lengths", self.q_lengths), change("kv_lengths", self.kv_lengths))


@dataclass(frozen=True, repr=False, eq=False)
class Packed(Mask):
    """Several sequences in one row of tokens, each by itself; for ``layout="packed"``.

    `cu_q`, `cu_kv`: (sequences + 1,) int32 offsets from 0 to the total length. The masks it is
    joined with apply within each sequence, and their batch entry is the sequence.

    >>> Packed([0, 2, 5], [0, 2, 5]) & Causal()
    Packed(q=3, kv=3) & Causal()
    """

    cu_q: Any
    cu_kv: Any = None

    def __post_init__(self) -> None:
        _set(self, "cu_q", integers("Packed(cu_q=...)", self.cu_q, (1,), "(sequences + 1,)"))
        both = self.cu_q if self.cu_kv is None else self.cu_kv
        _set(self, "cu_kv", integers("Packed(cu_kv=...)", both, (1,), "(sequences + 1,)"))
        if shape_of(self.cu_q) != shape_of(self.cu_kv) or shape_of(self.cu_q)[0] < 1:
            raise InvalidProblem(
                f"got Packed with {shape_of(self.cu_q)} query and {shape_of(self.cu_kv)} key "
                "offsets, expected as many of both: one more than there are sequences."
            )

    @property
    def signature(self) -> str:
        return f"Packed(q={describe(self.cu_q)}, kv={describe(self.cu_kv)})"

    def allows(self, ix: Index) -> Any:
        return ix.same_sequence & (ix.t >= 0) & (ix.j >= 0)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Packed(change("cu_q", self.cu_q), change("cu_kv", self.cu_kv))


@dataclass(frozen=True, repr=False, eq=False)
class Segments(Mask):
    """A query attends only keys of its own segment.

    `q_ids`: (T,) or (B, T) integers; `kv_ids`: (S,) or (B, S), the same as `q_ids` when None.
    When packed, one id for each token of the row.

    >>> print(Segments([0, 0, 1, 1]).picture())
    ##..
    ##..
    ..##
    ..##
    """

    q_ids: Any
    kv_ids: Any = None

    def __post_init__(self) -> None:
        _set(self, "q_ids", integers("Segments(q_ids=...)", self.q_ids, (1, 2), "(T,) or (B, T)"))
        both = self.q_ids if self.kv_ids is None else self.kv_ids
        _set(self, "kv_ids", integers("Segments(kv_ids=...)", both, (1, 2), "(S,) or (B, S)"))

    @property
    def signature(self) -> str:
        return f"Segments(q={describe(self.q_ids)}, kv={describe(self.kv_ids)})"

    def allows(self, ix: Index) -> Any:
        q_id = _token(self.q_ids, ix.b, ix.t, ix.q_token)
        return q_id == _token(self.kv_ids, ix.b, ix.j, ix.kv_token)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Segments(change("q_ids", self.q_ids), change("kv_ids", self.kv_ids))


@dataclass(frozen=True, repr=False, eq=False)
class PrefixLM(Mask):
    """Keys before `lengths` are seen by every query; the rest is ``Causal()`` (bottom-right).

    `lengths`: (B,) integers.

    >>> print(PrefixLM([2]).picture())
    ##..
    ##..
    ###.
    ####
    """

    lengths: Any

    def __post_init__(self) -> None:
        _set(self, "lengths", integers("PrefixLM(lengths)", self.lengths, (1,), "(B,)"))

    @property
    def signature(self) -> str:
        return f"PrefixLM({describe(self.lengths)})"

    @property
    def align(self) -> Align | None:
        return "bottom_right"

    def allows(self, ix: Index) -> Any:
        return (ix.j < at(self.lengths, ix.b)) | (ix.j <= ix.diagonal)

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return PrefixLM(change("lengths", self.lengths))


@dataclass(frozen=True, repr=False, eq=False)
class BlockMap(Mask):
    """Per batch entry, head and block of queries, the blocks of keys to visit, wholly dense.

    `indices`: (B, N, ceil(T / block_q), M) int32, of which the first
    `counts`: (B, N, ceil(T / block_q)) int32 of each row are meant; B and N may be 1. Blocks
    at the edges may be partial. It is the only contract between sparse selection and compute.

    >>> print(BlockMap(2, 2, [[[[0, 0], [0, 1]]]], [[[1, 2]]]).picture())
    ##..
    ##..
    ####
    ####
    """

    block_q: int
    block_k: int
    indices: Any
    counts: Any
    bits: Any = field(default=None)  # (B, N, blocks of T, blocks of S) bool, made by a front-end

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise InvalidProblem(f"got BlockMap({name}={size!r}), expected a size >= 1.")
        _set(self, "indices", integers("BlockMap(indices)", self.indices, (4,), "(B, N, nQ, M)"))
        _set(self, "counts", integers("BlockMap(counts)", self.counts, (3,), "(B, N, nQ)"))
        if shape_of(self.indices)[:3] != shape_of(self.counts):
            raise InvalidProblem(
                f"got BlockMap indices of shape {shape_of(self.indices)} with counts of shape "
                f"{shape_of(self.counts)}, expected (B, N, nQ, M) with (B, N, nQ)."
            )

    @property
    def signature(self) -> str:
        b, n, nq, m = shape_of(self.indices)
        return f"BlockMap({self.block_q}, {self.block_k}, {b}x{n}x{nq}x{m})"

    def allows(self, ix: Index) -> Any:
        row, block = ix.t // self.block_q, ix.j // self.block_k
        if self.bits is not None:
            b, n = (i * (size > 1) for i, size in zip((ix.b, ix.n), self.bits.shape, strict=False))
            return self.bits[b, n, row, block]
        count = at(self.counts, ix.b, ix.n, row)
        return any(at(self.indices, ix.b, ix.n, row, m) == block for m in range(int(count)))

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        indices, counts = change("indices", self.indices), change("counts", self.counts)
        return BlockMap(self.block_q, self.block_k, indices, counts, self.bits)


@dataclass(frozen=True, repr=False, eq=False)
class Dense(Mask):
    """Any boolean array that broadcasts to (B, N, T, S); True = attend.

    >>> print(Dense([[True, False], [True, True]]).picture(2, 2))
    #.
    ##
    """

    mask: Any

    def __post_init__(self) -> None:
        _set(self, "mask", integers("Dense(mask)", self.mask, (0, 1, 2, 3, 4), "(B, N, T, S)", True))

    @property
    def signature(self) -> str:
        return f"Dense({'x'.join(map(str, shape_of(self.mask)))})"

    def allows(self, ix: Index) -> Any:
        dims = shape_of(self.mask)
        where = (ix.b, ix.n, ix.t, ix.j)[4 - len(dims) :]
        return at(self.mask, *(i * (size > 1) for i, size in zip(where, dims, strict=True)))

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Dense(change("mask", self.mask))


@dataclass(frozen=True, repr=False, eq=False)
class And(Mask):
    """What every part allows; written ``a & b``."""

    members: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.members

    @property
    def signature(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, Or) else repr(p) for p in self.members)

    @property
    def align(self) -> Align | None:
        return _alignment(self.members)

    def allows(self, ix: Index) -> Any:
        allowed = self.members[0].allows(ix)
        for part in self.members[1:]:
            allowed = allowed & part.allows(ix)
        return allowed

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return And(tuple(part.map(change) for part in self.members))


@dataclass(frozen=True, repr=False, eq=False)
class Or(Mask):
    """What any part allows; written ``a | b``."""

    members: tuple[Mask, ...]

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.members

    @property
    def signature(self) -> str:
        return " | ".join(f"({p!r})" if isinstance(p, And) else repr(p) for p in self.members)

    @property
    def align(self) -> Align | None:
        return _alignment(self.members)

    def allows(self, ix: Index) -> Any:
        allowed = self.members[0].allows(ix)
        for part in self.members[1:]:
            allowed = allowed | part.allows(ix)
        return allowed

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Or(tuple(part.map(change) for part in self.members))


def _join(how: type[And] | type[Or], left: Mask, right: object) -> Mask:
    """Flatten, drop what the laws of & and | make superfluous, and check the alignments."""
    if not isinstance(right, Mask):
        raise InvalidProblem(
            f"got {left!r} joined with a {type(right).__name__}, expected another mask; "
            "wrap a boolean array as Dense(array)."
        )
    members: list[Mask] = []
    for mask in (left, right):
        for part in mask.parts if isinstance(mask, how) else (mask,):
            if isinstance(part, Full):
                if how is Or:
                    return Full()
                continue
            if all(part is not seen and part != seen for seen in members):
                members.append(part)
    if len(members) < 2:
        return members[0] if members else Full()
    _alignment(tuple(members))
    return how(tuple(members))


def _alignment(members: Sequence[Mask]) -> Align | None:
    found: Align | None = None
    for mask in members:
        if mask.align is None or mask.align == found:
            continue
        if found is not None:
            raise InvalidProblem(
                f"got two alignments in one mask ({' with '.join(map(repr, members))}): "
                f"{found} and {mask.align}. Expected one; PrefixLM is bottom_right."
            )
        found = mask.align
    return found


def _token(ids: Any, b: Any, position: Any, packed: Any) -> Any:
    if len(shape_of(ids)) == 1:
        return at(ids, position if packed is None else packed)
    return at(ids, b * (shape_of(ids)[0] > 1), position)


def _set(mask: Mask, name: str, value: Any) -> None:
    object.__setattr__(mask, name, value)

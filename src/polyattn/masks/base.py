"""What all masks share: joining with &, | and ~, signatures, pictures."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from polyattn.errors import InvalidProblem
from polyattn.masks.examples import Examples
from polyattn.masks.index import Align, Index
from polyattn.masks.needs import Call, Writer
from polyattn.masks.payload import same

__all__ = ["And", "Full", "Mask", "Not", "Or", "is_nothing"]


class Mask(Examples):
    """The base of all masks; see the module's text for what masks share.

    A class says `arguments`, `signature` and `allows`; with arrays also `map`, `check`, `brackets`
    and `filled`. The rest has a default that is right, if not the quickest.
    """

    static: ClassVar[bool] = False
    """Whether masks of this class carry no arrays."""

    only_align: ClassVar[Align | None] = None
    """The alignment that every mask of this class fixes."""

    takes_align: ClassVar[bool] = True
    """Whether masks of this class that fix no alignment take that of what they are joined with."""

    packs: ClassVar[bool] = True
    """Whether masks of this class have a meaning within each sequence of a packed row."""

    by_length: ClassVar[bool] = False
    """Whether `simplified` asks more of the lengths than which of them is longer."""

    weight: ClassVar[int] = 1
    """How often the fuzzer draws this class, beside the others."""

    def __and__(self, other: object) -> Mask:
        """Allow what both allow."""
        return _join(And, self, other)

    def __or__(self, other: object) -> Mask:
        """Allow what either allows."""
        return _join(Or, self, other)

    def __invert__(self) -> Mask:
        """Allow what this mask does not; ``~~mask`` is `mask`."""
        return Not(self)

    def __bool__(self) -> bool:
        raise InvalidProblem(
            f"got bool({self!r}), which has no meaning: expected masks joined with &, | and ~, "
            "not `and`, `or` and `not`; compare with `is None` to ask whether there is a mask."
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
        return self.only_align

    @property
    def is_static(self) -> bool:
        """Whether the tree carries no arrays, so that the lengths determine the mask."""
        return self.static if not self.parts else all(leaf.static for leaf in self.leaves())

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What the class is called with to make this mask again: numbers, names and arrays."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[Mask, ...]:
        """The masks that an And, Or or Not is made of; empty for a leaf."""
        return ()

    def of_parts(self, parts: tuple[Mask, ...]) -> Mask:
        """Return what other masks in place of `parts` make, by the same sign."""
        return self

    def combined(self, allowed: Sequence[Any]) -> Any:
        """Say what the whole allows, given what each of its `parts` does."""
        raise NotImplementedError

    def leaves(self) -> tuple[Mask, ...]:
        """All masks of the tree that are not And, Or or Not."""
        parts = self.parts
        if not parts:
            return (self,)
        return tuple([leaf for part in parts for leaf in part.leaves()])

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

    def check(self, call: Call) -> None:
        """Raise :class:`InvalidProblem` where an array of this leaf does not fit the call."""

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        """The least and the greatest key that are seen, counted from the query's own position.

        In these, None is unbounded. None in place of both: the mask is no such band.
        """
        return None

    def simplified(self, q_len: int, kv_len: int, offset: int) -> Mask:
        """Return an equal mask for these lengths, as simple as the law of this leaf makes it.

        `offset`: the key that query 0 stands at.
        """
        return self

    def range_of_keys(self, first: int, last: int) -> tuple[int | None, int | None]:
        """Return the first key and the end of those that queries at `first` to `last` may see.

        None is no bound; `first` and `last` are the keys that the queries stand at.
        """
        low, high = self.band or (None, None)
        return None if low is None else first + low, None if high is None else last + high + 1

    def write(self, to: Writer) -> None:
        """Write this leaf as terms of the native kernels; unless it says how, it has none."""
        band = self.band
        if band is None:
            to.unknown()
        else:
            to.band(*band)

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

    >>> from polyattn import Causal
    >>> print(Full().picture(2, 2))
    ##
    ##
    >>> Full() & Causal() == Causal(), Full() | Causal() == Full()
    (True, True)
    """

    static = True
    takes_align = False

    @property
    def arguments(self) -> tuple[Any, ...]:
        return ()

    @property
    def signature(self) -> str:
        return "Full()"

    def allows(self, ix: Index) -> Any:
        return (ix.t >= 0) & (ix.j >= 0)

    @property
    def band(self) -> tuple[int | None, int | None]:
        return None, None


@dataclass(frozen=True, repr=False, eq=False)
class Joined(Mask):
    """Several masks as one; And and Or say how."""

    members: tuple[Mask, ...]
    sign: ClassVar[str]
    both: ClassVar[Any]  # joins what two members allow

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.members,)

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self.members

    @property
    def signature(self) -> str:
        return self.sign.join(map(_bracketed, self.members))

    @property
    def align(self) -> Align | None:
        return _alignment(self.members)

    def of_parts(self, parts: tuple[Mask, ...]) -> Mask:
        return type(self)(parts)

    def combined(self, allowed: Sequence[Any]) -> Any:
        first, *others = allowed
        for other in others:
            first = self.both(first, other)
        return first

    def allows(self, ix: Index) -> Any:
        return self.combined([part.allows(ix) for part in self.members])

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return type(self)(tuple(part.map(change) for part in self.members))


class And(Joined):
    """What every part allows; written ``a & b``."""

    sign = " & "
    both = staticmethod(operator.and_)


class Or(Joined):
    """What any part allows; written ``a | b``."""

    sign = " | "
    both = staticmethod(operator.or_)


@dataclass(frozen=True, repr=False, eq=False)
class Not(Mask):
    """What its member does not allow; written ``~mask``.

    Positions are those of the member: ``~Causal("top_left")`` is measured top-left. Packed
    sequences are a layout, and stay outside: ``Packed(...) & ~mask``.

    >>> from polyattn import Causal, Window
    >>> print((Causal() & ~Window(left=1)).picture(3, 5))
    #....
    ##...
    ###..
    >>> ~~Causal() == Causal(), ~Full()
    (True, ~Full())
    """

    member: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.member, Mask):
            raise InvalidProblem(
                f"got Not of a {type(self.member).__name__}, expected a mask; wrap a boolean "
                "array as Dense(array)."
            )
        if "Packed" in self.member.kinds:
            raise InvalidProblem(
                f"got ~({self.member!r}), expected a mask without Packed, which says where "
                "sequences lie; join it from outside: Packed(...) & ~mask."
            )

    def __invert__(self) -> Mask:
        return self.member

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (self.member,)

    @property
    def members(self) -> tuple[Mask, ...]:
        """The member, as what joins several masks has them."""
        return (self.member,)

    @property
    def parts(self) -> tuple[Mask, ...]:
        return (self.member,)

    def of_parts(self, parts: tuple[Mask, ...]) -> Mask:
        return Not(*parts)

    def combined(self, allowed: Sequence[Any]) -> Any:
        (member,) = allowed
        return not member if isinstance(member, bool) else ~member

    @property
    def signature(self) -> str:
        return f"~{_bracketed(self.member)}"

    @property
    def align(self) -> Align | None:
        return self.member.align

    def allows(self, ix: Index) -> Any:
        return self.combined([self.member.allows(ix)])

    def map(self, change: Callable[[str, Any], Any]) -> Mask:
        return Not(self.member.map(change))

    @property
    def band(self) -> tuple[int | None, int | None] | None:
        low, high = self.member.band or (None, None)
        if low is None and high is not None:
            return high + 1, None
        return (None, low - 1) if low is not None and high is None else None


def _bracketed(mask: Mask) -> str:
    # not repr(), which torch 2.9 cannot trace
    return f"({mask.signature})" if isinstance(mask, Joined) else mask.signature


def is_nothing(mask: Mask) -> bool:
    """Say whether it is ``~Full()``, by which no query attends any key."""
    return isinstance(mask, Not) and isinstance(mask.member, Full)


def _join(how: type[And] | type[Or], left: Mask, right: object) -> Mask:
    """Flatten, drop what the laws of & and | make superfluous, and check the alignments."""
    if not isinstance(right, Mask):
        raise InvalidProblem(
            f"got {left!r} joined with a {type(right).__name__}, expected another mask; "
            "wrap a boolean array as Dense(array)."
        )
    members: list[Mask] = []
    neutral: Mask = Full()
    for mask in (left, right):
        for part in mask.parts if isinstance(mask, how) else (mask,):
            if isinstance(part, Full):
                if how is Or:
                    return Full()
                continue
            if how is Or and is_nothing(part):
                neutral = part
                continue
            if not any(part is seen or _is_alike(part, seen) for seen in members):
                members.append(part)
    if len(members) < 2:
        return members[0] if members else neutral
    _alignment(tuple(members))
    return how(tuple(members))


def _is_alike(one: Mask, other: Mask) -> bool:
    """Say whether masks are alike at first sight: of arrays only which they are is asked."""
    if type(one) is not type(other) or len(one.parts) != len(other.parts):
        return False
    if one.parts:
        return all(map(_is_alike, one.parts, other.parts))
    return all(
        a is b or (isinstance(a, _NO_ARRAY) and isinstance(b, _NO_ARRAY) and a == b)
        for a, b in zip(one.arguments, other.arguments, strict=True)
    )


_NO_ARRAY = (int, str, tuple)


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

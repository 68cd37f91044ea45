"""Masks: laws, pictures, signatures, alignments; simplification changes no picture."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    Full,
    InvalidProblem,
    LeftPadding,
    Mask,
    Not,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.simplify import key_range, sees_every_row, simplify

COUNTS = st.one_of(st.none(), st.integers(0, 6))
LEAVES = st.one_of(
    st.just(Full()),
    st.sampled_from([Causal(), Causal("top_left")]),
    st.builds(Window, COUNTS, COUNTS),
    st.builds(lambda q, k: Padding([q], [k]), st.integers(0, 5), st.integers(0, 5)),
    st.builds(lambda q, k: LeftPadding([q], [k]), st.integers(0, 5), st.integers(0, 5)),
    st.builds(lambda n: PrefixLM([n]), st.integers(0, 5)),
    st.builds(Chunked, st.integers(1, 7)),
    st.builds(Dilated, st.integers(1, 7)),
    st.builds(FirstKeys, st.integers(0, 7)),
)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    mask = draw(LEAVES)
    mask = ~mask if draw(st.booleans()) else mask
    for _ in range(draw(st.integers(0, 3))):
        other = draw(LEAVES)
        other = ~other if draw(st.booleans()) else other
        try:
            mask = mask & other if draw(st.booleans()) else mask | other
        except InvalidProblem as error:
            assert "alignments" in str(error)
    return ~mask if draw(st.booleans()) else mask


LENGTHS = st.integers(1, 6)


@given(masks(), LENGTHS, LENGTHS)
def test_simplify_changes_no_picture(mask: Mask, t: int, s: int) -> None:
    simple = simplify(mask, t, s)
    assert (Full() if simple is None else simple).picture(t, s) == mask.picture(t, s)


@given(masks(), LENGTHS, LENGTHS)
def test_key_range_and_rows_are_never_claimed_wrongly(mask: Mask, t: int, s: int) -> None:
    rows = mask.picture(t, s).split("\n")
    low, high = key_range(mask, t, s)
    assert all("#" not in row[:low] + row[high:] for row in rows)
    if sees_every_row(mask, t, s):
        assert all("#" in row for row in rows)


@given(masks(), masks())
def test_joins_are_what_their_parts_say(a: Mask, b: Mask) -> None:
    try:
        both, either = a & b, a | b
    except InvalidProblem:
        return
    if None in (a.align, b.align) and {a.align, b.align} != {None}:
        return  # a window beside it takes the other alignment, which its own picture does not show
    for x, y, p, q in zip(*(m.picture(5, 4) for m in (a, b, both, either)), strict=True):
        assert (p == "#") == (x == "#" and y == "#") or x == "\n"
        assert (q == "#") == (x == "#" or y == "#") or x == "\n"


def test_laws() -> None:
    m = Causal() & Window(left=3)
    assert Full() & m == m == m & Full()
    assert m & m == m and m | m == m
    assert (Full() | m) == Full()
    assert (Causal() & Window(left=3)) & Padding([1]) == Causal() & (Window(left=3) & Padding([1]))
    assert hash(Causal() & Window(left=3)) == hash(m)
    assert Causal() != Causal("top_left") and Window(1) != Window(2) and Causal() != 3


@given(masks(), LENGTHS, LENGTHS)
def test_not_is_the_complement(mask: Mask, t: int, s: int) -> None:
    assert (~mask).picture(t, s) == mask.picture(t, s).translate(str.maketrans("#.", ".#"))
    assert ~~mask == mask and (~mask).align == mask.align
    assert (~mask).is_static == mask.is_static


def test_laws_of_not() -> None:
    m = Causal() & Window(left=3)
    assert Not(m) == ~m and ~~m is m and hash(~m) == hash(Not(m)) and ~m != m
    assert str(~m & ~Causal()) == "~(Causal() & Window(left=3, right=None)) & ~Causal()"
    assert (~Full() | m) == m == (m | ~Full()) and (~Full() | ~Full()) == ~Full()
    assert (~Full()).picture(2, 3) == "...\n..." and simplify(~Full(), 2, 3) == ~Full()
    assert simplify(~Full() & Causal(), 2, 3) == ~Full() == simplify(~Causal(), 1, 3)
    assert (~m).kinds == {"Not", "And", "Causal", "Window"} and (~m).parts == (m,)
    assert (~Causal()).band == (1, None) and (~Window(left=3)).band == (None, -4)
    assert (~Window(1, 1)).band is (~Full()).band is (~m).band is None


def test_not_keeps_the_alignment_of_its_member() -> None:
    with pytest.raises(InvalidProblem, match="two alignments"):
        ~Causal("top_left") & Causal()
    assert (~Causal("top_left") & Window(left=0, right=1)).picture(2, 4) == ".#..\n..#."


def test_not_takes_masks_alone() -> None:
    with pytest.raises(InvalidProblem, match=r"got Not of a list.*wrap a boolean array as Dense"):
        Not([[True]])  # type: ignore[arg-type]
    for packed in (Packed([0, 2]), Packed([0, 2]) & Causal()):
        with pytest.raises(InvalidProblem, match=r"got ~\(Packed.*Packed\(\.\.\.\) & ~mask"):
            Not(packed)
    with pytest.raises(InvalidProblem, match="`not`"):
        bool(~Causal())


def test_chunks_are_cut_on_the_alignment() -> None:
    """Fewer keys than queries: the first queries stand before all keys, in chunks of their own."""
    assert Chunked(2).picture(5, 2) == "..\n..\n..\n##\n##"
    assert Chunked(2).picture(4, 3) == "...\n##.\n##.\n..#"
    assert (Chunked(2) & Causal("top_left")).picture(3, 2) == "#.\n##\n.."
    assert Chunked(3).picture(2, 5) == "...##\n...##"


def test_distances_go_both_ways() -> None:
    assert Dilated(2).picture(2, 4) == "#.#.\n.#.#"
    assert Dilated(3).picture(5, 2) == "#.\n.#\n..\n#.\n.#"


def test_documents_are_segments_of_their_lengths() -> None:
    for lengths in ([2, 0, 3], np.array([2, 0, 3])):
        assert Segments.of_lengths(lengths) == Segments([0, 0, 2, 2, 2])
    assert (Segments.of_lengths([1, 2]) & Causal()).picture(3, 3) == "#..\n.#.\n.##"


def test_what_the_lengths_show() -> None:
    assert simplify(Chunked(8), 8, 8) is None and simplify(Chunked(8), 4, 8) is None
    assert simplify(Chunked(8), 8, 4) == Chunked(8) == simplify(Chunked(8), 1, 9)
    assert simplify(Chunked(8) & Causal("top_left"), 4, 9) == Chunked(8) & Causal("top_left")
    assert simplify(FirstKeys(4), 1, 4) is None and simplify(FirstKeys(0), 1, 4) == ~Full()
    assert simplify(Dilated(1), 3, 4) is None
    assert simplify(Padding(), 3, 4) is None is simplify(LeftPadding() & Padding(), 3, 4)
    assert simplify(Causal() & ~Padding(), 3, 4) == ~Full()
    assert simplify(Padding([1]), 3, 4) == Padding([1])
    assert key_range(Chunked(512) & Causal(), 1, 4096) == (3584, 4096)
    assert key_range(FirstKeys(4), 9, 9) == (0, 4)
    assert key_range(~FirstKeys(4), 9, 9) == (0, 9)


def test_signatures_are_short_deterministic_and_hide_contents() -> None:
    mask = (Causal() | Segments([0, 0, 1])) & Padding(kv_lengths=[3, 1])
    assert repr(mask) == "(Causal() | Segments(q=3, kv=3)) & Padding(q=None, kv=2)"
    assert Padding([1, 2]).signature == Padding([2, 1]).signature
    assert Padding([1, 2]) != Padding([2, 1])
    assert mask.kinds == {"And", "Or", "Causal", "Segments", "Padding"}


def test_alignments() -> None:
    for a, b in itertools.permutations([Causal("top_left"), PrefixLM([1])]):
        with pytest.raises(InvalidProblem, match="two alignments"):
            a & b
    with pytest.raises(InvalidProblem, match="two alignments"):
        Causal() | (Window(left=1) & Causal("top_left"))
    assert (Window(left=0, right=0) & Causal("top_left")).picture(2, 4) == "#...\n.#.."
    assert Window(left=0, right=0).picture(2, 4) == "..#.\n...#"


def test_truth_and_wrong_joins() -> None:
    with pytest.raises(InvalidProblem, match="`and`"):
        bool(Causal())
    with pytest.raises(InvalidProblem, match="Dense"):
        Causal() & [[True]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Causal("bottom"),
        lambda: Window(-1),
        lambda: Window(1.0),
        lambda: Window(True),
        lambda: Padding([[1]]),
        lambda: Padding([1.5]),
        lambda: Padding("12"),
        lambda: Dense([[1, 0]]),
        lambda: Dense([[True], [True, False]]),
        lambda: Segments([[[0]]]),
        lambda: BlockMap(0, 1, [[[[0]]]], [[[1]]]),
        lambda: BlockMap(1, 1, [[[[0]]]], [[[1, 1]]]),
        lambda: Packed([0, 2], [0, 1, 2]),
        lambda: Packed([]),
        lambda: PrefixLM(3),
        lambda: LeftPadding([[1]]),
        lambda: LeftPadding(kv_starts=[0.5]),
        lambda: Segments.of_lengths([2, -1]),
        lambda: Segments.of_lengths([[2]]),
        lambda: Segments.of_lengths(3),
        lambda: Chunked(0),
        lambda: Chunked(8.0),
        lambda: Chunked(1 << 31),
        lambda: Dilated(0),
        lambda: Dilated(True),
        lambda: FirstKeys(-1),
        lambda: Not(None),
        lambda: Dense(np.ma.array([[True]], mask=True)),
        lambda: Padding(np.ma.array([1, 2], mask=[False, True])),
    ],
)
def test_wrong_masks_are_clear_errors(make: object) -> None:
    with pytest.raises(InvalidProblem, match=r"got .*expected"):
        make()  # type: ignore[operator]

"""Masks: laws, pictures, signatures, alignments; simplification changes no picture."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn import (
    BlockMap,
    Causal,
    Dense,
    Full,
    InvalidProblem,
    Mask,
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
    st.builds(lambda n: PrefixLM([n]), st.integers(0, 5)),
)


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    mask = draw(LEAVES)
    for _ in range(draw(st.integers(0, 3))):
        other = draw(LEAVES)
        try:
            mask = mask & other if draw(st.booleans()) else mask | other
        except InvalidProblem as error:
            assert "alignments" in str(error)
    return mask


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
    ],
)
def test_wrong_masks_are_clear_errors(make: object) -> None:
    with pytest.raises(InvalidProblem, match=r"got .*expected"):
        make()  # type: ignore[operator]

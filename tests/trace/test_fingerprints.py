import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polyattn.errors import TraceError
from polyattn.trace.fingerprints import (
    Moments,
    block_counts,
    fingerprint,
    matches,
    moments,
    same_layout,
    slices,
)
from polyattn.trace.format.field_checks import plain

RNG = np.random.default_rng(2)


def stored(array):
    """As a trace's header keeps it."""
    return plain(json.loads(json.dumps(fingerprint(array), allow_nan=False)), "weights")


def direct(array):
    x = np.asarray(array, np.float64)
    return Moments(x.size, x.sum(), (x**2).sum(), (x**3).sum(), x.min(), x.max())


def weight(*shape):
    return (0.02 * RNG.standard_normal(shape)).astype(np.float32)


def test_are_the_moments():
    w = weight(300, 130)
    assert moments(stored(w)) == pytest.approx(direct(w), rel=1e-10)


def test_transposed_and_permuted_weights_match_and_their_layout_does_not():
    w = weight(256, 256)
    for other in (w.T, w[::-1], np.roll(w, 1, axis=1)):
        assert matches(moments(stored(w)), moments(stored(other)))
        assert not same_layout(stored(w), stored(other))
    assert same_layout(stored(w), stored(np.asfortranarray(w)))
    assert not same_layout(stored(w), stored(w.reshape(-1)))


def test_different_weights_do_not_match():
    w = weight(64, 512)
    changed = w.copy()
    changed[3, 5] += 1e-4
    for other in (weight(64, 512), -w, w * (1 + 1e-6), w[:, :-1], changed):
        assert not matches(moments(stored(w)), moments(stored(other)))
    assert not matches(moments(stored(np.zeros(8))), moments(stored(np.ones(8))))
    assert matches(moments(stored(np.zeros((2, 4)))), moments(stored(np.zeros((4, 2)))))


def test_sums_that_cancel_match_in_any_order():
    w = np.concatenate([weight(1_000_000), np.zeros(1, np.float32)])
    w[-1] = -w[:-1].sum()
    shuffled = RNG.permutation(w)
    assert matches(moments(stored(w)), moments(stored(shuffled)))


@pytest.mark.parametrize(("parts", "dim"), [(3, 0), (3, 1), (2, 0), (4, 1), (6, 0), (10, 0)])
def test_equal_parts_of_a_fused_weight_are_found(parts, dim):
    pieces = [weight(64, 64) for _ in range(parts)]
    fused = stored(np.concatenate(pieces, axis=dim))
    found = slices(fused, dim, parts)
    for piece, part in zip(pieces, found, strict=True):
        assert matches(part, moments(stored(piece.T)))
    assert not matches(found[0], moments(stored(pieces[1])))


@pytest.mark.parametrize("groups", [2, 3, 4, 5, 6, 7, 8])
def test_grouped_query_attention_is_found_by_joining_slices(groups):
    heads = 2
    q, k, v = weight(groups * heads * 16, 96), weight(heads * 16, 96), weight(heads * 16, 96)
    of = slices(stored(np.concatenate([q, k, v])), 0, groups + 2)
    first = of[0]
    for part in of[1:groups]:
        first = first + part
    for piece, part in zip((q, k, v), (first, *of[groups:]), strict=True):
        assert matches(part, moments(stored(piece)))


def test_stacked_heads_and_experts_are_kept_one_by_one():
    experts = weight(64, 32, 48)
    of = slices(stored(experts), 0, 64)
    assert all(matches(part, moments(stored(w))) for part, w in zip(of, experts, strict=True))
    joined = slices(stored(experts), 0, 8)
    assert matches(joined[3], moments(stored(experts[24:32])))


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["float32", "float64", "int16", "bool", "complex64"]),
        hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12),
    )
)
def test_any_array_has_one(x):
    with np.errstate(all="ignore"):  # cubes of weights beyond 1e90 and below 1e-90 are not kept
        size = np.abs(x.astype(np.complex128))
        x = np.where((size < 1e90) & (size > 1e-90), x, 0).astype(x.dtype)
    of = stored(x)
    whole = moments(of)
    assert matches(whole, moments(stored(x.T.copy())))
    for dim, kept in of["slices"].items():
        for count in map(int, kept):
            parts = slices(of, int(dim), count)
            assert len(parts) == count and sum(part.n for part in parts) == whole.n
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            assert matches(total, whole)


def test_other_dtypes():
    w = weight(24, 24)
    half = w.astype(ml_dtypes.bfloat16)
    assert stored(half)["dtype"] == "bfloat16"
    assert matches(moments(stored(half)), moments(stored(half.astype(np.float32))))
    w[0, 0] = np.nan
    zeroed = w.copy()
    zeroed[0, 0] = 0
    assert matches(moments(stored(w)), moments(stored(zeroed)))
    assert matches(moments(stored(np.full(4, 1e300))), moments(stored(np.full(4, 1e300))))


def test_block_counts_divide_and_stay_few():
    for size in range(1, 400):
        counts = block_counts(size, 2)
        assert all(size % count == 0 for count in counts) and sum(counts) <= 60
        for parts in range(2, 11):  # whatever equal fusion there is can be asked for
            assert (size % parts == 0) == any(count % parts == 0 for count in counts)


def test_stays_small_in_the_header():
    assert len(json.dumps(fingerprint(np.zeros((2304, 768), np.float32)))) < 4096


def test_what_is_no_fingerprint():
    for of in ({}, {"n": "x"}, {"n": 1}, {**fingerprint([1.0]), "sum": float("nan")}):
        with pytest.raises(TraceError, match="expected a fingerprint"):
            moments(of)
    good = fingerprint(np.arange(12.0))
    assert slices(good, 0, 11) is None and slices(good, 3, 2) is None
    for bad in ({"0": {"2": "AAAA"}}, {"0": {"2": 5}}, {"0": {"x": ""}}, {"0": []}, []):
        with pytest.raises(TraceError, match="slices that are none"):
            slices({**good, "slices": bad}, 0, 2)
    with pytest.raises(TraceError, match="expected numbers"):
        fingerprint(np.array(["w"]))

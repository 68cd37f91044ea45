import math
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polyattn.errors import TraceError
from polyattn.trace.statistics.sketch import (
    decode,
    distance,
    encode,
    flat_index,
    sketch,
    splitmix64,
)
from polyattn.trace.statistics.sketch_text import pack, unpack

RNG = np.random.default_rng(0)

# Known answers, for other languages' implementations too: sketch(0, 1, ..., 199).
OF_COUNTING = [
    -128, 128, -260, -262, 400, 0, -396, -412, 200, -55, -222, 53, -204, 231, -234, 207, -80,
    -209, -82, 211, -84, 255, 258, -41, 40, 217, -38, -273, -92, 221, 222, 95, 224, -31, -226,
    -297, -100, 27, -230, -231, -232, 315, -234, 21, -20, -327, 330, 239, 336, 113, 342, -243,
    -12, 245, -10, 357, -248, -121, -6, 369, -252, 253, 254, -381,
]  # fmt: skip


def plain_python_sketch(values, index):
    """The definition, word for word."""
    top = 2**64
    total = [0.0] * 64
    for x, i in zip(values, index, strict=True):
        z = (i // 64 + 0x9E3779B97F4A7C15) % top
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % top
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % top
        z ^= z >> 31
        if math.isfinite(x):
            total[i % 64] += -x if (z >> (i % 64)) & 1 else x
    return np.array(total)


def test_known_answers():
    assert [int(word) for word in splitmix64(np.array([0, 1, 2**63], np.uint64))] == [
        16294208416658607535,
        10451216379200822465,
        5196802822362493915,
    ]
    assert sketch(np.arange(200)).tolist() == OF_COUNTING
    assert encode(sketch(np.arange(3.0)))[:20] == "AAAAAAAAgL8AAADAAAAA"


@settings(max_examples=60, deadline=None)
@given(
    hnp.arrays(np.float64, st.integers(0, 400), elements=st.floats(-1e6, 1e6)),
    st.integers(0, 2**50),
)
def test_is_the_definition_at_any_offset(values, offset):
    index = range(offset, offset + len(values))
    expected = plain_python_sketch(values.tolist(), index)
    np.testing.assert_allclose(sketch(values, offset=offset), expected, rtol=1e-12, atol=1e-6)
    by_index = sketch(values, index=np.array(index, np.int64))
    np.testing.assert_allclose(by_index, expected, rtol=1e-12, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_parts_add_up_to_the_whole(data):
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=13))
    x = RNG.standard_normal(shape)
    dim = data.draw(st.integers(0, x.ndim - 1))
    cut = data.draw(st.integers(0, shape[dim]))
    total = np.zeros(64)
    for part in (slice(0, cut), slice(cut, None)):
        slices = (*[slice(None)] * dim, part)
        total += sketch(x[slices], index=flat_index(shape, slices))
    np.testing.assert_allclose(total, sketch(x), rtol=1e-10, atol=1e-10)
    flat = x.reshape(-1)
    at = data.draw(st.integers(0, flat.size))
    halves = sketch(flat[:at]) + sketch(flat[at:], offset=at)
    np.testing.assert_allclose(halves, sketch(x), rtol=1e-10, atol=1e-10)


def test_strided_slices_and_chunk_borders():
    x = RNG.standard_normal(3 * 65536 + 77)
    np.testing.assert_allclose(sketch(x), plain_python_sketch(x.tolist(), range(x.size)), atol=1e-9)
    total = sum(sketch(x[k::3], index=flat_index(x.shape, (slice(k, None, 3),))) for k in range(3))
    np.testing.assert_allclose(total, sketch(x), atol=1e-9)
    shifted = sketch(x[:1000]) + sketch(x[1000:], offset=1000)
    np.testing.assert_allclose(shifted, sketch(x), atol=1e-9)


def test_is_linear():
    x, y = RNG.standard_normal((2, 5, 1000))
    np.testing.assert_allclose(sketch(2.5 * x - 3 * y), 2.5 * sketch(x) - 3 * sketch(y), atol=1e-10)


B, T, N, H = 2, 24, 4, 16
X = RNG.standard_normal((B, T, N, H)).astype(np.float32)
PERMUTED = {
    "rolled tokens": np.roll(X, 1, axis=1),
    "tokens swapped": X[:, [1, 0, *range(2, T)]],
    "batch swapped": X[::-1],
    "heads swapped": X[:, :, [1, 0, 2, 3]],
    "head and dim transposed": np.swapaxes(X, 2, 3),
    "token and head transposed": np.swapaxes(X, 1, 2),
    "rotary order": X.reshape(B, T, N, H // 2, 2).swapaxes(-1, -2).reshape(X.shape),
    "reversed": X.reshape(-1)[::-1],
    "negated": -X,
    "rolled by a whole word": np.roll(X.reshape(-1), 64),
    "rolled by 4096": np.roll(X.reshape(-1), 64 * 16),
}


@pytest.mark.parametrize("name", PERMUTED)
def test_sees_what_sums_and_norms_do_not(name):
    assert distance(sketch(X), sketch(PERMUTED[name])) > 0.1
    assert distance(sketch(X), sketch(X.copy())) == 0


def test_swap_of_two_elements_is_seen():
    x = RNG.standard_normal(10_000)
    for i, j in RNG.integers(0, x.size, (50, 2)):
        y = x.copy()
        y[[i, j]] = y[[j, i]]
        seen = np.linalg.norm(sketch(x) - sketch(y)) > 0
        same_bucket = (i - j) % 64 == 0  # then a pair may have one sign: the price of 64 numbers
        assert seen or same_bucket or x[i] == x[j]


def test_expected_squared_norm_is_that_of_the_tensor():
    ratios = []
    for seed in range(300):
        x = np.random.default_rng(seed).standard_normal(2000)
        ratios.append(np.sum(sketch(x) ** 2) / np.sum(x**2))
    # variance 2/64 each, so the mean of 300 is within 0.0102 with one standard deviation
    assert abs(np.mean(ratios) - 1) < 0.04
    assert 0.1 < np.std(ratios) < 0.25


def test_distance_estimates_that_of_the_tensors():
    x = RNG.standard_normal(50_000)
    for relative in (1e-6, 1e-3, 0.1):
        y = x + relative * RNG.standard_normal(x.size)
        true = np.linalg.norm(x - y) / np.linalg.norm(x)
        assert 0.5 < distance(sketch(x), sketch(y)) / true < 2
    assert distance(np.zeros(64), np.zeros(64)) == 0
    assert distance(sketch(x), np.zeros(64)) == 1
    assert distance(sketch(x), encode(-sketch(x))) == pytest.approx(2)
    assert distance(np.full(64, 1e300), np.full(64, -1e300)) == pytest.approx(2)
    assert distance(np.full(64, 1e-310), np.full(64, 1.1e-310)) == pytest.approx(1 / 11, rel=1e-3)


@pytest.mark.parametrize("dtype", ["float16", "float32", ">f4", "int8", "uint64", "bool", "int64"])
def test_dtypes_are_their_numbers(dtype):
    x = RNG.integers(0, 2, (7, 33)).astype(dtype)
    assert sketch(x).tolist() == sketch(x.astype(np.float64)).tolist()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4])
def test_types_of_ml_dtypes(dtype):
    x = RNG.integers(-4, 4, (7, 33)).astype(np.float32)
    assert sketch(x.astype(dtype)).tolist() == sketch(x).tolist()


@pytest.mark.parametrize("dtype", ["complex64", "complex128", ">c8"])
def test_complex_is_a_last_dimension_of_two(dtype):
    x = (RNG.standard_normal((4, 50)) + 1j * RNG.standard_normal((4, 50))).astype(dtype)
    pairs = np.stack([x.real, x.imag], -1)
    assert np.allclose(sketch(x), sketch(pairs), atol=1e-12)
    assert np.allclose(sketch(x.T), sketch(pairs.transpose(1, 0, 2)), atol=1e-12)
    parts = sketch(x.reshape(-1)[:70]) + sketch(x.reshape(-1)[70:], offset=70)
    assert np.allclose(parts, sketch(x), atol=1e-12)
    columns = (slice(None), slice(0, 9)), (slice(None), slice(9, None))
    by_index = sum(sketch(x[s], index=flat_index(x.shape, s)) for s in columns)
    assert np.allclose(by_index, sketch(x), atol=1e-12)


def test_nonfinite_values_count_as_zero_and_huge_ones_stay_finite():
    x = RNG.standard_normal(300)
    holed, zeroed = x.copy(), x.copy()
    holed[[3, 64, 131, 299]] = np.nan, np.inf, -np.inf, np.inf
    zeroed[[3, 64, 131, 299]] = 0
    np.testing.assert_allclose(sketch(holed), sketch(zeroed), atol=1e-12)
    assert not sketch(np.full(100, np.nan)).any()
    huge = sketch(np.full(1000, 1.7e308))
    assert np.isfinite(huge).all() and huge.any()
    assert np.isfinite(decode(encode(huge))).all()


def test_empty_scalar_views_and_memory_order():
    assert not sketch(np.zeros((0, 5))).any()
    assert sketch(5.0)[0] == -5
    x = RNG.standard_normal((37, 53))
    assert np.allclose(sketch(np.asfortranarray(x)), sketch(x))
    assert np.allclose(sketch(x[::2, 5:]), sketch(x[::2, 5:].copy()))
    before = x.copy()
    sketch(x)
    assert (x == before).all(), "the input was changed"


@pytest.mark.parametrize(
    ("array", "more"),
    [
        (np.array(["a"]), {}),
        (np.array([object()]), {}),
        (np.zeros(3, "V8"), {}),
        (np.zeros(3, "datetime64[s]"), {}),
        (np.zeros(3), {"offset": -1}),
        (np.zeros(3), {"offset": 1.5}),
        (np.zeros(3), {"index": [0, 1]}),
        (np.zeros(3), {"index": [0, 1, -1]}),
        (np.zeros(3), {"index": [0.0, 1.0, 2.0]}),
        (np.zeros(3), {"index": [0, 1, 2], "offset": 3}),
    ],
)
def test_refuses_what_has_no_sketch(array, more):
    with pytest.raises(TraceError, match=r"got .* expected"):
        sketch(array, **more)


def test_flat_index_is_numpys():
    shape = (3, 4, 5)
    whole = np.arange(60).reshape(shape)
    for slices in [(), (slice(1, 3),), (slice(None), slice(1, None, 2), slice(4, 0, -1))]:
        assert (flat_index(shape, slices) == whole[slices]).all()
    assert flat_index((), ()).shape == ()
    with pytest.raises(TraceError):
        flat_index((3,), (slice(1), slice(1)))


finite = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(finite, min_size=64, max_size=64))
def test_text_keeps_float32_precision_at_any_size(values):
    text = pack(values)
    assert len(text) <= 351 and text.isascii()
    back = unpack(text)
    largest = max(map(abs, values))
    for was, now in zip(values, back, strict=True):
        assert abs(was - now) <= 2**-24 * abs(was) + 2**-100 * largest + 5e-324
    assert unpack(pack(back)) == back


@pytest.mark.parametrize(
    "text",
    ["", "AAAA", "=" * 344, "A" * 344, 5, None, "9999:" + pack([1.0] * 64), "x:" + pack([1.0] * 64),
     pack([1.0] * 64)[:-1], pack([1.0] * 64) + "A", pack([0.0] * 64).replace("A", "/", 6),
     "1" * 5000 + ":" + pack([0.0] * 64), "²:" + pack([0.0] * 64), ":" + pack([0.0] * 64)],
    ids=range(14),
)  # fmt: skip
def test_text_that_is_no_sketch(text):
    with pytest.raises(TraceError, match="got a sketch"):
        unpack(text)


def test_a_million_elements_take_milliseconds():
    x = RNG.standard_normal(1_000_000).astype(np.float32)
    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        sketch(x)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.015, "about 2 ms here; several times that on a busy machine"

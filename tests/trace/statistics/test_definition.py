import json
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from polyattn.errors import TraceError
from polyattn.trace.format.field_checks import parse
from polyattn.trace.format.record import DEFAULT_STATISTICS, MOMENTS, line_of, parse_record
from polyattn.trace.statistics import sketch as sketches
from polyattn.trace.statistics import statistics

RNG = np.random.default_rng(1)
PLACE = {"seq": 0, "module": "m", "phase": "out", "tensor": "out"}


def record_of(found):
    """Through a line of JSON and back, as in a file."""
    line = line_of(PLACE | found)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in {line}"))
    return parse_record(parse(line.encode()))


def test_are_numpys():
    x = RNG.standard_normal((3, 50, 7)).astype(np.float32)
    x[0, 0, :3] = 0
    found = statistics(x)
    wide = x.astype(np.float64)
    expected = {
        "min": wide.min(), "max": wide.max(), "mean": wide.mean(), "std": wide.std(),
        "abs_mean": np.abs(wide).mean(), "l1": np.abs(wide).sum(),
        "l2": np.linalg.norm(wide.reshape(-1)),
    }  # fmt: skip
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert tuple(found) == DEFAULT_STATISTICS
    assert (found["shape"], found["dtype"], found["n"]) == ([3, 50, 7], "float32", 1050)
    assert (found["zero"], found["nan"], found["pinf"], found["ninf"]) == (3, 0, 0, 0)
    assert found["samples"] == [float(x.reshape(-1)[i * 1049 // 7]) for i in range(8)]
    assert found["sketch"] == sketches.encode(sketches.sketch(x))


@settings(max_examples=150, deadline=None)
@given(
    hnp.arrays(
        st.sampled_from(["float64", "float32", "float16", "int8", "uint64", "bool", "complex128"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
    )
)
def test_any_array_has_a_record_and_it_is_json(x):
    with np.errstate(all="raise"):
        found = statistics(x)
    record = record_of(found)
    assert record.shape == x.shape and record.dtype == x.dtype.name
    parts = np.stack([x.real, x.imag]) if x.dtype.kind == "c" else x
    values = parts.astype(np.float64).reshape(-1)
    finite = values[np.isfinite(values)]
    assert record.n == values.size
    assert record.bad == values.size - finite.size
    assert record.zero == (finite == 0).sum()
    if not finite.size:
        assert all(getattr(record, name) is None for name in MOMENTS)
        return
    # what is null is only what no element allows; order and signs hold after rounding
    assert record.min == pytest.approx(finite.min(), rel=1e-8)
    assert record.max == pytest.approx(finite.max(), rel=1e-8)
    assert record.min <= record.max and record.std >= 0 and record.l2 <= record.l1 * (1 + 1e-8)
    assert record.abs_mean <= max(abs(record.min), abs(record.max)) * (1 + 1e-8)


def test_nan_everywhere_and_infinities():
    found = statistics(np.full((2, 3), np.nan, np.float16))
    assert (found["n"], found["nan"], found["samples"]) == (6, 6, [None] * 8)
    assert all(found[name] is None for name in MOMENTS if name in found)
    found = statistics(np.array([np.inf, -np.inf, -np.inf, np.nan, 2.0, -1.0]))
    assert [found[name] for name in ("nan", "pinf", "ninf", "zero")] == [1, 1, 2, 0]
    assert (found["min"], found["max"], found["mean"], found["l1"]) == (-1, 2, 0.5, 3)
    assert record_of(found).samples[0] is None


def test_one_element_and_none():
    found = statistics(np.float32(-3))
    assert (found["shape"], found["std"], found["l2"], found["samples"]) == ([], 0, 3, [-3.0] * 8)
    found = statistics(np.zeros((4, 0)))
    assert (found["n"], found["samples"], found["mean"]) == (0, [], None)
    assert record_of(found).n == 0


@pytest.mark.parametrize("size", [1e300, 1.7e308, 1e-200, 5e-324])
def test_squares_of_any_size_fit(size):
    x = np.array([size, -size, size, 0.0])
    found = statistics(x)
    assert found["l2"] == pytest.approx(size * math.sqrt(3), rel=1e-12) or size > 1e308
    assert found["abs_mean"] == pytest.approx(size * 0.75, rel=0.4)
    assert all(math.isfinite(found[name]) for name in MOMENTS if name in found)
    record = record_of(found)
    assert record.buckets().any()
    assert abs(record.buckets()[0]) == pytest.approx(size, rel=1e-6)


def test_mean_is_right_beside_a_large_offset():
    x = 1e8 + RNG.standard_normal(3_000_000)
    assert statistics(x)["std"] == pytest.approx(x.std(), rel=1e-9)


def test_bools_ints_bfloat16_and_complex():
    found = statistics(np.array([True, False, True, True]))
    assert (found["dtype"], found["mean"], found["max"], found["zero"]) == ("bool", 0.75, 1.0, 1)
    assert statistics(np.array([-(2**40), 2**40]))["min"] == -(2.0**40)
    found = statistics(np.array([1.5, np.nan], ml_dtypes.bfloat16))
    assert (found["dtype"], found["max"], found["nan"]) == ("bfloat16", 1.5, 1)
    found = statistics(np.array([3 + 4j, complex(np.nan, 1)], np.complex64))
    assert (found["n"], found["nan"], found["l1"], found["shape"]) == (4, 1, 8.0, [2])
    assert record_of(found).n == 4


def test_a_box_of_a_larger_tensor():
    x = RNG.standard_normal((6, 10)).astype(np.float32)
    left = statistics(x[:, :4], global_shape=(6, 10), start=(0, 0))
    right = statistics(x[:, 4:], global_shape=(6, 10), start=(0, 4))
    assert (left["shape"], right["start"]) == ([6, 4], [0, 4])
    both = sketches.decode(left["sketch"]) + sketches.decode(right["sketch"])
    assert sketches.distance(both, sketches.sketch(x)) < 1e-6
    for shape, start in [((6, 9), (0, 6)), ((6,), (0,)), ((6, 10), (0, -1)), ((6, 10), (0,))]:
        with pytest.raises(TraceError, match="expected a box within it"):
            statistics(x[:, :4], global_shape=shape, start=start)


def test_refuses_what_holds_no_numbers():
    with pytest.raises(TraceError, match="expected numbers"):
        statistics(np.array(["text"]))
    with pytest.raises(TraceError, match="cannot take"):
        statistics([[1.0], [1.0, 2.0]])


@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_a_record_is_at_most_a_kilobyte(dtype):
    x = (RNG.standard_normal((1, 4096, 512)) * 37.123).astype(dtype)
    place = {
        "seq": 123456, "module": "model.language_model.layers.31.self_attn.rotary_embedding",
        "cls": "LlamaDynamicRotaryEmbedding", "call": 1234, "step": 49, "rank": 127,
        "phase": "grad_out", "tensor": "kwargs.position_embeddings[0]",
    }  # fmt: skip
    assert len(line_of(place | statistics(x))) + 1 <= 1000


def test_lines_keep_what_the_dtype_holds():
    x = RNG.standard_normal(1000)
    assert record_of(statistics(x)).min == x.min()
    single = x.astype(np.float32)
    record = record_of(statistics(single))
    assert np.float32(record.min) == single.min()
    assert [np.float32(s) for s in record.samples] == [single[i * 999 // 7] for i in range(8)]

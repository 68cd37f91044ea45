"""The laws of joining partial attention results, in NumPy, torch and (where installed) JAX."""

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.errors import InvalidProblem
from polyattn.partials import Partial, merge, merge_all, rescale_for_sink

torch = pytest.importorskip("torch")
INF = float("inf")

LIBRARIES = {
    "numpy32": lambda x: np.asarray(x, np.float32),
    "numpy64": lambda x: np.asarray(x, np.float64),
    "torch32": lambda x: torch.tensor(np.asarray(x), dtype=torch.float32),
    "torch64": lambda x: torch.tensor(np.asarray(x), dtype=torch.float64),
}
each_library = pytest.mark.parametrize("library", LIBRARIES)


def plain(array):
    array = array.detach() if isinstance(array, torch.Tensor) else array
    return np.asarray(array, np.float64)


def attend(scores, values):
    """The definition: softmax-weighted values and lse of every row, in float64."""
    with np.errstate(divide="ignore"):
        largest = np.max(scores, axis=-1, initial=-INF, keepdims=True)
        weights = np.exp(scores - np.where(largest == -INF, 0.0, largest))
        total = weights.sum(-1, keepdims=True)
        out = weights @ values / np.where(total == 0.0, 1.0, total)
        return out, (np.log(total) + np.where(largest == -INF, 0.0, largest))[..., 0]


def parts_of(library, scores, values, cuts):
    """One partial for each run of keys; where it saw none, its out is NaN."""
    made = LIBRARIES[library]
    for start, stop in zip([0, *cuts], [*cuts, scores.shape[-1]], strict=True):
        out, lse = attend(scores[..., start:stop], values[..., start:stop, :])
        out[lse == -INF] = np.nan
        yield Partial(made(out), made(lse))


@st.composite
def problems(draw):
    """Scores (N, T, S) with masked entries, values (N, S, H) and the places to cut the keys."""
    heads, rows, keys, dim = (
        draw(st.integers(low, high)) for low, high in ((1, 2), (1, 4), (0, 9), (1, 3))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.normal(size=(heads, rows, keys)) * draw(st.sampled_from([0.1, 3.0, 60.0]))
    scores += draw(st.sampled_from([0.0, -2000.0, 2000.0]))
    scores[rng.random(scores.shape) < draw(st.sampled_from([0.0, 0.5, 0.9, 1.0]))] = -INF
    cuts = sorted(draw(st.lists(st.integers(0, keys), max_size=4)))
    return scores, rng.normal(size=(heads, keys, dim)), cuts


def check_close(a, b, library):
    """Equal up to rounding of the scores: an lse of 2000 has few digits left for its share."""
    assert a.out.dtype == b.out.dtype
    assert a.lse.dtype == b.lse.dtype
    tolerance = 3e-3 if library.endswith("32") else 1e-11
    np.testing.assert_allclose(plain(a.out), plain(b.out), rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(plain(a.lse), plain(b.lse), rtol=1e-6, atol=tolerance)


@each_library
@given(problem=problems())
def test_parts_of_the_keys_join_to_the_whole(library, problem):
    scores, values, cuts = problem
    whole = Partial(*map(LIBRARIES[library], attend(scores, values)))
    with np.errstate(all="raise", under="ignore"):
        joined = merge_all(parts_of(library, scores, values, cuts))
    check_close(joined, whole, library)
    empty = plain(whole.lse) == -INF
    assert np.array_equal(plain(joined.lse) == -INF, empty)
    assert (plain(joined.out)[empty] == 0.0).all()


@each_library
@given(problem=problems())
def test_merge_is_commutative_bit_for_bit(library, problem):
    scores, values, _ = problem
    a, b = parts_of(library, scores, values, [scores.shape[-1] // 2])
    for one, other in zip(merge(a, b), merge(b, a), strict=True):
        assert np.array_equal(plain(one), plain(other))


@each_library
@given(problem=problems())
def test_merge_is_associative(library, problem):
    scores, values, _ = problem
    keys = scores.shape[-1]
    a, b, c = parts_of(library, scores, values, [keys // 3, keys - keys // 3])
    left, right = merge(merge(a, b), c), merge(a, merge(b, c))
    check_close(left, right, library)
    check_close(merge_all([a, b, c]), left, library)
    check_close(functools.reduce(merge, [c, b, a]), left, library)


@each_library
@pytest.mark.parametrize("poison", [0.0, np.nan, INF])
def test_an_empty_part_changes_nothing_bit_for_bit(library, poison):
    made = LIBRARIES[library]
    part = Partial(made([[1.1, 2.2], [np.nan, 3.3]]), made([0.7, -1234.5]))
    empty = Partial(made(np.full((2, 2), poison)), made([-INF, -INF]))
    for joined in (merge(part, empty), merge(empty, part), merge_all([empty, part, empty])):
        assert np.array_equal(plain(joined.out), plain(part.out), equal_nan=True)
        assert np.array_equal(plain(joined.lse), plain(part.lse))
    for nothing in (merge(empty, empty), merge_all([empty])):
        assert (plain(nothing.out) == 0.0).all()
        assert (plain(nothing.lse) == -INF).all()


@each_library
@given(
    problem=problems(),
    sinks=st.lists(st.sampled_from([-INF, -2000.0, 0.0, 1.5, 2000.0]), min_size=2),
)
def test_a_sink_is_a_key_without_value(library, problem, sinks):
    scores, values, _ = problem
    made = LIBRARIES[library]
    sink = np.asarray(sinks[: scores.shape[0]] or [0.0])[:, None]
    column = np.broadcast_to(sink[..., None], (*scores.shape[:-1], 1))
    nothing = np.zeros((*values.shape[:-2], 1, values.shape[-1]))
    expected = attend(np.concatenate([scores, column], -1), np.concatenate([values, nothing], -2))
    (part,) = parts_of(library, scores, values, [])
    found = rescale_for_sink(part.out, part.lse, made(sink))
    check_close(found, Partial(*map(made, expected)), library)


# Dtypes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("lse_dtype", [torch.float16, torch.float32, torch.float64])
def test_dtypes_of_torch(dtype, lse_dtype):
    part = Partial(torch.ones(2, 3, dtype=dtype), torch.zeros(2, dtype=lse_dtype))
    for found in (merge(part, part), rescale_for_sink(*part, torch.zeros(2))):
        assert found.out.dtype == dtype
        assert found.lse.dtype == (torch.float64 if lse_dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_dtypes_of_numpy(dtype, shape):
    part = Partial(np.ones((*shape, 3), dtype), np.zeros(shape, np.float32))
    for found in (merge(part, part), rescale_for_sink(*part, np.zeros(shape))):
        assert (found.out.dtype, found.lse.dtype) == (dtype, np.float32)
        assert found.out.shape == (*shape, 3)


def test_many_half_precision_parts_are_rounded_once():
    rng = np.random.default_rng(0)
    scores, values = rng.normal(size=(4, 256)), rng.normal(size=(256, 8))
    parts = [
        Partial(part.out.to(torch.bfloat16), part.lse)
        for part in parts_of("torch64", scores, values, list(range(1, 256)))
    ]
    exact = merge_all(Partial(out.double(), lse) for out, lse in parts)
    assert torch.equal(merge_all(parts).out, exact.out.to(torch.bfloat16))


# Gradients and compilation -----------------------------------------------------------------------


def leaf(values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def joined_with_sink(out_a, lse_a, out_b, lse_b, sink):
    joined = merge(Partial(out_a, lse_a), Partial(out_b, lse_b))
    return tuple(rescale_for_sink(*joined, sink))


def test_gradients_are_right():
    torch.manual_seed(0)
    shapes = [(3, 2), (3,), (3, 2), (3,), (1,)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(joined_with_sink, inputs)
    assert torch.autograd.gradgradcheck(joined_with_sink, inputs)


@pytest.mark.parametrize("lse_a", [-INF, -2000.0, 0.0, 2000.0])
@pytest.mark.parametrize("lse_b", [-INF, -2000.0, 2000.0])
@pytest.mark.parametrize("sink", [-INF, -2000.0, 2000.0])
def test_gradients_are_finite_and_zero_into_an_empty_side(lse_a, lse_b, sink):
    poison_a, poison_b = (np.nan if lse == -INF else 1.0 for lse in (lse_a, lse_b))
    inputs = [
        leaf([[poison_a, 2.0]]),
        leaf([lse_a]),
        leaf([[poison_b, 3.0]]),
        leaf([lse_b]),
        leaf([sink]),
    ]
    out, lse = joined_with_sink(*inputs)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    (out.sum() + torch.where(lse == -INF, torch.zeros_like(lse), lse).sum()).backward()
    for given_ in inputs:
        assert given_.grad.isfinite().all()
    for out_grad, lse_grad, at in ((inputs[0], inputs[1], lse_a), (inputs[2], inputs[3], lse_b)):
        if at == -INF:
            assert not out_grad.grad.any()
            assert not lse_grad.grad.any()


def test_compiles_as_one_graph():
    torch.manual_seed(0)
    inputs = [torch.randn(s) for s in [(2, 3, 4), (2, 3), (2, 3, 4), (2, 3), (3,)]]
    inputs[1][0, 0] = inputs[3][0, 0] = inputs[3][1, 1] = -INF
    compiled = torch.compile(joined_with_sink, fullgraph=True, backend="eager")
    for found, expected in zip(compiled(*inputs), joined_with_sink(*inputs), strict=True):
        assert torch.equal(found, expected)


def test_jax_eager_jit_and_gradient():
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    inputs = [[[1.0], [np.nan]], [0.5, -INF], [[3.0], [np.nan]], [0.5, -INF], [-INF]]
    inputs = [jnp.asarray(x, jnp.float32) for x in inputs]
    for run in (joined_with_sink, jax.jit(joined_with_sink)):
        out, lse = run(*inputs)
        np.testing.assert_allclose(out, [[2.0], [0.0]], rtol=1e-6)
        np.testing.assert_allclose(lse, [0.5 + np.log(2.0), -INF], rtol=1e-6)
    grads = jax.grad(lambda *x: joined_with_sink(*x)[0].sum(), argnums=(0, 1, 2, 3, 4))(*inputs)
    assert all(bool(jnp.isfinite(grad).all()) for grad in grads)


# Bad input ---------------------------------------------------------------------------------------

GOOD = Partial(np.zeros((2, 3)), np.zeros(2))


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [Partial(np.zeros((2, 3)), np.zeros(3))],
        [Partial(np.zeros((2, 3)), np.zeros((2, 3)))],
        [Partial(np.zeros(()), np.zeros(()))],
        [Partial(np.zeros((2, 3)), torch.zeros(2))],
        [Partial([[1.0]], [0.0])],
        [Partial(1.0, 2.0)],
        [GOOD, Partial(np.zeros((2, 4)), np.zeros(2))],
        [GOOD, Partial(torch.zeros(2, 3), torch.zeros(2))],
    ],
)
def test_merge_refuses(parts):
    with pytest.raises(InvalidProblem, match=r"got .*expected .*; .+"):
        merge_all(parts)


@pytest.mark.parametrize("sink", [0.0, np.zeros(3), np.zeros((1, 2)), torch.zeros(2)])
def test_rescale_for_sink_refuses(sink):
    with pytest.raises(InvalidProblem, match=r"got .*expected .*; .+"):
        rescale_for_sink(*GOOD, sink)

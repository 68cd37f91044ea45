"""``polyattn.jax.attention``: right under every transformation, refused clearly, by scope."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

import polyattn
from polyattn import (
    Alibi,
    BlockMap,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    Dilated,
    FirstKeys,
    InvalidProblem,
    LeftPadding,
    Packed,
    Padding,
    Segments,
    UnknownBackend,
    Unsupported,
    Window,
    record_selections,
    use_backend,
)  # fmt: skip
from polyattn.jax import attention, explain, plan
from polyattn.selection import scopes
from polyattn.selection.selection import Source

B, T, S, N, K, H = 2, 12, 15, 4, 2, 8


def draw(seed: int, *shape: int, dtype: Any = None) -> Any:
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return jnp.asarray(x) if dtype is None else jnp.asarray(x).astype(dtype)


Q, KEY, V = draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H)


def defined(q: Any, k: Any, v: Any, allowed: Any = None) -> Any:
    """The definition in NumPy's float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) * q.shape[-1] ** -0.5
    scores = scores if allowed is None else np.where(allowed, scores, -np.inf)
    peak = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(peak), peak, 0))
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    return np.einsum("bnts,bsnh->btnh", weights, v)


BACKENDS = ("native_cpu", "jax_reference", "jax_blockwise")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    probed = polyattn.selection.registry.registry.probe(("jax", name))
    if not hasattr(probed, "version"):
        pytest.skip(probed.reason)
    return name


def causal() -> Any:
    return np.arange(S)[None] <= np.arange(T)[:, None] + S - T


def test_right_in_eager_code_and_under_jit(backend: str) -> None:
    want = defined(Q, KEY, V, causal())
    out = attention(Q, KEY, V, mask=Causal(), backend=backend)
    np.testing.assert_allclose(out, want, atol=2e-6)
    run = jax.jit(lambda q, k, v: attention(q, k, v, mask=Causal(), backend=backend))
    np.testing.assert_array_equal(run(Q, KEY, V), out)


def test_numpy_arrays_are_taken(backend: str) -> None:
    out = attention(*map(np.asarray, (Q, KEY, V)), backend=backend)
    np.testing.assert_allclose(out, defined(Q, KEY, V), atol=2e-6)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_layouts(backend: str, layout: str) -> None:
    arrays = [x if layout == "BTNH" else x.swapaxes(1, 2) for x in (Q, KEY, V)]
    out, lse = attention(*arrays, layout=layout, return_lse=True, backend=backend)
    out = out if layout == "BTNH" else out.swapaxes(1, 2)
    np.testing.assert_allclose(out, defined(Q, KEY, V), atol=2e-6)
    assert lse.shape == (B, N, T) and lse.dtype == jnp.float32


def masks() -> dict[str, Any]:
    lengths = jnp.array([3, S])
    return {
        "padding": Padding(kv_lengths=lengths),
        "padded rows": Padding(q_lengths=jnp.array([0, 5]), kv_lengths=lengths),
        "window": Causal() & Window(left=3),
        "starts": LeftPadding(q_starts=jnp.array([0, 5]), kv_starts=lengths),
        "chunks": Chunked(4) & Causal(),
        "first keys": Causal() & (Window(left=2) | FirstKeys(2)),
        "complement": ~(Dilated(3) | Padding(kv_lengths=lengths)),
        "segments": Segments(jnp.arange(T) // 5, jnp.arange(S) // 5),
        "dense": Dense(draw(5, 1, N, T, S) > 0),
        "blocks": BlockMap(
            4, 8, jnp.zeros((1, 1, 3, 2), jnp.int32).at[..., 1].set(1), jnp.full((1, 1, 3), 1)
        ),
    }


@pytest.mark.parametrize("name", list(masks()))
def test_masks_are_pytrees(backend: str, name: str) -> None:
    mask = masks()[name]
    out = attention(Q, KEY, V, mask=mask, backend=backend)
    run = jax.jit(lambda q, k, v, mask: attention(q, k, v, mask=mask, backend=backend))
    np.testing.assert_array_equal(run(Q, KEY, V, mask), out)
    allowed = np.asarray(polyattn.jax.kit.masking.allowed(
        polyattn.jax.kit.masking.bind_mask(mask), polyattn.jax.kit.masking.Dims(B, N, K, T, S)
    ))  # fmt: skip
    np.testing.assert_allclose(out, defined(Q, KEY, V, allowed), atol=2e-6)
    leaves, structure = jax.tree_util.tree_flatten(mask)
    assert jax.tree_util.tree_unflatten(structure, leaves) == mask


def loss(backend: str | None, mask: Any = None) -> Any:
    def value(q: Any, k: Any, v: Any, sinks: Any, bias: Any) -> Any:
        out, lse = attention(
            q, k, v, mask=mask, sinks=sinks, bias=DenseBias(bias), softcap=2.0, return_lse=True,
            backend=backend,
        )  # fmt: skip
        return (out * jnp.cos(jnp.arange(H))).sum() + lse.sum()

    return value


def test_gradients_of_everything(backend: str) -> None:
    arguments = (Q, KEY, V, draw(3, N, 2), draw(4, 1, N, T, S))
    found = jax.jit(jax.grad(loss(backend, Causal()), argnums=range(5)))(*arguments)
    with jax.enable_x64(True):  # finite differences of float32 are of too few digits
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arguments]
        value, step = jax.jit(loss("jax_reference", Causal())), 1e-5
        for i, (x, grad) in enumerate(zip(exact, found, strict=True)):
            along = np.random.default_rng(10 + i).standard_normal(x.shape)
            moved = [
                value(*(y + sign * step * along if j == i else y for j, y in enumerate(exact)))
                for sign in (1, -1)
            ]
            slope = (np.asarray(grad, np.float64) * along).sum()
            np.testing.assert_allclose(
                (moved[0] - moved[1]) / (2 * step), slope, rtol=1e-4, atol=1e-4
            )


def test_under_vmap_scan_and_checkpoint(backend: str) -> None:
    want = defined(Q, KEY, V)
    mapped = jax.vmap(lambda q, k, v: attention(q[None], k[None], v[None], backend=backend)[0])
    np.testing.assert_allclose(mapped(Q, KEY, V), want, atol=2e-6)

    def body(carry: Any, x: Any) -> Any:
        return carry, attention(*(each[None] for each in x), backend=backend)[0]

    np.testing.assert_allclose(jax.lax.scan(body, 0, (Q, KEY, V))[1], want, atol=2e-6)
    plain, saved = (
        jax.grad(lambda q, f=f: f(q).sum())(Q)
        for f in (
            lambda q: attention(q, KEY, V, backend=backend) ** 2,
            jax.checkpoint(lambda q: attention(q, KEY, V, backend=backend) ** 2),
        )
    )
    np.testing.assert_allclose(plain, saved, atol=1e-6)


def test_forward_mode_where_the_kernel_is_plain_jax() -> None:
    def f(q: Any) -> Any:
        return attention(q, KEY, V, mask=Causal(), backend="jax_reference").sum()

    _, moved = jax.jvp(f, (Q,), (Q,))
    np.testing.assert_allclose(moved, (jax.grad(f)(Q) * Q).sum(), rtol=1e-4)


def test_the_kernels_say_what_has_second_derivatives() -> None:
    if "native_cpu" not in BACKENDS:
        pytest.skip("no native kernels here")

    def slope(q: Any) -> Any:
        return jax.grad(lambda q: (attention(q, KEY, V, backend="native_cpu") ** 2).sum())(q).sum()

    with pytest.raises(Unsupported, match="backend='jax_reference'"):
        jax.grad(slope)(Q)


def test_packed_sequences(backend: str) -> None:
    cu = jnp.array([0, 5, 5, 12])
    q, k = draw(0, 12, N, H), draw(1, 12, K, H)
    mask = Packed(cu) & Causal()
    out = attention(q, k, k, mask=mask, layout="packed", backend=backend)
    run = jax.jit(lambda q, m: attention(q, k, k, mask=m, layout="packed", backend=backend))
    np.testing.assert_array_equal(run(q, mask), out)
    for low, high in ((0, 5), (5, 12)):
        part = [x[None, low:high] for x in (q, k, k)]
        seen = np.tril(np.ones((high - low, high - low), bool))
        np.testing.assert_allclose(out[low:high], defined(*part, seen)[0], atol=2e-6)


def test_alibi_and_its_slopes(backend: str) -> None:
    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])
    out = attention(Q, KEY, V, bias=Alibi(slopes), backend=backend)
    distance = jnp.abs(jnp.arange(T)[:, None] + S - T - jnp.arange(S))
    dense = DenseBias(-slopes[:, None, None] * distance)
    np.testing.assert_allclose(out, attention(Q, KEY, V, bias=dense, backend=backend), atol=2e-6)


def test_slopes_that_train_go_to_a_backend_that_trains_them() -> None:
    def f(slopes: Any) -> Any:
        return attention(Q, KEY, V, bias=Alibi(slopes)).sum()

    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])
    grad = jax.grad(f)(slopes)
    step = 1e-2
    for i in range(N):
        up, down = (f(slopes.at[i].add(sign * step)) for sign in (1, -1))
        np.testing.assert_allclose(grad[i], (up - down) / (2 * step), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types(backend: str, dtype: str) -> None:
    arrays = [x.astype(dtype) for x in (Q, KEY, V)]
    out = attention(*arrays, backend=backend)
    assert out.dtype == dtype
    want = defined(*(x.astype(jnp.float32) for x in arrays))
    np.testing.assert_allclose(out.astype(jnp.float32), want, atol=2e-2)


def test_what_is_masked_never_leaks(backend: str) -> None:
    mask = Padding(kv_lengths=jnp.array([3, 7]))
    clean = attention(Q, KEY, V, mask=mask, backend=backend)
    hidden = np.arange(S)[None, :, None, None] >= np.array([3, 7])[:, None, None, None]
    for poison in (np.nan, np.inf):
        k, v = (jnp.where(hidden, poison, x) for x in (KEY, V))
        np.testing.assert_array_equal(attention(Q, k, v, mask=mask, backend=backend), clean)


# What is asked for ------------------------------------------------------------------------------


def test_a_changed_scope_never_runs_a_stale_trace() -> None:
    traced = []

    @jax.jit
    def run(q: Any) -> Any:
        traced.append(explain(q, KEY, V).backend)
        return attention(q, KEY, V)

    run(Q)
    for _ in range(2):
        with use_backend("jax_reference"):
            run(Q)
        with use_backend("jax_reference", "flex"):
            run(Q)
    run(Q)
    assert traced == [explain(Q, KEY, V).backend, "jax_reference", "jax_reference"]


def test_a_forced_backend_is_part_of_the_key() -> None:
    seen = []

    @jax.jit
    def run(q: Any) -> Any:
        seen.append(explain(q, KEY, V).source)
        return attention(q, KEY, V)

    run(Q)
    scopes.set_forced("jax_reference")
    try:
        run(Q)
        run(Q)
    finally:
        scopes.set_forced(None)
    run(Q)
    assert seen[:2] == [Source.HEURISTIC, Source.FORCED] and len(seen) == 3


def test_what_ran_is_recorded_when_it_is_traced() -> None:
    run = jax.jit(lambda q: attention(q, KEY, V))
    run(Q)
    with record_selections() as ran:
        run(Q)
    with record_selections() as again:
        run(Q)
    assert len(ran) == len(again) == 1 and ran[0].backend == explain(Q, KEY, V).backend


def test_threads_have_scopes_of_their_own() -> None:
    found: list[str] = []
    with use_backend("jax_reference"):
        thread = threading.Thread(target=lambda: found.append(explain(Q, KEY, V).source))
        thread.start()
        thread.join()
        jax.jit(lambda q: attention(q, KEY, V))(Q)
    assert found == [Source.HEURISTIC]


def test_a_coroutines_scope_is_refused_in_traced_code_and_other_tasks_run_their_own() -> None:
    traced = []

    @jax.jit
    def run(q: Any) -> Any:
        traced.append(explain(q, KEY, V).backend)
        return attention(q, KEY, V)

    def plainly(q: Any) -> Any:
        with use_backend("jax_reference"):
            return run(q)

    async def holds(inside: asyncio.Event, done: asyncio.Event) -> None:
        with use_backend("jax_reference"):
            inside.set()
            await done.wait()
            attention(Q, KEY, V)  # which nobody keeps
            for call in (run, lambda q: jax.jit(lambda q: attention(q, KEY, V) + 1)(q)):
                with pytest.raises(InvalidProblem, match="a function that is no coroutine"):
                    call(Q)
                with pytest.raises(InvalidProblem, match="a function that is no coroutine"):
                    await asyncio.to_thread(call, Q)
            traced.clear()
            plainly(Q)

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()
        holder = asyncio.create_task(holds(inside, done))
        await inside.wait()
        traced.clear()
        run(Q)
        run(Q)
        plainly(Q)
        await asyncio.to_thread(run, Q)
        assert traced == [usual, usual, "jax_reference", usual]
        done.set()
        await holder
        assert traced == []  # by then a function's trace of it was kept

    usual = explain(Q, KEY, V).backend
    run(Q)
    asyncio.run(main())
    traced.clear()
    run(Q)
    plainly(Q)
    assert traced == []


def test_a_recorder_of_a_coroutine_does_not_hear_other_tasks() -> None:
    run = jax.jit(lambda q: attention(q, KEY, V))

    async def records(inside: asyncio.Event, done: asyncio.Event) -> None:
        with record_selections() as ran:
            inside.set()
            await done.wait()
        assert ran == []

    async def main() -> None:
        inside, done = asyncio.Event(), asyncio.Event()
        recording = asyncio.create_task(records(inside, done))
        await inside.wait()
        run(Q)
        done.set()
        await recording

    asyncio.run(main())


@pytest.mark.parametrize("rules", ["dtype", "rank"])
def test_a_program_that_forbids_promotion_is_not_held_to_that_by_kernels(
    backend: str, rules: str
) -> None:
    forbidden = {
        "dtype": jax.numpy_dtype_promotion("strict"), "rank": jax.numpy_rank_promotion("raise"),
    }  # fmt: skip
    half = [x.astype(jnp.bfloat16) for x in (Q, KEY, V)]
    mask = Causal() & Padding(kv_lengths=jnp.array([3, 14]))

    def value(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out = attention(q, k, v, mask=mask, sinks=sinks, softcap=2.0, backend=backend)
        return out.astype(jnp.float32).sum()

    learn = jax.grad(value, (0, 1, 2, 3))
    want = learn(*half, jnp.ones(N))
    with forbidden[rules]:
        found = learn(*half, jnp.ones(N))
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), atol=1e-2
        )


def test_a_plan_is_for_arrays_like_its_own() -> None:
    step = plan(Q, KEY, V, mask=Causal())
    np.testing.assert_allclose(step(Q, KEY, V), defined(Q, KEY, V, causal()), atol=2e-6)
    for given in (
        (Q, draw(1, B, S + 5, K, H), draw(2, B, S + 5, K, H)), (Q[..., :4], KEY[..., :4], V),
        tuple(x.astype(int) for x in (Q, KEY, V)), (Q, KEY, 3.0),
    ):  # fmt: skip
        with pytest.raises(InvalidProblem, match="which it was planned for"):
            step(*given)


# Refusals ---------------------------------------------------------------------------------------


def wrong_calls() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"mask": jnp.ones((T, S), bool)}, r"polyattn.Dense\(mask\)"
    yield {"bias": jnp.ones((T, S))}, r"polyattn.DenseBias\(bias\)"
    yield {"layout": "BHTD"}, "expected one of BTNH"
    yield {"dropout_p": 0.5}, "dropout_key"
    yield {"dropout_p": 0.5, "dropout_key": 3}, "dropout_key of type int, expected one key"
    keys = jax.random.split(jax.random.key(0), 3)
    yield {"dropout_p": 0.5, "dropout_key": keys}, r"of shape \(3,\), expected one key"
    yield {"scale": "big"}, "expected a Python number"
    yield {"scale": jnp.float32(2)}, r"pass float\(scale\), or multiply the query"
    yield {"return_lse": "no"}, "expected True or False"
    yield {"deterministic": 0.5}, "expected True or False"
    yield {"sinks": jnp.ones(3)}, "with N = 4"
    yield {"mask": Padding(kv_lengths=jnp.ones(5, jnp.int32))}, "Padding"


@pytest.mark.parametrize(("options", "message"), list(wrong_calls()))
def test_wrong_calls_fail_while_tracing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidProblem, match=message):
        jax.jit(lambda q: attention(q, KEY, V, **options))(Q)


def test_wrong_arrays() -> None:
    with pytest.raises(InvalidProblem, match="jax_enable_x64"):
        attention(*(np.asarray(x, np.float64) for x in (Q, KEY, V)))
    with pytest.raises(InvalidProblem, match="byte order"):
        attention(*(np.asarray(x, ">f4") for x in (Q, KEY, V)))
    with pytest.raises(InvalidProblem, match=r"expected a jax\.Array"):
        attention([1.0], KEY, V)
    with pytest.raises(InvalidProblem, match="expected one dtype"):
        attention(Q.astype(jnp.bfloat16), KEY, V)
    with pytest.raises(InvalidProblem, match="expected one of"):
        attention(*(x.astype(jnp.int32) for x in (Q, KEY, V)))
    with pytest.raises(UnknownBackend, match="Did you mean"):
        attention(Q, KEY, V, backend="jax_referense")
    with pytest.raises(Unsupported, match="takes arrays of torch"):
        attention(Q, KEY, V, backend="flex")


@pytest.mark.parametrize("shape", [("b", T, N, H), (B, "t", N, H)])
def test_symbolic_sizes_are_refused_in_words(shape: tuple[Any, ...]) -> None:
    from jax import export

    sizes = export.symbolic_shape(", ".join(map(str, shape)))
    query = jax.ShapeDtypeStruct(sizes, jnp.float32)
    with pytest.raises(InvalidProblem, match=r"of shape \(.*\), expected numbers: .* export with"):
        export.export(jax.jit(lambda q: attention(q, q, q, mask=Causal())))(query)


def test_tensors_of_torch_are_refused_with_what_to_call() -> None:
    torch = pytest.importorskip("torch")
    x = torch.zeros(1, 4, 2, 8)
    with pytest.raises(InvalidProblem, match=r"polyattn\.torch\.attention"):
        attention(x, x, x)


# Plans, explanations ----------------------------------------------------------------------------


def test_plans_take_shapes() -> None:
    step = plan(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (Q, KEY, V)), mask=Causal())
    np.testing.assert_allclose(step(Q, KEY, V), defined(Q, KEY, V, causal()), atol=2e-6)
    assert step.selection.backend == explain(Q, KEY, V, mask=Causal()).backend
    with pytest.raises(InvalidProblem, match="Did you mean 'mask'"):
        plan(Q, KEY, V, maks=Causal())


def test_empty_calls() -> None:
    none = jnp.zeros((B, 0, K, H))
    out, lse = attention(Q, none, none, return_lse=True, sinks=jnp.ones(N))
    assert not out.any() and np.allclose(lse, 1.0)
    out, lse = attention(Q, none, none, return_lse=True)
    assert not out.any() and np.all(np.asarray(lse) == -np.inf)
    assert attention(Q[:, :0], KEY, V).shape == (B, 0, N, H)


def test_dropout_follows_its_key() -> None:
    key = jax.random.key(7)
    one, two = (
        attention(Q, KEY, V, dropout_p=0.5, dropout_key=k) for k in (key, jax.random.key(8))
    )
    same = attention(Q, KEY, V, dropout_p=0.5, dropout_key=key)
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, two)
    many = jax.vmap(lambda k: attention(Q, KEY, V, dropout_p=0.25, dropout_key=k))
    mean = many(jax.random.split(key, 400)).mean(0)
    np.testing.assert_allclose(mean, attention(Q, KEY, V), atol=0.25)


@pytest.mark.parametrize("device", ["cuda", "rocm", "tpu"])
def test_a_device_that_is_not_here_can_be_asked_about(device: str) -> None:
    problem = polyattn.Problem(
        batch=1, q_len=4, kv_len=4, heads=1, kv_heads=1, head_dim=8, device=device, framework="jax"
    )
    with pytest.raises(Unsupported, match=f"no {device} device here"):
        explain(problem)

"""Our Pallas kernel: interpreted on the CPU, and lowered for machines that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    FirstKeys,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Problem,
    Segments,
    Unsupported,
    Window,
    settings,
)
from polyattn.jax import attention, explain
from polyattn.jax.kit.masking import Dims, allowed
from polyattn.jax.kit.pytrees import ensure_pytree
from polyattn.jax.kit.seen_ranges import ranges_of
from polyattn.selection.registry import registry

B, T, S, N, K, H = 2, 37, 50, 4, 2, 24
LINE = np.array([0, 1, 1, 2, 2, 2, 0, 3] * 7)
BITS = np.array([[[[0, 1, 0, 0], [3, 1, 0, 0], [2, 0, 0, 0]]]])
MASKS = {
    "none": None,
    "causal": Causal(),
    "top left": Causal("top_left") & Window(left=9),
    "window": Window(left=5, right=3),
    "lengths": Padding(q_lengths=[37, 20], kv_lengths=[50, 0]) & Causal(),
    "starts": LeftPadding(q_starts=[0, 20], kv_starts=[30, 0]) & Chunked(19),
    "first keys": FirstKeys(21) & Chunked(16) & Causal(),
    "prefix": PrefixLM([3, 40]),
    "segments": Segments(LINE[:T], LINE[:S]) & Causal(),
    "map": BlockMap(16, 16, BITS, np.array([[[2, 2, 1]]])) & Window(left=30),
}  # fmt: skip


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, KEY, V = draw(0, B, T, N, H), draw(1, B, S, K, H), draw(2, B, S, K, H + 8)
SINKS = draw(3, N, 2)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """CPUs run the kernel where this is asked for."""
    with settings.within({"POLYATTN_PALLAS_INTERPRET": "1"}):
        yield


def results(backend: str, mask: Any, dtype: Any = None, **options: Any) -> list[Any]:
    """Out, lse, and the gradients of query, key, value and sinks of something of both."""
    arrays = [x if dtype is None else x.astype(dtype) for x in (Q, KEY, V, SINKS)]

    @jax.jit
    def run(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        def call(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            return attention(
                q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend, **options
            )

        (out, lse), pull = jax.vjp(call, q, k, v, sinks)
        change = jnp.sin(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype)
        return out, lse, *pull((change, jnp.where(jnp.isfinite(lse), 0.1, 0.0)))

    return [np.asarray(x, np.float32) for x in run(*arrays)]


@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward_are_those_of_the_definition(name: str) -> None:
    options = {"softcap": 3.0} if name in ("none", "causal", "map") else {"scale": 0.3}
    found = results("pallas", MASKS[name], **options)
    wanted = results("jax_reference", MASKS[name], **options)
    for one, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, want, atol=3e-6, rtol=1e-5)


def test_half_precision() -> None:
    found = results("pallas", Causal(), jnp.bfloat16)
    for one, want in zip(found, results("jax_reference", Causal(), jnp.bfloat16), strict=True):
        np.testing.assert_allclose(one, want, atol=0.04, rtol=0.02)


def test_packed_sequences() -> None:
    mask = Packed([0, 5, 5, 37], [0, 20, 30, 50]) & Causal() & Padding(kv_lengths=[9, 4, 20])
    arrays = Q[0], KEY[0], V[0]
    out, lse = attention(*arrays, mask=mask, layout="packed", return_lse=True, backend="pallas")
    want = attention(*arrays, mask=mask, layout="packed", return_lse=True, backend="jax_reference")
    np.testing.assert_allclose(out, want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], atol=2e-6)


@pytest.mark.parametrize("config", [{"block_q": 16, "block_k": 16}, {"block_q": 64, "block_k": 32}])
def test_the_sizes_of_tiles_change_nothing(config: dict[str, int]) -> None:
    backend = registry["jax", "pallas"]
    problem = explain(Q, KEY, V, mask=MASKS["segments"], backend="pallas").problem
    ensure_pytree(MASKS["segments"])
    out = jax.jit(backend.load()(problem, config))(Q, KEY, V, MASKS["segments"])
    want = attention(Q, KEY, V, mask=MASKS["segments"], backend="pallas")
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_what_is_not_finite_reaches_the_rows_that_see_it() -> None:
    k = KEY.at[0, 30, 1, 2].set(-jnp.inf)
    v = V.at[1, 20, 0, 3].set(jnp.nan).at[1, 49].set(jnp.inf)
    for mask in (Causal(), None):
        out, lse = attention(Q, k, v, mask=mask, return_lse=True, backend="pallas")
        want = attention(Q, k, v, mask=mask, return_lse=True, backend="jax_reference")
        np.testing.assert_allclose(out, want[0], atol=2e-6)
        np.testing.assert_allclose(lse, want[1], atol=2e-6)
        bad = np.isnan(np.asarray(out)).any((2, 3))
        assert bad.any() and (mask is None or not bad.all())


@pytest.mark.parametrize("value", [3e38, np.nan])
def test_gradients_do_not_know_of_what_nobody_sees(value: float) -> None:
    hidden = KEY.at[:, 40:].set(value), V.at[:, 40:].set(value)

    def gradients(k: Any, v: Any) -> Any:
        def loss(q: Any, k: Any, v: Any) -> Any:
            mask = Padding(kv_lengths=jnp.array([40, 9]))
            return (attention(q, k, v, mask=mask, backend="pallas") ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(Q, k, v)

    for one, want in zip(gradients(*hidden), gradients(KEY, V), strict=True):
        np.testing.assert_allclose(one, want, atol=3e-6)


def test_gradients_of_sinks_are_not_those_of_rounded_outputs() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in (Q, KEY, V))

    def gradient(backend: str) -> Any:
        def loss(sinks: Any) -> Any:
            out = attention(q, k, v, sinks=sinks, backend=backend)
            return (out * jnp.sin(jnp.arange(out.size)).reshape(out.shape)).sum()

        return jax.jit(jax.grad(loss))(SINKS)

    np.testing.assert_allclose(gradient("pallas"), gradient("jax_reference"), rtol=1e-5, atol=1e-5)


def test_batched_by_vmap_with_traced_lengths() -> None:
    def one(q: Any, k: Any, v: Any, length: Any) -> Any:
        mask = Padding(kv_lengths=length[None])
        return attention(q[None], k[None], v[None], mask=mask, backend="pallas")[0]

    lengths = jnp.array([50, 13])
    out = jax.jit(jax.vmap(one))(Q, KEY, V, lengths)
    want = attention(Q, KEY, V, mask=Padding(kv_lengths=lengths), backend="jax_reference")
    np.testing.assert_allclose(out, want, atol=2e-6)


def test_grouped_heads_where_jax_has_64_bits() -> None:
    q, k = Q[:1, :16, :2], KEY[:1, :16, :1]
    want = attention(q, k, k, backend="jax_reference")
    with jax.enable_x64(True):
        out = attention(q, k, k, backend="pallas")
    np.testing.assert_allclose(out, want, atol=2e-6)


@pytest.mark.parametrize("name", MASKS)
def test_ranges_say_what_masks_say(name: str) -> None:
    if (mask := MASKS[name]) is None:
        mask = Window()
    mask = mask.map(lambda name, x: jnp.asarray(x))
    dims = Dims(B, N, K, T, S)
    ranges, keys = ranges_of(mask, dims), jnp.arange(S)
    seen = (keys >= ranges.start[..., None]) & (keys < ranges.stop[..., None])
    for q_ids, kv_ids in ranges.ids:
        seen = seen & (q_ids[..., None] == kv_ids[:, None])
    for one in ranges.maps:
        rows = jnp.arange(T)[:, None] // one.block_q
        seen = seen & one.bits[:, 0][:, rows, keys // one.block_k]
    whole = (B, T, S)
    want = jnp.broadcast_to(allowed(mask, dims), (B, N, T, S))[:, 0]
    np.testing.assert_array_equal(jnp.broadcast_to(seen, whole), want)


DEVICES = {"cuda": "cuda:sm_90", "rocm": "rocm", "tpu": "tpu"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("device", DEVICES)
def test_lowers_for_machines_that_are_not_here(device: str, dtype: str) -> None:
    """Triton and Mosaic take both passes: what they make of it, only such a machine can say."""
    mask = Causal() & Padding(kv_lengths=jnp.array([200, 256])) & Segments(jnp.arange(256) // 100)
    problem = Problem(
        batch=2, q_len=256, kv_len=256, heads=4, kv_heads=2, head_dim=64, dtype=dtype, softcap=20.0,
        device=DEVICES[device], framework="jax", lse=True, grad=True, layout="BNTH",
    )  # fmt: skip
    kernel = registry["jax", "pallas"].load()(problem, {})
    q, k = (jax.ShapeDtypeStruct((2, heads, 256, 64), dtype) for heads in (4, 2))

    def loss(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        out, lse = kernel(q, k, v, mask, None, sinks)
        return out.astype(jnp.float32).sum() + lse.sum()

    step = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(q, k, k, SINKS)
    text = step.lower(lowering_platforms=(device,)).as_text()
    target = "tpu_custom_call" if device == "tpu" else "triton"
    assert text.count(target) >= 6  # three kernels, each also for what is not finite


def test_refusals_say_why() -> None:
    with settings.within({"POLYATTN_PALLAS_INTERPRET": "0"}):
        refused = explain(Q, KEY, V).decisions["pallas"].reasons
    assert any("POLYATTN_PALLAS_INTERPRET" in str(reason) for reason in refused)
    for mask, word in (
        (Dense(jnp.ones((T, S), bool)), "Dense"),
        (Causal() | Padding(kv_lengths=jnp.array([3, 4])), "Or"),
        (BlockMap(8, 16, np.zeros((1, 1, 5, 4), int), np.ones((1, 1, 5), int)), "16"),
    ):
        with pytest.raises(Unsupported, match=word):
            attention(Q, KEY, V, mask=mask, backend="pallas")
    long = Problem(
        batch=1, q_len=1 << 16, kv_len=1 << 16, heads=8, kv_heads=8, head_dim=128,
        dtype="bfloat16", device="tpu", framework="jax",
    )  # fmt: skip
    assert any("MiB" in str(reason) for reason in registry["jax", "pallas"].extra(long))

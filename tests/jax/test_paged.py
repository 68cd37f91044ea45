"""``paged_attention`` and decoding: right over any pages, refused clearly, in compiled code too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from polyattn import (
    Alibi,
    Causal,
    Chunked,
    Dilated,
    FirstKeys,
    InvalidProblem,
    Padding,
    Segments,
    Unsupported,
    Window,
    record_selections,
    use_backend,
)
from polyattn.jax import AttentionMetadata, AttentionRegistry, attention, explain, paged_attention
from polyattn.selection.registry import registry

PAGES, PAGE, N, K, H = 12, 8, 4, 2, 16
TABLE = np.array([[0, 1, 2, 7], [3, 4, 99, 7], [5, 6, 8, 9]])
LENGTHS = np.array([27, 11, 32])
MASKS = (
    None, Causal(), Causal() & Window(left=7), Causal() | Window(left=0, right=2),
    Chunked(10) & Causal(), Causal() & (Window(left=3) | FirstKeys(2)), ~Dilated(3),
)  # fmt: skip


def draw(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


KEYS, VALUES = draw(0, PAGES, PAGE, K, H), draw(1, PAGES, PAGE, K, H + 8)
SINKS = draw(2, N, 2)


def alone(q: Any, b: int, **options: Any) -> tuple[Any, Any]:
    """What one sequence gives, its keys laid side by side."""
    k, v = (x[TABLE[b]].reshape(-1, K, x.shape[-1])[: LENGTHS[b]][None] for x in (KEYS, VALUES))
    return attention(q[b : b + 1], k, v, return_lse=True, backend="jax_reference", **options)


@pytest.mark.parametrize("name", ["jax_paged_decode", "jax_reference"])
@pytest.mark.parametrize("rows", [1, 5])
def test_each_sequence_as_if_it_were_alone(name: str, rows: int) -> None:
    q = draw(3, 3, rows, N, H)
    bad = VALUES.at[10].set(jnp.nan).at[7, 3:].set(jnp.inf)  # of no sequence
    for mask in MASKS:
        given = {"mask": mask, "softcap": 3.0, "scale": 0.3, "sinks": SINKS}
        run = jax.jit(lambda *x, g=given: paged_attention(*x, return_lse=True, backend=name, **g))
        out, lse = run(q, KEYS, bad, jnp.array(TABLE), jnp.array(LENGTHS))
        for b in range(3):
            want = alone(q, b, **given)
            np.testing.assert_allclose(out[b], want[0][0], atol=2e-6)
            np.testing.assert_allclose(lse[b], want[1][0], atol=2e-6)


def test_integers_of_numpy_are_taken() -> None:
    q = draw(3, 3, 1, N, H)
    want = paged_attention(q, KEYS, VALUES, jnp.array(TABLE), jnp.array(LENGTHS))
    for dtype in (np.int64, np.uint8):
        given = TABLE.astype(dtype), LENGTHS.astype(dtype)
        np.testing.assert_array_equal(paged_attention(q, KEYS, VALUES, *given), want)
    with pytest.raises(InvalidProblem, match="32 bits"):
        paged_attention(q, KEYS, VALUES, TABLE, LENGTHS + 2**40)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32"])
def test_any_integers_are_taken(dtype: str) -> None:
    q = draw(3, 3, 1, N, H)
    want = paged_attention(q, KEYS, VALUES, jnp.array(TABLE), jnp.array(LENGTHS))
    given = jnp.array(TABLE, dtype), jnp.array(LENGTHS, dtype)
    for call in (paged_attention, jax.jit(paged_attention)):
        np.testing.assert_allclose(call(q, KEYS, VALUES, *given), want, atol=2e-6)


def test_heads_before_rows_and_sequences_without_keys() -> None:
    q, table, lengths = draw(3, 3, 2, N, H), jnp.array(TABLE), jnp.array([27, 0, 32])
    want = paged_attention(q, KEYS, VALUES, table.at[1].set(-5), lengths, return_lse=True)
    assert not np.asarray(want[0][1]).any() and (np.asarray(want[1][1]) == -np.inf).all()
    turned = (x.swapaxes(1, 2) for x in (q, KEYS, VALUES))
    out, lse = paged_attention(*turned, table, lengths, layout="BNTH", return_lse=True)
    np.testing.assert_allclose(out.swapaxes(1, 2), want[0], atol=2e-6)
    np.testing.assert_allclose(lse, want[1], atol=2e-6)


def test_chosen_asked_for_and_refused_as_everywhere() -> None:
    q = draw(3, 3, 1, N, H)
    given = q, KEYS, VALUES, jnp.array(TABLE), jnp.array(LENGTHS)
    with record_selections() as ran, use_backend("jax_reference"):
        paged_attention(*given)
    assert [one.backend for one in ran] == ["jax_reference"]
    with record_selections() as ran:
        paged_attention(*given)
    assert ran[0].backend != "jax_reference" and ran[0].problem.paged == PAGE
    with pytest.raises(Unsupported, match="pages"):
        attention(q, q, q, backend="jax_paged_decode")
    with pytest.raises(Unsupported, match="paged"):
        paged_attention(*given, backend="jax_blockwise")


def test_only_the_definition_is_differentiated() -> None:
    given = KEYS, VALUES, jnp.array(TABLE), jnp.array(LENGTHS)
    q = draw(3, 3, 1, N, H)
    gradient = jax.jit(jax.grad(lambda q: (paged_attention(q, *given) ** 2).sum()))(q)
    want = jax.jit(jax.grad(lambda q: sum((alone(q, b)[0] ** 2).sum() for b in range(3))))(q)
    np.testing.assert_allclose(gradient, want, atol=2e-6)
    with pytest.raises(Unsupported, match="backward"):
        jax.grad(lambda q: paged_attention(q, *given, backend="jax_paged_decode").sum())(q)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": jnp.array([27, 33, 1])}, "0 to 32"),
        ({"lengths": jnp.array([27, -1, 1])}, "-1"),
        ({"lengths": jnp.array([27, 20, 1])}, "99"),
        ({"lengths": jnp.array([27.0, 1, 1])}, "integers"),
        ({"lengths": jnp.array([27, 1])}, "lengths"),
        ({"block_table": jnp.zeros(4, jnp.int32)}, "block table"),
        ({"block_table": TABLE.tolist()}, r"expected a jax\.Array"),
        ({"mask": Padding(kv_lengths=jnp.array([1, 2, 3]))}, "masks of positions"),
        ({"mask": Causal("top_left")}, "bottom_right"),
        ({"layout": "packed"}, "BTNH"),
        ({"value_pages": VALUES[:3]}, "pages"),
    ],
)
def test_wrong_calls_are_refused(change: dict[str, Any], message: str) -> None:
    given = {
        "query": draw(3, 3, 1, N, H), "key_pages": KEYS, "value_pages": VALUES,
        "block_table": jnp.array(TABLE), "lengths": jnp.array(LENGTHS),
    }  # fmt: skip
    with pytest.raises(InvalidProblem, match=message):
        paged_attention(**{**given, **change})


def test_the_operator() -> None:
    q = draw(3, 3, 1, N, H)
    impl = AttentionRegistry.create("paged_attention", AttentionMetadata(softmax_scale=0.3))
    found = impl(q, KEYS, VALUES, jnp.array(TABLE), jnp.array(LENGTHS), return_lse=True)
    for b in range(3):
        want = alone(q, b, scale=0.3)
        np.testing.assert_allclose(found.attention_outputs[b], want[0][0], atol=2e-6)
        np.testing.assert_allclose(found.lse[b], want[1][0], atol=2e-6)
    assert impl.get_requirements()["cache"]


# Decoding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_queries_over_a_cache(rows: int, dtype: str) -> None:
    q = draw(4, 2, rows, N, H).astype(dtype)
    k, v = draw(5, 2, 300, K, H).astype(dtype), draw(6, 2, 300, K, H).astype(dtype)
    v = v.at[:, 250:].set(jnp.nan)
    masks = (
        Padding(kv_lengths=jnp.array([240, 3])),
        Causal() & Window(left=100) & Padding(kv_lengths=jnp.array([250, 0])),
        Segments(jnp.zeros(rows, jnp.int32), jnp.arange(300) // 200) & Padding(kv_lengths=[200, 9]),
    )
    for mask in masks:
        given = {"mask": mask, "sinks": SINKS, "bias": Alibi(jnp.arange(N) / 8), "softcap": 5.0}
        out, lse = attention(q, k, v, return_lse=True, backend="jax_decode", **given)
        want = attention(q, k, v, return_lse=True, backend="jax_reference", **given)
        close = {"atol": 2e-6} if dtype == "float32" else {"atol": 0.02, "rtol": 0.02}
        np.testing.assert_allclose(out.astype("float32"), want[0].astype("float32"), **close)
        np.testing.assert_allclose(lse, want[1], atol=2e-6)


def test_blocks_of_keys_are_joined() -> None:
    q, k = draw(4, 1, 1, N, H), draw(5, 1, 300, K, H)
    problem = explain(q, k, k, mask=Causal(), backend="jax_decode").problem
    kernel = registry["jax", "jax_decode"].load()(problem, {"block_k": 64})
    want = attention(q, k, k, mask=Causal(), backend="jax_reference")
    np.testing.assert_allclose(jax.jit(kernel)(q, k, k, Causal()), want, atol=2e-6)


def test_many_queries_are_right_too() -> None:
    q = draw(4, 1, 40, N, H)
    want = attention(q, q, q, mask=Causal(), backend="jax_reference")
    np.testing.assert_allclose(
        attention(q, q, q, mask=Causal(), backend="jax_decode"), want, atol=2e-6
    )

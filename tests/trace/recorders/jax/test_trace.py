"""The JAX tap: its numbers are NumPy's, and it records under every transformation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
if not hasattr(jax, "make_user_context"):
    pytest.skip("this JAX has no make_user_context", allow_module_level=True)

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from polyattn.errors import TraceError
from polyattn.trace import read
from polyattn.trace.recorders.jax import JaxTrace, native_taps, tap, trace
from polyattn.trace.recorders.jax.active_trace import Tapped
from polyattn.trace.recorders.jax.host_statistics import WORDS, ready
from polyattn.trace.recorders.jax.sign_words import sign_words
from polyattn.trace.statistics import statistics
from polyattn.trace.statistics.schema import COUNTS, DEFAULT_STATISTICS, MOMENTS
from polyattn.trace.statistics.sketch import decode, splitmix64

RNG = np.random.default_rng(0)
NORMAL = RNG.standard_normal((7, 33, 65))
BAD = np.array([np.nan, np.inf, -np.inf, 0.0, 3.0, -4.0], np.float32)


def scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (tap(2 * c, "s"), None), x, None, length=3)[0].sum()


def loss(x: Any) -> Any:
    return (tap(jnp.sin(x), "a") ** 2).sum()


def records(path: Path, run: Callable[[], Any], **options: Any) -> Any:
    with trace(path, **options):
        run()
    return read(path).records


@pytest.fixture(params=["native", "xla"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By the native kernel, as on CPUs, and by XLA, as on other devices."""
    if request.param == "xla":
        for module in (sys.modules[tap.__module__], native_taps):
            monkeypatch.setattr(module, "ready", lambda dtype: False)
    else:
        pytest.importorskip("polyattn._native")
        assert ready(np.float32) and ready(ml_dtypes.bfloat16) and native_taps.works()
        assert not ready(np.uint32) and not ready(np.complex64)
    return str(request.param)


@pytest.mark.parametrize(
    "value",
    [
        NORMAL.astype(np.float32), NORMAL.astype(ml_dtypes.bfloat16), NORMAL.astype(np.float16),
        (1000 + NORMAL).astype(np.float32), (NORMAL * 1e37).astype(np.float32), BAD,
        RNG.integers(-(2**31), 2**31, 5000).astype(np.int32), np.float32(3).reshape(()),
        RNG.integers(0, 2**32, 5000).astype(np.uint32), np.full(3, np.nan, np.float32),
        RNG.integers(-128, 128, 70).astype(np.int8), NORMAL > 0, np.zeros((3, 0), np.float32),
        (NORMAL + 1j * NORMAL[::-1]).astype(np.complex64), np.zeros(100, np.float32),
    ],
    ids=lambda value: f"{value.dtype.name}{value.shape}",
)  # fmt: skip
def test_the_numbers_under_jit_are_those_of_numpy(tmp_path: Path, value: Any, way: str) -> None:
    (found,) = records(tmp_path / "a", lambda: jax.jit(lambda x: tap(x, "m"))(value))
    expected = statistics(value)
    for name in COUNTS:
        assert getattr(found, name) == expected[name]
    assert (list(found.shape), found.dtype) == (expected["shape"], expected["dtype"])
    for one, other in zip(found.samples, expected["samples"], strict=True):
        assert one == (other if other is None else pytest.approx(other, rel=1e-8))
    for name in set(MOMENTS) & set(DEFAULT_STATISTICS) - {"mean"}:
        number = expected[name]
        near = number if number is None else pytest.approx(number, rel=1e-7, abs=0)
        assert getattr(found, name) == near
    if expected["mean"] is not None:
        assert abs(found.mean - expected["mean"]) <= 1e-7 * expected["abs_mean"]
    sketch = decode(expected["sketch"])
    assert np.abs(found.buckets() - sketch).max() <= 3e-7 * np.abs(sketch).max()


def test_sign_words_are_splitmix64() -> None:
    low, high = map(np.asarray, sign_words(5000))
    words = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    assert np.array_equal(words, splitmix64(np.arange(5000, dtype=np.uint64)))


def test_float64_and_int64_with_x64(tmp_path: Path, way: str) -> None:
    with jax.enable_x64(True):
        for name, value in (("f", NORMAL * 1e300), ("i", RNG.integers(-(2**62), 2**62, 999))):
            (found,) = records(tmp_path / name, lambda x=value: jax.jit(lambda x: tap(x, "m"))(x))
            expected = statistics(value)
            assert found.dtype == value.dtype.name
            assert (found.l2, found.std) == pytest.approx((expected["l2"], expected["std"]), 1e-14)
            assert np.allclose(found.buckets(), decode(expected["sketch"]), rtol=1e-7)


@pytest.mark.parametrize(
    ("run", "calls"),
    [
        (loss, 1), (jax.jit(loss), 1), (jax.grad(loss), 1), (jax.grad(jax.jit(loss)), 1),
        (jax.jit(jax.grad(loss)), 1), (jax.jit(scan), 3), (jax.jit(jax.grad(scan)), 3),
        (jax.vmap(loss), 1), (jax.jit(jax.vmap(scan)), 3), (jax.jit(jax.vmap(jax.grad(loss))), 1),
        (jax.jit(jax.vmap(jax.vmap(loss))), 1), (lambda x: jax.jvp(loss, (x,), (x,)), 1),
        (jax.checkpoint(loss), 1), (jax.jit(jax.checkpoint(scan)), 3),
        (lambda x: jax.linearize(loss, x)[0], 1), (jax.jit(jax.jacfwd(loss)), 1),
        (jax.vmap(lambda x: tap(x - lax.pmean(x, "b"), "c"), axis_name="b"), 1),
        (jax.jit(lambda x: lax.switch(1, [jnp.sin, lambda y: tap(y, "w")], x)), 1),
        (jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: tap(c + i, "f"), x)), 3),
        (jax.jit(lambda x: lax.cond(x.sum() > 0, lambda y: tap(y, "t"), lambda y: y, x)), 1),
        (jax.jit(lambda x: lax.while_loop(lambda c: c.sum() < 100,
                                          lambda c: tap(2 * c, "w"), x)), 4),
    ],
)  # fmt: skip
def test_transformations(tmp_path: Path, run: Callable[[Any], Any], calls: int, way: str) -> None:
    x = jnp.ones((3, 4))
    without = jax.tree.map(np.asarray, run(x))
    with trace(tmp_path / "a"):
        within = run(x)
    found = read(tmp_path / "a").records
    assert [r.call for r in found] == list(range(calls))
    assert all(r.shape == (3, 4) for r in found)
    jax.tree.map(np.testing.assert_array_equal, without, within)


def test_statistics_of_xla_under_transformations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[tap.__module__], "ready", lambda dtype: False)

    def once(x: Any) -> Any:
        return lax.scan(lambda c, _: (tap(2 * c, "s"), None), x, None, length=2)[0].sum()

    with trace(tmp_path / "a"):
        jax.jit(jax.vmap(jax.grad(once)))(jnp.ones((3, 4)))
        jax.jvp(once, (jnp.ones(2),), (jnp.ones(2),))
    found = read(tmp_path / "a").records
    assert [(r.shape, r.mean) for r in found] == [
        ((3, 4), 2.0),
        ((3, 4), 4.0),
        ((2,), 2.0),
        ((2,), 4.0),
    ]


def test_a_compiled_function_is_never_run_without_its_taps_nor_with_them_later(
    tmp_path: Path,
) -> None:
    compiled = 0

    def model(x: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return tap(x + 1, "m")

    run = jax.jit(model)
    x = jnp.ones(3)
    assert "callback" not in run.lower(x).as_text()
    run(x)
    first = records(tmp_path / "a", lambda: run(x))
    run(x)
    second = records(tmp_path / "b", lambda: (run(x), run(x)))
    assert (len(first), len(second)) == (1, 2)
    assert compiled == 2  # with taps, and without: the second trace takes the first one's


def test_gradients_match_and_are_recorded(tmp_path: Path) -> None:
    x = jnp.arange(6.0)
    expected = 3 * jnp.cos(x) * jnp.sin(x) ** 2

    def cubed(x: Any) -> Any:
        return (tap(jnp.sin(x), "a") ** 3).sum()

    with trace(tmp_path / "a", gradients=True):
        assert np.allclose(jax.jit(jax.grad(cubed))(x), expected)
    out, grad = read(tmp_path / "a").records
    assert (out.phase, grad.phase, grad.tensor) == ("out", "grad_out", "out")
    assert grad.l1 == pytest.approx(float(jnp.abs(3 * jnp.sin(x) ** 2).sum()), rel=1e-6)


def test_steps_layers_pytrees_and_header(tmp_path: Path) -> None:
    @jax.jit
    def model(x: Any) -> Any:
        tap({"x": x, "rest": (x, None)}, "blocks.0", "in", tensor="kwargs", cls="Block")
        return tap(tap(x, "blocks.1"), "head")

    params = {"blocks": [{"w": jnp.ones((2, 2))}], "b": jnp.ones(2, jnp.bfloat16)}
    options = {"params": params, "layers": r"^blocks", "steps": {1, 3}, "seed": 7}
    with trace(tmp_path / "a", **options) as run:
        for index in range(4):
            with run.step(index):
                model(index * jnp.ones(4))
    found = read(tmp_path / "a")
    assert [(r.module, r.tensor, r.step, r.mean) for r in found.records if r.step == 3] == [
        ("blocks.0", "kwargs.rest[0]", 3, 3.0),
        ("blocks.0", "kwargs.x", 3, 3.0),
        ("blocks.1", "out", 3, 3.0),
    ]
    assert {r.step for r in found.records} == {1, 3}
    assert found.header.weights.keys() == {"blocks.0.w", "b"}
    assert found.header.dtypes == {"float32": 1, "bfloat16": 1}
    assert (found.header.framework, found.header.seed, found.ended) == ("jax", 7, True)


def test_what_cannot_be_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="regular expression"):
        trace(tmp_path / "a", layers="(")
    with pytest.raises(TraceError, match="no header has"):
        trace(tmp_path / "a", colour="red")
    with pytest.warns(RuntimeWarning, match="no record"), trace(tmp_path / "b"):
        pass
    with pytest.raises(TraceError, match="expected numbers"), trace(tmp_path / "c"):
        tap(jax.random.key(0), "m")
    with pytest.raises(TraceError, match="at most 4096"), trace(tmp_path / "n"):
        tap({"k" * 5000: jnp.ones(2)}, "a")
    with pytest.raises(TraceError, match="a phase of"), trace(tmp_path / "d"):
        tap(jnp.ones(3), "m", "grad_out")
    with pytest.raises(ZeroDivisionError), trace(tmp_path / "e") as run:
        tap(jnp.ones(3), "m")
        raise ZeroDivisionError
    assert len(read(tmp_path / "e").records) == 1
    with pytest.raises(TraceError, match="a second time"), run:
        pass
    assert tap(3, "m") == 3


def test_nested_traces_have_their_own_records(tmp_path: Path) -> None:
    run = jax.jit(lambda x: tap(x, "m"))
    with trace(tmp_path / "a"):
        run(jnp.ones(1))
        with trace(tmp_path / "b"):
            run(jnp.zeros(1))
        run(jnp.full(1, 2.0))
    assert [r.mean for r in read(tmp_path / "a").records] == [1.0, 2.0]
    assert [r.mean for r in read(tmp_path / "b").records] == [0.0]


def test_rematerialised_taps_record_what_is_run_again(tmp_path: Path) -> None:
    x = jnp.arange(4.0)
    for number, run in enumerate((jax.checkpoint(loss), jax.jit(jax.checkpoint(loss)))):
        with trace(tmp_path / str(number)):
            gradient = jax.grad(run)(x)
        found = read(tmp_path / str(number)).records
        assert {r.module for r in found} == {"a"} and 1 <= len(found) <= 2
        assert len({r.l2 for r in found}) == 1
        np.testing.assert_allclose(gradient, jax.grad(loss)(x), rtol=1e-6)


def test_what_the_kernel_cannot_read_ends_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from polyattn.trace.recorders.jax import host_statistics

    if not ready(np.float32):
        pytest.skip("the native kernel does not read JAX's arrays here")

    def fails(*_: Any) -> None:
        raise MemoryError("none left")

    monkeypatch.setattr(sys.modules[tap.__module__], "told_by_native_code", lambda *_: False)
    run = jax.jit(lambda x: tap(x, "m") + 1)
    with pytest.raises(TraceError, match=r"a record .* was lost"), trace(tmp_path / "a"):
        monkeypatch.setattr(host_statistics, "_measure", fails)
        assert run(jnp.ones(3)).tolist() == [2.0] * 3
        monkeypatch.undo()
        run(jnp.ones(3))


def test_a_trace_from_many_threads_callbacks_loses_nothing(tmp_path: Path) -> None:
    @jax.jit
    def run(x: Any) -> Any:
        return lax.scan(lambda c, _: (tap(c + 1, "s"), None), x, None, length=500)[0]

    with trace(tmp_path / "a"):
        run(jnp.zeros(2))
    assert [r.max for r in read(tmp_path / "a").records] == [float(n) for n in range(1, 501)]


def by_callbacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[tap.__module__], "told_by_native_code", lambda *_: False)


def everything(x: Any) -> Any:
    """Taps of many dtypes, in a loop, a branch and a call that is computed again."""
    x = lax.fori_loop(0, 5, lambda i, c: tap(c * 1.5 + i, "loop", "in"), x)
    x = lax.cond(x.sum() > 0, lambda c: tap(-c, "yes"), lambda c: tap(c, "no"), x)
    for dtype in (jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.bool_, jnp.uint32):
        tap((x.astype(dtype), x[:0].astype(dtype)), f"of {jnp.dtype(dtype).name}", cls="\u00e9")
    tap(jnp.asarray([jnp.nan, jnp.inf, 0.0, 1e-30]), "bad")
    tap(jnp.full((3, 4), 1e38), "large")
    return jax.checkpoint(lambda c: tap(jnp.sin(c), "sin", tensor="out[0]"))(x)


@pytest.mark.parametrize("ordered", [True, False])
def test_native_taps_record_what_callbacks_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    if not native_taps.works():
        pytest.skip("taps are callbacks here")
    x = jnp.linspace(-1, 2, 35).reshape(5, 7)
    found = []
    for number in range(3):  # native taps, callbacks, and records made by Python
        with trace(tmp_path / str(number), seed=0, ordered=ordered) as run:
            for step in range(2):
                with run.step(step):
                    jax.jit(everything)(x)
        found.append((tmp_path / str(number)).read_text().splitlines()[1:])
        by_callbacks(monkeypatch)
        if number == 1:
            monkeypatch.setattr(sys.modules[JaxTrace.__module__], "is_row", lambda numbers: False)
        jax.clear_caches()
    assert len(found[0]) == 2 * (5 + 1 + 12 + 2 + 1) + 1
    assert found[0] == found[1] == found[2]


def test_a_compiled_program_from_the_cache_of_another_process_tells_the_right_places(
    tmp_path: Path,
) -> None:
    """The second process taps other modules first, so its places have other numbers."""
    program = """
import sys
import jax, jax.numpy as jnp
from polyattn.jax.trace import tap, trace
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
with trace(sys.argv[2]):
    for name in sys.argv[3:]:
        jax.jit(lambda x: tap(x * 2, name))(jnp.ones(3))
"""
    for number, names in enumerate((["a", "b"], ["b", "c", "a"])):
        path = tmp_path / f"{number}.jsonl"
        command = [sys.executable, "-c", program, str(tmp_path / "cache"), str(path), *names]
        subprocess.run(command, check=True)
        assert [r.module for r in read(path).records] == names


def test_a_tensor_that_native_code_could_not_read_is_a_lost_record(tmp_path: Path) -> None:
    if not native_taps.works():
        pytest.skip("taps are callbacks here")
    tapped = Tapped("m", "out", "out", "", (3,), jnp.dtype(jnp.float32), 0)
    with pytest.raises(TraceError, match=r"a record .* was lost"), trace(tmp_path / "a") as run:
        run._taps.tell(native_taps.place_of(tapped), -1, np.full(WORDS // 2, np.nan).tobytes())


def test_more_taps_than_may_wait_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[JaxTrace.__module__], "_MOST", 3)
    run = jax.jit(lambda x: lax.fori_loop(0, 500, lambda _, c: tap(c + 1, "s"), x))
    with trace(tmp_path / "a"):
        run(jnp.zeros(2))
    assert [r.max for r in read(tmp_path / "a").records] == [float(n) for n in range(1, 501)]

"""``tapped``: models of flax and equinox are recorded as if their code had taps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy
if not hasattr(jax, "make_user_context"):
    pytest.skip("this JAX has no make_user_context", allow_module_level=True)

from polyattn.errors import TraceError
from polyattn.jax.trace import tapped, trace
from polyattn.trace import read

X = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4)), jnp.float32)


def records(path: Path) -> list[tuple[Any, ...]]:
    return [(r.module, r.phase, r.tensor, r.cls, round(r.mean, 5)) for r in read(path).records]


def check(found: list[tuple[Any, ...]], first: Any, between: Any, last: Any) -> None:
    """The model is two Linear modules, up and blocks.0, with a relu between them."""
    linear = [one for one in found if one[0]]
    means = [round(float(x.mean()), 5) for x in (X, first, between, last)]
    names = [one[0].replace("_", ".") for one in linear]
    assert names == ["up", "up", "blocks.0", "blocks.0"]
    assert [one[1:3] for one in linear] == [("in", "args[0]"), ("out", "out")] * 2
    assert {one[3] for one in linear} <= {"Linear", "Dense"}
    np.testing.assert_allclose([one[4] for one in linear], means, atol=2e-5)
    whole = [one for one in found if not one[0]]
    assert [one[1] for one in whole] == ["in", "out"]
    np.testing.assert_allclose([one[4] for one in whole], [means[0], means[3]], atol=2e-5)


def of_linen() -> tuple[Any, Callable[..., Any], tuple[Any, Any]]:
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any, scale: Any = 1.0) -> Any:
            x = jax.nn.relu(nn.Dense(4, name="up")(x))
            return nn.Dense(4, name="blocks_0")(x) * scale

    model = Model()
    params = model.init(jax.random.key(0), X)
    weights = [params["params"][name] for name in ("up", "blocks_0")]
    pairs = [(one["kernel"], one["bias"]) for one in weights]
    return model, lambda model, x: model.apply(params, x), tuple(pairs)


def of_nnx() -> tuple[Any, Callable[..., Any], tuple[Any, Any]]:
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(4, 4, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs)])

        def __call__(self, x: Any) -> Any:
            return self.blocks[0](jax.nn.relu(self.up(x)))

    model = Model(nnx.Rngs(0))
    pairs = [(one.kernel[...], one.bias[...]) for one in (model.up, model.blocks[0])]
    return model, nnx.jit(lambda model, x: model(x)), tuple(pairs)


def of_equinox() -> tuple[Any, Callable[..., Any], tuple[Any, Any]]:
    eqx = pytest.importorskip("equinox")

    class Model(eqx.Module):
        up: Any
        blocks: list[Any]

        def __init__(self, key: Any) -> None:
            first, second = jax.random.split(key)
            self.up = eqx.nn.Linear(4, 4, key=first)
            self.blocks = [eqx.nn.Linear(4, 4, key=second)]

        def __call__(self, x: Any) -> Any:
            assert self.up.weight.shape == (4, 4)  # attributes of modules are handed on
            return jax.vmap(self.blocks[0])(jax.nn.relu(jax.vmap(self.up)(x)))

    model = Model(jax.random.key(0))
    pairs = [(one.weight.T, one.bias) for one in (model.up, model.blocks[0])]
    return model, eqx.filter_jit(lambda model, x: model(x)), tuple(pairs)


@pytest.mark.parametrize("made", [of_linen, of_nnx, of_equinox])
def test_every_module_is_recorded_by_its_path(made: Any, tmp_path: Path) -> None:
    model, call, ((w1, b1), (w2, b2)) = made()
    first = X @ w1 + b1
    between = jax.nn.relu(first)
    last = between @ w2 + b2
    plain = call(model, X)
    with trace(tmp_path / "a.jsonl"), tapped(model) as whole:
        out = call(whole, X)
    np.testing.assert_allclose(out, plain, atol=1e-6)
    check(records(tmp_path / "a.jsonl"), first, between, last)
    with tapped(model) as whole, trace(tmp_path / "b.jsonl"):  # the other way round
        call(whole, X)
    assert records(tmp_path / "b.jsonl") == records(tmp_path / "a.jsonl")
    with pytest.warns(RuntimeWarning, match="no record"), trace(tmp_path / "c.jsonl"):
        np.testing.assert_allclose(call(model, X), plain, atol=1e-6)  # nothing is left


def test_stateful_layers_of_equinox_are_called_as_such(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")
    key = jax.random.key(0)

    def made() -> Any:
        norms = [eqx.nn.BatchNorm(4, "batch", mode="batch") for _ in range(2)]
        inner = eqx.nn.Sequential([norms[1], eqx.nn.Lambda(jax.nn.relu)])
        return eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=key), norms[0], inner])

    def call(model: Any, state: Any) -> Any:
        mapped = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        return mapped(X, state)

    model, state = eqx.nn.make_with_state(made)()
    plain = call(model, state)
    with trace(tmp_path / "a.jsonl"), tapped(model) as whole:
        found = eqx.filter_jit(call)(whole, state)
        assert isinstance(whole.layers[0], eqx.nn.Linear) and repr(whole) == repr(model)
    jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, plain)
    ends = [(r.module, r.cls) for r in read(tmp_path / "a.jsonl").records if r.tensor == "out[0]"]
    assert ends == [
        ("layers.1", "BatchNorm"), ("layers.2.layers.0", "BatchNorm"), ("layers.2", "Sequential"),
        ("", "Sequential"),
    ]  # fmt: skip


def test_what_is_tapped_twice_is_recorded_once(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))
    with trace(tmp_path / "a.jsonl"), tapped(model) as once, tapped(once) as twice:
        twice(X[0])
    names = [r.module for r in read(tmp_path / "a.jsonl").records if r.phase == "out"]
    assert [one for one in names if one.startswith("layers")] == ["layers.0", "layers.1"]


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="flax is not installed")
def test_keyword_arguments_and_gradients(tmp_path: Path) -> None:
    model, _, _ = of_linen()
    params = model.init(jax.random.key(0), X)

    def loss(params: Any) -> Any:
        return (model.apply(params, X, scale=jnp.ones(4)) ** 2).sum()

    plain = jax.grad(loss)(params)
    with trace(tmp_path / "a.jsonl", gradients=True), tapped(model):
        found = jax.jit(jax.grad(loss))(params)
    jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, plain)
    said = {(r.module, r.phase, r.tensor) for r in read(tmp_path / "a.jsonl").records}
    assert {("", "in", "kwargs.scale"), ("up", "grad_out", "out")} <= said


def test_other_models_are_refused() -> None:
    with pytest.raises(TraceError, match=r"flax\.linen, flax\.nnx or equinox"), tapped(object()):
        pass


def test_the_weights_of_a_model_of_equinox(tmp_path: Path) -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(4, 4, 8, 1, key=jax.random.key(0))  # its activation is a leaf, too
    with pytest.warns(RuntimeWarning, match="no record"), trace(tmp_path / "a.jsonl", params=model):
        pass
    header = read(tmp_path / "a.jsonl").header
    names = [f"layers.{at}.{name}" for at in range(2) for name in ("weight", "bias")]
    assert list(header.weights) == names and header.dtypes == {"float32": 4}
    assert header.weights["layers.0.weight"]["shape"] == [8, 4]


def test_leaves_of_params_that_are_no_arrays_of_numbers(tmp_path: Path) -> None:
    others = {"key": jax.random.key(0), "scale": 1.0, "f": jax.nn.relu, "text": np.array(["a"])}
    params = {"w": X, "half": np.ones(3, np.float16), **others}
    with pytest.warns(RuntimeWarning, match="no record"), trace(tmp_path / "a", params=params):
        pass
    assert set(read(tmp_path / "a").header.weights) == {"w", "half"}

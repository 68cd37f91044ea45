"""A port to JAX is compared with its torch original: a small Llama of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if not hasattr(jax, "make_user_context"):
    pytest.skip("this JAX has no make_user_context", allow_module_level=True)

import jax.numpy as jnp
import numpy as np

from polyattn.hooks import trace as torch_trace
from polyattn.trace import read
from polyattn.trace.compare import compare
from polyattn.trace.recorders.jax import tap, trace
from polyattn.trace.statistics.schema import STATISTICS

HEADS, WIDTH, EPS = 4, 16, 1e-6
RULES = {
    r"^model\.layers\.(\d+)": r"blocks.\1", r"\.self_attn": ".attn", r"\.input_layernorm": ".norm1",
    r"\.post_attention_layernorm": ".norm2", r"([qkvo])_proj": r"\1", r"^model\.norm": "norm",
    r"^model\.embed_tokens": "embed", "lm_head": "head",
}  # fmt: skip


def linear(w: dict[str, Any], x: Any, name: str) -> Any:
    return tap(tap(x, name, "in") @ w[name + ".weight"].T, name, cls="Linear")


def norm(w: dict[str, Any], x: Any, name: str) -> Any:
    x = tap(x, name, "in")
    scaled = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + EPS)
    return tap(scaled * w[name + ".weight"], name, cls="RMSNorm")


def rotate(x: Any, wrong: bool) -> Any:
    half = WIDTH // 2
    angle = jnp.arange(x.shape[2])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if wrong:  # pairs of neighbours instead of halves
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(w: dict[str, Any], x: Any, name: str, bug: str) -> Any:
    size = x.shape[1]
    q, k, v = (
        linear(w, x, f"{name}.{one}").reshape(1, size, HEADS, WIDTH).swapaxes(1, 2) for one in "qkv"
    )
    q, k = rotate(q, bug == "rotary"), rotate(k, bug == "rotary")
    scores = q @ k.swapaxes(2, 3) * (1.0 if bug == "scale" else WIDTH**-0.5)
    weights = jax.nn.softmax(jnp.where(jnp.tri(size, dtype=bool), scores, -jnp.inf), -1)
    out = (weights @ v).swapaxes(1, 2).reshape(x.shape)
    return tap(linear(w, out, name + ".o"), name, cls="Attention", tensor="out[0]")


def forward(w: dict[str, Any], ids: Any, bug: str = "", at: int = 1) -> Any:
    x = tap(w["embed.weight"][tap(ids, "embed", "in")], "embed")
    for i in range(2):
        name = f"blocks.{i}"
        tap(x, name, "in")
        seeded = bug if i == at else ""
        x = x + attention(w, norm(w, x, name + ".norm1"), name + ".attn", seeded)
        y = tap(norm(w, x, name + ".norm2"), name + ".mlp", "in")
        gate, up = (linear(w, y, f"{name}.mlp.{one}_proj") for one in ("gate", "up"))
        act = jax.nn.gelu if seeded == "activation" else jax.nn.silu
        y = tap(linear(w, act(gate) * up, name + ".mlp.down_proj"), name + ".mlp", cls="MLP")
        x = tap(x + y, name)
    return linear(w, norm(w, x, "norm"), "head")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], Any]:
    import re

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, rms_norm_eps=EPS,
        initializer_range=0.2, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 128, (1, 24))
    path = tmp_path_factory.mktemp("torch") / "torch.jsonl"
    with torch.no_grad(), torch_trace(model, path):
        model(input_ids=ids)
    weights = {}
    for name, value in model.state_dict().items():
        for pattern, to in RULES.items():
            name = re.sub(pattern, to, name)
        weights[name] = jnp.asarray(value.numpy())
    return path, weights, jnp.asarray(ids.numpy().astype(np.int32))


def verdict(reference: Any, tmp_path: Path, bug: str, rules: Any) -> Any:
    path, weights, ids = reference
    with trace(tmp_path / "jax.jsonl", params=weights):
        jax.jit(forward, static_argnums=(2,))(weights, ids, bug)
    return compare(path, tmp_path / "jax.jsonl", rules=rules)


@pytest.mark.parametrize("rules", [RULES, None], ids=["rules", "fingerprints"])
def test_a_clean_port_is_equal(reference: Any, tmp_path: Path, rules: Any) -> None:
    found = verdict(reference, tmp_path, "", rules)
    assert found.equal is True, str(found)


@pytest.mark.parametrize("rules", [RULES, None], ids=["rules", "fingerprints"])
@pytest.mark.parametrize("bug", ["rotary", "scale", "activation"])
def test_the_culprit_is_named(reference: Any, tmp_path: Path, bug: str, rules: Any) -> None:
    found = verdict(reference, tmp_path, bug, rules)
    expected = "blocks.1.mlp" if bug == "activation" else "blocks.1.attn"
    assert found.equal is False and found.culprit is not None, str(found)
    assert found.culprit.module.startswith(expected), str(found)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_the_numbers_are_those_of_a_torch_trace_to_the_last_bit(tmp_path: Path, dtype: str) -> None:
    from polyattn.trace.recorders.jax.host_statistics import ready

    if not ready(np.float32):
        pytest.skip("the native kernel does not read JAX's arrays here")
    values = np.random.default_rng(0).standard_normal((3, 700, 33)).astype(np.float32) * 9
    given = torch.from_numpy(values).to(getattr(torch, dtype))
    with torch_trace(torch.nn.Identity(), tmp_path / "torch") as run:
        run.model(given)
    with trace(tmp_path / "jax"):
        jax.jit(lambda x: tap(x, "", "in"))(jnp.asarray(values).astype(dtype))
    one, other = (read(tmp_path / name).records[0] for name in ("torch", "jax"))
    assert {name: getattr(one, name) for name in STATISTICS} == {
        name: getattr(other, name) for name in STATISTICS
    }

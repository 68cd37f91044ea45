"""diffusers' dispatcher with polyattn as one of its backends: the same as native, and undone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("diffusers")

import torch
from diffusers import FluxTransformer2DModel
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from torch import Tensor

from polyattn import InvalidProblem, Unsupported, record_selections, use_backend
from polyattn.integrations import diffusers as integration
from polyattn.integrations.diffusers import dispatcher, library


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    integration.register()
    yield
    integration.unregister()


def _state() -> tuple[Any, ...]:
    registry, names = attention_dispatch._AttentionBackendRegistry, library.library().names
    return (
        list(names),
        dict(registry._backends),
        {name: set(known) for name, known in registry._supported_arg_names.items()},
        set(registry._supports_context_parallel),
        registry._active_backend,
    )


def test_registering_twice_is_once_and_unregistering_restores_all() -> None:
    integration.unregister()
    before = _state()
    integration.register()
    integration.register()
    assert integration.is_registered() and len(_state()[0]) == len(before[0]) + 1
    integration.unregister()
    integration.unregister()
    assert _state() == before and not integration.is_registered()
    with pytest.raises(ValueError, match="polyattn"):
        library.library().names("polyattn")


def test_the_active_backend_falls_back_to_native() -> None:
    registry, names = attention_dispatch._AttentionBackendRegistry, library.library().names
    registry.set_active_backend(names("polyattn"))
    integration.unregister()
    assert registry._active_backend is names("native")


def test_it_waits_for_diffusers_to_be_imported() -> None:
    program = (
        "import sys; from polyattn.integrations.diffusers import register; register();"
        "assert 'diffusers' not in sys.modules;"
        "from diffusers.models.attention_dispatch import AttentionBackendName as names;"
        "print(names('polyattn').value)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=600
    )
    assert ran.stdout.strip() == "polyattn", ran.stderr[-2000:]


def test_a_version_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    integration.unregister()
    before = _state()
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: "0.12.0")
    with pytest.raises(Unsupported, match=r"got diffusers 0\.12\.0, expected 0\.36"):
        integration.register()
    monkeypatch.setattr(library.importlib.metadata, "version", lambda name: "0.99.0")
    with pytest.raises(Unsupported, match=r"untested=True"):
        integration.register()
    assert _state() == before
    integration.register(untested=True)
    assert dispatcher.is_registered()


def _call(**options: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 24, 4, 16)
    keys, heads = options.pop("keys", 24), options.pop("heads", 4)
    k, v = (x[:, :keys, :heads] for x in (k, v))
    with attention_backend("native"):
        native = dispatch_attention_fn(q, k, v, **options)
    with attention_backend("polyattn"), record_selections() as ran:
        ours = dispatch_attention_fn(q, k, v, **options)
    assert len(ran) == 1
    return native, ours


BOOLEANS = torch.rand(2, 24, generator=torch.Generator().manual_seed(3)) < 0.7
BOOLEANS[:, 0] = True

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cross": {"keys": 9},
    "causal": {"is_causal": True},
    "causal cross": {"is_causal": True, "keys": 9},
    "scale": {"scale": 0.3},
    "grouped heads": {"heads": 2, "enable_gqa": True},
    "(B, S) booleans": {"attn_mask": BOOLEANS},
    "(B, 1, 1, S) booleans": {"attn_mask": BOOLEANS[:, None, None]},
    "(B, 1, T, S) floats": {"attn_mask": torch.randn(2, 1, 24, 24)},
    "(T, S) booleans": {"attn_mask": torch.ones(24, 24, dtype=torch.bool).tril()},
    "keywords that say nothing": {"attention_kwargs": {"something": None}},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_means_what_it_means_to_native(name: str) -> None:
    native, ours = _call(**CALLS[name])
    torch.testing.assert_close(ours, native)


def test_nothing_is_dropped() -> None:
    with pytest.raises(Unsupported, match="got window_size=int"):
        _call(attention_kwargs={"window_size": 3})
    with attention_backend("polyattn"):
        q = torch.randn(1, 8, 4, 16)
        with pytest.raises(InvalidProblem, match="4 query heads and 2 key heads"):
            dispatch_attention_fn(q, q[:, :, :2], q[:, :, :2])
        with pytest.raises(InvalidProblem, match="beside is_causal=True"):
            dispatch_attention_fn(
                q, q, q, attn_mask=torch.ones(8, 8, dtype=torch.bool), is_causal=True
            )


def _flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    ).eval()  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 64, 16), "encoder_hidden_states": torch.randn(1, 12, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(64, 3), "txt_ids": torch.zeros(12, 3), "return_dict": False,
    }  # fmt: skip
    return model, inputs


def test_a_model_set_to_it_and_reset() -> None:
    model, inputs = _flux()
    with torch.no_grad():
        native = model(**inputs)[0]
        model.set_attention_backend("polyattn")
        with record_selections() as ran:
            ours = model(**inputs)[0]
        assert len(ran) == 2
        torch.testing.assert_close(ours, native)
        model.reset_attention_backend()
        # set_attention_backend also made it the one of every model that has none of its own
        with attention_backend("native"), record_selections() as ran:
            model(**inputs)
        assert not ran


def test_requests_of_polyattn_hold() -> None:
    model, inputs = _flux()
    model.set_attention_backend("polyattn")
    with torch.no_grad(), use_backend("sdpa_math"), record_selections() as ran:
        model(**inputs)
    assert {one.backend for one in ran} == {"sdpa_math"}


def test_gradients() -> None:
    model, inputs = _flux()
    grads = []
    for backend in ("native", "polyattn"):
        model.set_attention_backend(backend)
        model.zero_grad()
        model(**inputs)[0].square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for native, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours, native, rtol=1e-4, atol=1e-4)


def test_compiled_whole() -> None:
    model, inputs = _flux()
    model.set_attention_backend("polyattn")
    with torch.no_grad():
        eager = model(**inputs)[0]
        compiled = torch.compile(model, fullgraph=True, backend="eager")(**inputs)[0]
    torch.testing.assert_close(compiled, eager)

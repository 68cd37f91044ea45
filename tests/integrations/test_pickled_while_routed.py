"""What is pickled while calls are routed: torch's own functions, with no trace of polyattn."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F

from polyattn.integrations.routing import router
from polyattn.integrations.sdpa_patch import route_sdpa

HELD: dict[str, Callable[[], Any]] = {
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention,
    "the operator": lambda: torch._C._nn.scaled_dot_product_attention,
    "multi_head_attention_forward": lambda: F.multi_head_attention_forward,
    "the fused attention": lambda: torch._native_multi_head_attention,
    "the fused layer": lambda: torch._transformer_encoder_layer_fwd,
    "flex_attention": lambda: torch.nn.attention.flex_attention.flex_attention,
}


class Holds(torch.nn.Module):
    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend = functools.partial(attend, is_causal=True)

    def forward(self, x: Any) -> Any:
        return self.attend(x, x, x)


@pytest.fixture(autouse=True)
def flex() -> None:
    import torch.nn.attention.flex_attention  # noqa: F401 - routed only where it is imported


@pytest.mark.parametrize("name", list(HELD))
def test_it_is_named_as_torchs_function_and_loaded_as_the_present_one(name: str) -> None:
    held = HELD[name]
    stock = held()
    with route_sdpa(), route_sdpa():
        stand_in = held()
        written = pickle.dumps(stand_in)
        assert stand_in is not stock and b"polyattn" not in written
        routed = pickle.loads(written)
        assert copy.deepcopy(stand_in) is stand_in
        if name != "the operator":  # which is there for compilers alone
            assert routed is stand_in
    assert pickle.loads(written) is stock is held()
    assert pickle.loads(pickle.dumps(stand_in)) is stand_in  # kept, and of no name of torch's
    assert stand_in.__module__.startswith("polyattn.")


def test_what_another_library_put_in_place_may_have_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    theirs = functools.partial(F.multi_head_attention_forward)
    monkeypatch.setattr(F, "multi_head_attention_forward", theirs)
    with route_sdpa():
        assert F.multi_head_attention_forward is not theirs
    assert F.multi_head_attention_forward is theirs


LOADS = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.modules["polyattn"] = None  # as if it were not installed
import torch

model = torch.load(sys.argv[1], weights_only=False)
assert model.keywords == {"is_causal": True}
assert model.func is torch.nn.functional.scaled_dot_product_attention
"""


def test_a_saved_model_is_loaded_without_polyattn(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    q = torch.randn(2, 4, 16, 8)
    with route_sdpa():
        model = Holds(F.scaled_dot_product_attention)
        torch.save(model.attend, file)
        kept, whole = copy.deepcopy(model), io.BytesIO()
        torch.save(model, whole)
    want = Holds(F.scaled_dot_product_attention)(q)
    whole.seek(0)
    loaded = torch.load(whole, weights_only=False)
    assert loaded.attend.func is F.scaled_dot_product_attention
    for one in (model, kept, loaded):
        assert torch.equal(one(q), want)
    subprocess.run([sys.executable, "-c", LOADS, str(file)], check=True, timeout=300)


def test_layers_that_were_kept_go_to_torch_when_no_routing_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with route_sdpa():
        forward, fused = F.multi_head_attention_forward, torch._native_multi_head_attention
    monkeypatch.setattr(router, "hand_over", lambda *said: pytest.fail(f"{said}"))
    monkeypatch.setattr(router, "is_watched", lambda: True)
    layer, x = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval(), torch.randn(1, 4, 8)
    given = (
        8, 2, layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
    )  # fmt: skip
    with torch.no_grad():
        want = layer(x, x, x)
        found = fused(x, x, x, *given)
        turned = x.transpose(0, 1)
        again = forward(
            turned, turned, turned, 8, 2, layer.in_proj_weight, layer.in_proj_bias, None, None,
            False, 0.0, layer.out_proj.weight, layer.out_proj.bias,
        )  # fmt: skip
    torch.testing.assert_close(found[0], want[0])
    torch.testing.assert_close(again[0].transpose(0, 1), want[0])

"""Models of transformers are judged by weights that can be drawn again; a wrong one is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from polyattn.bench.models.transformers_models.building import built
from polyattn.bench.models.transformers_models.examining import _is_unsteady, examine
from polyattn.integrations.transformers import register
from polyattn.integrations.transformers.library import library


def test_a_draw_is_the_same_for_one_seed_whatever_came_before_it() -> None:
    found = built("llama")
    drawn = []
    for seed in (1, 2, 1):
        found.draw(seed)
        drawn.append({name: p.clone() for name, p in found.model.named_parameters()})
    assert all(torch.equal(drawn[0][name], drawn[2][name]) for name in drawn[0])
    assert not any(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])


def test_an_attention_that_hides_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    whole: Any = library().attention["polyattn"]

    def without_the_mask(module: Any, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> Any:
        return whole(module, q, k, v, None, is_causal=False, **more)

    monkeypatch.setitem(library().attention, "polyattn", without_the_mask)
    found = examine("llama")
    assert found.outcome == "different" and found.excess > 1000, found


def test_an_error_that_one_draw_makes_look_large_is_none() -> None:
    """Of this model's first weights, eager's worst error is small by chance."""
    found = examine("embedding_gemma2_text")
    assert found.outcome == "equal", found.reason


def test_where_the_librarys_two_attentions_differ_ours_is_its_sdpa() -> None:
    """This model, called alone, makes no mask: its layers' is_causal is read by sdpa, not eager."""
    assert examine("blt_global_transformer").outcome == "as sdpa"


def test_a_model_is_unsteady_where_its_own_float32_is_far_from_float64() -> None:
    exact = {"logits": torch.randn(4, 64, dtype=torch.float64)}
    rounded, swapped = ({"logits": exact["logits"].float()} for _ in range(2))
    assert not _is_unsteady({"unpadded": (rounded, exact)})
    swapped["logits"][0, 0] += 0.5
    assert _is_unsteady({"unpadded": (swapped, exact)})

"""A transformer of diffusers is compared with diffusers' own attention, whatever came before it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("diffusers")

from polyattn import record_selections
from polyattn.bench.models.diffusers_models import examining


def test_the_stock_run_is_on_native_after_another_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers' set_attention_backend makes its name the active backend of all models."""
    assert examining.examine("FluxTransformer2DModel").outcome == "equal"
    stock_calls: list[Any] = []
    runs = examining._runs

    def watched(*arguments: Any) -> Any:
        with record_selections() as ran:
            found = runs(*arguments)
        stock_calls.append(len(ran))
        return found

    monkeypatch.setattr(examining, "_runs", watched)
    found = examining.examine("WanTransformer3DModel")
    assert found.outcome == "equal" and found.calls == 4
    assert stock_calls == [0]

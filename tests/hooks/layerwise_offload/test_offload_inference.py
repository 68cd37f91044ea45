"""Weights that are inference tensors, models offloaded in inference mode, and what fails midway."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from polyattn.hooks import offload
from polyattn.hooks.layerwise_offload import unit as units
from tests.hooks.layerwise_offload.fake_accelerator import Module, OverHostMemory, fake
from tests.hooks.layerwise_offload.small_models import Model, frozen, inputs

__all__ = ["fake"]

X = inputs()


def built() -> Model:
    with torch.inference_mode():
        model = frozen()
        model.blocks[1].register_buffer("state", torch.ones(2))
        model.blocks[2].up.weight = model.blocks[1].up.weight  # tied
    return model


def copied() -> Model:
    model = frozen()
    with torch.inference_mode():
        return copy.deepcopy(model)


def assigned() -> Model:
    model = frozen()
    with torch.inference_mode():
        values = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
    return model


def asking_for_gradients() -> Model:
    with torch.inference_mode():
        return frozen().requires_grad_(True)


def ordinary() -> Model:
    return frozen()


MODELS: list[Callable[[], Model]] = [built, copied, assigned, asking_for_gradients, ordinary]


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


def facts(model: nn.Module) -> list[tuple[Any, ...]]:
    """Whatever may be told of the model's tensors, values included."""
    return [
        (name, id(t), type(t), t.is_inference(), t.requires_grad, t.is_meta, t.shape, t.stride())
        + ((None,) if t.is_meta else (t.data_ptr(), t.detach().flatten().tolist()))
        for name, t in tensors(model)
    ]


def run(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model(X)


def device(kind: str, folder: Path) -> dict[str, Any]:
    if kind == "memory":
        return {"device": OverHostMemory()}
    return {"device": "cpu", "disk": folder}


@pytest.mark.parametrize("kind", ["files", "memory"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_models_made_in_inference_mode(
    make: Callable[[], Model], inside: bool, kind: str, tmp_path: Path, fake: Module
) -> None:
    model = make()
    kinds = [(name, id(t), type(t), t.is_inference(), t.stride()) for name, t in tensors(model)]
    want = run(model)
    with torch.inference_mode(inside):
        handle = offload(model, **device(kind, tmp_path))
    for _ in range(2):
        assert torch.equal(run(model), want)
        with torch.no_grad():
            assert torch.equal(model(X), want)
    assert torch.equal(run(copy.deepcopy(model)), want)
    with handle.loaded("blocks.0"), torch.inference_mode():
        model.blocks[0].up.weight.zero_()
    changed = run(model)
    assert not torch.equal(changed, want)
    with torch.inference_mode(not inside):
        handle.detach()
    assert [(n, id(t), type(t), t.is_inference(), t.stride()) for n, t in tensors(model)] == kinds
    assert torch.equal(run(model), changed) and not model.blocks[0].up.weight.count_nonzero()
    assert list(tmp_path.iterdir()) == []


def test_a_model_on_the_meta_device_made_in_inference_mode(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = frozen()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    with torch.inference_mode(), torch.device("meta"):
        model = Model().eval()
    with offload(model, device="cpu", weights=tmp_path / "model.safetensors"):
        assert torch.equal(run(model), run(source))
    assert all(t.is_inference() for _, t in tensors(model))
    assert torch.equal(run(model), run(source))


def test_casting(tmp_path: Path) -> None:
    model, resident = built(), built()
    with offload(model, device="cpu", disk=tmp_path), torch.inference_mode():
        assert torch.equal(model.double()(X.double()), resident.double()(X.double()))
    assert all(t.is_inference() and t.dtype == torch.float64 for _, t in tensors(model))


def test_casting_outside_of_inference_mode_is_as_torch_has_it(tmp_path: Path) -> None:
    model, resident = built(), built().double()
    with offload(model, device="cpu", disk=tmp_path):
        model.double()
        for one in (model, resident):
            with pytest.raises(RuntimeError, match="do not track version counter"):
                run(one)
    assert {t.dtype for _, t in tensors(model)} == {torch.float64}


@pytest.mark.parametrize("kind", ["files", "memory"])
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("at", [3, 20])
def test_what_fails_while_a_unit_is_put_away(
    at: int, make: Callable[[], Model], kind: str,
    tmp_path: Path, fake: Module, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model = make()
    before, want, put, calls = facts(model), run(model), units.put_data, itertools.count()

    def failing(tensor: Tensor, data: Tensor) -> None:
        if next(calls) == at:
            raise MemoryError("nothing left")
        put(tensor, data)

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="nothing left"):
        patched.setattr(units, "put_data", failing)
        offload(model, **device(kind, tmp_path))
    found = facts(model)
    assert [one[:-2] + one[-1:] for one in found] == [one[:-2] + one[-1:] for one in before]
    assert at > 3 or found == before  # in the very memory, if no unit was away before
    assert torch.equal(run(model), want) and list(tmp_path.iterdir()) == []
    with offload(model, **device(kind, tmp_path)):
        assert torch.equal(run(model), want)


@pytest.mark.parametrize("at", ["weights", "hooks"])
def test_a_model_without_values_stays_so_if_it_fails(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(frozen().state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Model().eval().requires_grad_(False)
    before = facts(model)

    def fails(*_: Any) -> None:
        raise MemoryError("nothing left")

    with monkeypatch.context() as patched, pytest.raises(MemoryError, match="nothing left"):
        if at == "weights":
            patched.setattr(units.Unit, "hide", fails)
        else:
            patched.setattr("polyattn.hooks.layerwise_offload.attach.guarded", fails)
        offload(model, device="cpu", weights=tmp_path / "model.safetensors")
    assert facts(model) == before
    with offload(model, device="cpu", weights=tmp_path / "model.safetensors"):
        assert torch.equal(run(model), run(frozen()))

"""One transformer of diffusers, built small: its native attention beside polyattn's.

Forward and backward, where it has a backward: compared are the outputs, and the gradients of all
weights and inputs.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polyattn import record_selections
from polyattn.bench.models.diffusers_models.building import built, called
from polyattn.bench.models.diffusers_models.model_classes import class_of
from polyattn.bench.models.model_row import Row
from polyattn.bench.models.nearness import compare, in_float64, tensors_of
from polyattn.errors import Unsupported
from polyattn.integrations.diffusers import register
from polyattn.integrations.sdpa_patch import route_sdpa

__all__ = ["examine"]

_REASON = 240


def examine(name: str) -> Row:
    """Build one transformer, run it on native and on polyattn, and say what was found."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    register()
    dispatch = importlib.import_module("diffusers.models.attention_dispatch")
    with dispatch.attention_backend("native"):  # which `set_attention_backend` changes for all
        return _examined(name)


def _examined(name: str) -> Row:
    kind = class_of(name)
    try:
        model, inputs = built(name)
        run, stock = _runs(model, inputs)
        exact = _exact(run, model, inputs)
    except Exception as error:  # whatever keeps a model from being built or from running
        return Row(name, "not built", _short(error), model=kind.__name__)
    case = "forward and backward" if run is _both_ways else "forward"
    row = Row(name, "equal", model=kind.__name__, cases=(case,))
    calls: list[Any] = []
    try:
        model.set_attention_backend("polyattn")
        # older processors call torch's own function
        with route_sdpa(), record_selections() as calls:
            ours = run(model, inputs)
    except (Unsupported, ValueError) as error:
        # a model that names the backends that it can do with says so itself
        if not isinstance(error, Unsupported) and "attention backend" not in str(error):
            raise
        row.outcome, row.reason = "refused", _short(error)
        return row
    compared = compare(ours, stock, exact)
    row.excess = round(compared.share, 3)
    if compared.excess is not None:
        row.outcome, row.reason = "different", str(compared.excess)[:_REASON]
    row.calls = len(calls)
    row.backends = tuple(sorted({one.backend for one in calls}))
    row.masks = tuple(sorted({_mask_of(one) for one in calls}))
    if not calls and row.outcome == "equal":
        row.outcome = "no attention"
    return row


Run = Callable[[nn.Module, dict[str, Any]], dict[str, Tensor]]


def _runs(model: nn.Module, inputs: dict[str, Any]) -> tuple[Run, dict[str, Tensor]]:
    """Return how the model runs as it is, both ways or forward only, and what it then gives."""
    try:
        return _both_ways, _both_ways(model, inputs)
    except (RuntimeError, NotImplementedError):  # some have no backward on this machine
        return _forward, _forward(model, inputs)


def _forward(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    with torch.no_grad():
        return tensors_of(called(model, inputs))


def _both_ways(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return what the model gives, and the gradients of a weighted sum of it."""
    model.zero_grad(set_to_none=True)
    given = {name: _with_gradients(one) for name, one in inputs.items()}
    found = tensors_of(called(model, given))
    outputs = {name: one for name, one in found.items() if one.requires_grad}
    sum((one * _weights(one)).sum() for one in outputs.values()).backward()  # type: ignore[union-attr]
    grads = {f"grad {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    grads |= {
        f"grad {name}": one.grad for name, one in tensors_of(given).items() if one.grad is not None
    }
    return {name: one.detach() for name, one in (found | grads).items()}


def _weights(output: Tensor) -> Tensor:
    chance = torch.Generator().manual_seed(output.numel())
    return torch.randn(output.shape, generator=chance).to(output.dtype)


def _with_gradients(given: Any) -> Any:
    if isinstance(given, Tensor):
        one = given.detach().clone()
        return one.requires_grad_() if one.is_floating_point() else one
    if isinstance(given, (list, tuple)):
        return type(given)(_with_gradients(one) for one in given)
    return given


def _exact(run: Run, model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    twin = copy.deepcopy(model).double()
    with in_float64():
        return run(twin, {name: _wide(one) for name, one in inputs.items()})


def _wide(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.double() if given.is_floating_point() else given
    if isinstance(given, (list, tuple)):
        return type(given)(map(_wide, given))
    return given


def _mask_of(selection: Any) -> str:
    problem = selection.problem
    if problem is None:
        return "left to torch"
    return problem.mask.signature if problem.mask else ""


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_REASON]

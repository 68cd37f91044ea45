"""One model of transformers, built small: its eager attention beside polyattn's."""

from __future__ import annotations

import contextlib
import copy
import operator
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from polyattn import record_selections
from polyattn.bench.models.model_row import Row
from polyattn.bench.models.nearness import compare, in_float64, tensors_of
from polyattn.bench.models.transformers_models.model_classes import class_of, config_class_of
from polyattn.bench.models.transformers_models.model_inputs import candidates, padded
from polyattn.bench.models.transformers_models.recipes import RECIPES
from polyattn.bench.models.transformers_models.shrinking import WAYS
from polyattn.errors import Unsupported
from polyattn.integrations.transformers import register
from polyattn.integrations.transformers.library import supports_interface

__all__ = ["Built", "built", "examine", "exact_run", "spread"]

_MOST_WEIGHTS = 150_000_000
_REASON = 240
_DRAWS = 5
_FAR = 0.01  # of the root mean square: no rounding adds up to that


class Built:
    """A small model on eager attention, and inputs that it takes, by kind."""

    def __init__(self, model: Any, cases: dict[str, tuple[dict[str, Any], Tensor | None]]) -> None:
        self.model, self.cases = model, cases
        self._small = {n: p.clone() for n, p in model.named_parameters() if p.dim() < 2}

    def draw(self, seed: int) -> None:
        """Give the model other weights: for one seed always the same."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name in self._small:
                    weight.copy_(self._small[name])
        spread(self.model, seed)


def examine(name: str) -> Row:
    """Build one model, run it on eager and on polyattn, and say what was found."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    register()
    try:
        kind = class_of(name)
    except (LookupError, ImportError) as error:
        return Row(name, "not built", _short(error))
    if not supports_interface(kind):
        return Row(name, "not of the interface", model=kind.__name__)
    try:
        found = built(name)
    except Exception as error:  # whatever keeps a model from being built or from running
        return Row(name, "not built", _short(error), model=kind.__name__)
    return _compared(name, found)


def _compared(name: str, found: Built) -> Row:
    row = Row(name, "equal", model=type(found.model).__name__, cases=tuple(found.cases))
    try:
        stock = _library_runs(found, "eager", 1)
    except Exception as error:  # its own code, in float64
        row.outcome, row.reason = "not built", _short(error)
        return row
    try:
        calls, ours = _our_runs(found, 1)
    except Unsupported as error:
        row.outcome, row.reason = "refused", _short(error)
        return row
    row.calls = len(calls)
    row.backends = tuple(sorted({one.backend for one in calls}))
    row.masks = tuple(sorted({_mask_of(one) for one in calls}))
    if not calls:
        row.outcome = "no attention"
        return row
    _judge(row, found, ours, stock)
    return row if row.outcome == "equal" else _looked_at_again(row, found)


def _looked_at_again(row: Row, found: Built) -> Row:
    """Judge what one draw of weights made look different by many, then beside the library's sdpa.

    The worst error of few numbers is small by chance; that of the same rule over many is not.
    """
    _, ours = _our_runs(found, _DRAWS)
    stock = _library_runs(found, "eager", _DRAWS)
    again = replace(row, outcome="equal", reason="", excess=0.0)
    _judge(again, found, ours, stock)
    if again.outcome == "different" and _is_unsteady(stock):
        again.outcome = "unsteady"
    if again.outcome != "different" or not getattr(type(found.model), "_supports_sdpa", False):
        return again
    twin = replace(again, outcome="equal")
    with contextlib.suppress(ValueError):  # a part of it that has no sdpa
        _judge(twin, found, ours, _library_runs(found, "sdpa", _DRAWS))
        again.outcome = "as sdpa" if twin.outcome == "equal" else "different"
    return again


def _is_unsteady(stock: _Runs) -> bool:
    """Say whether the library's float32 is itself far from float64, as where a model ranks."""
    return any(
        bool((plain[name].double() - x).abs().max() > _FAR * x.double().pow(2).mean().sqrt())
        for plain, exact in stock.values()
        for name, x in exact.items()
        if name in plain and x.numel() and plain[name].shape == x.shape
    )


_Outputs = dict[str, Tensor]
_Runs = dict[str, tuple[_Outputs, _Outputs]]


def _our_runs(found: Built, draws: int) -> tuple[list[Any], dict[str, _Outputs]]:
    """Return the calls, and each case's outputs under `draws` weights, one after the other."""
    found.model.set_attn_implementation("polyattn")
    calls: list[Any] = []
    runs: dict[str, list[_Outputs]] = {case: [] for case in found.cases}
    for seed in range(draws):
        found.draw(seed + 1)
        for case, (inputs, _) in found.cases.items():
            with torch.no_grad(), record_selections() as ran:
                runs[case].append(tensors_of(found.model(**inputs)))
            calls += ran
    return calls, {case: _joined(outputs) for case, outputs in runs.items()}


def _library_runs(found: Built, implementation: str, draws: int) -> _Runs:
    """Return the outputs of each case in float32 and in float64, on an attention of the library."""
    found.model.set_attn_implementation(implementation)
    plain: dict[str, list[_Outputs]] = {case: [] for case in found.cases}
    exact: dict[str, list[_Outputs]] = {case: [] for case in found.cases}
    for seed in range(draws):
        found.draw(seed + 1)
        for case, (inputs, _) in found.cases.items():
            with torch.no_grad():
                plain[case].append(tensors_of(found.model(**inputs)))
            exact[case].append(exact_run(found.model, inputs))
    return {case: (_joined(plain[case]), _joined(exact[case])) for case in found.cases}


def _joined(runs: list[_Outputs]) -> _Outputs:
    return {name: torch.cat([torch.atleast_1d(one[name]) for one in runs]) for name in runs[0]}


def _judge(row: Row, found: Built, ours: dict[str, _Outputs], stock: _Runs) -> None:
    for case, (_, valid) in found.cases.items():
        if valid is not None:
            batch = next(iter(stock[case][0].values())).shape[0]
            valid = valid.repeat(max(batch // valid.shape[0], 1), 1)
        compared = compare(ours[case], *stock[case], valid)
        row.excess = max(row.excess, round(compared.share, 3))
        if compared.excess is not None and row.outcome == "equal":
            row.outcome, row.reason = "different", f"{case}: {compared.excess}"[:_REASON]


def _mask_of(selection: Any) -> str:
    problem = selection.problem
    return "left to torch" if problem is None else problem.mask.signature if problem.mask else ""


def exact_run(model: Any, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of the model in float64, on the attention it has."""
    twin = copy.deepcopy(model).double()
    wide = {
        name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }
    with torch.no_grad(), in_float64():
        return tensors_of(twin(**wide))


def built(name: str) -> Built:
    """Build a model small, the first way in which it runs; raises what kept the first from it."""
    failure: Exception | None = None
    for way in WAYS:
        try:
            config = config_class_of(name)()
            way(config)
            recipe = RECIPES.get(name)
            if recipe is not None and recipe.change is not None:
                recipe.change(config)
            return _running(_made(class_of(name), config), recipe)
        except Exception as error:  # the next way may do
            failure = failure or error
    assert failure is not None
    raise failure


_from_config = operator.attrgetter("_from_config")


def _made(kind: Any, config: Any) -> Any:
    with torch.device("meta"):
        twin = _from_config(kind)(copy.deepcopy(config), attn_implementation="eager")
    weights = sum(p.numel() for p in twin.parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights, though its configuration was made small")
    torch.manual_seed(0)
    model = _from_config(kind)(config, attn_implementation="eager").eval().requires_grad_(False)
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(Exception):  # grouped products, which have no float64
            model.set_experts_implementation("eager")
    return model


def _running(model: Any, recipe: Any) -> Built:
    tried = candidates(model) if recipe is None or recipe.inputs is None else recipe.inputs(model)
    failure: Exception | None = None
    for inputs in tried:
        try:
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # the next inputs may suit it
            failure = failure or error
            continue
        spread(model)
        return Built(model, _cases(model, inputs))
    raise failure or ValueError("nothing is known that it takes")


def _cases(model: Any, inputs: dict[str, Any]) -> dict[str, tuple[dict[str, Any], Tensor | None]]:
    """Return the inputs unpadded and, where the model takes a padding mask, padded on each side."""
    found: dict[str, tuple[dict[str, Any], Tensor | None]] = {"unpadded": (inputs, None)}
    for side in ("left", "right"):
        made = padded(inputs, model, side == "left")
        if made is None:
            continue
        with contextlib.suppress(Exception), torch.no_grad():  # not each takes each side
            model(**made[0])
            found[f"padded {side}"] = made
    return found


def spread(model: nn.Module, seed: int = 1) -> None:
    """Give a model weights with which its scores differ, so that masks and soft caps matter."""
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=chance)
            if weight.dim() < 2:
                weight.add_(noise, alpha=0.1)
                continue
            terms = 4 if "emb" in name and weight.dim() == 2 else weight[0].numel()
            weight.copy_(noise * min(1.0, max(terms, 1) ** -0.5))


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_REASON]

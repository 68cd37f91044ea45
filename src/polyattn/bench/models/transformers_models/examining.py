"""One model of transformers, built small: its eager attention beside polyattn's."""

from __future__ import annotations

import contextlib
import copy
import warnings
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyattn import record_selections
from polyattn.bench.models.model_row import Row
from polyattn.bench.models.nearness import compare, in_float64, tensors_of
from polyattn.bench.models.transformers_models.building import Built, built, kind_of
from polyattn.errors import Unsupported
from polyattn.integrations.transformers import register
from polyattn.integrations.transformers.library import supports_interface

__all__ = ["examine", "exact_run"]

_REASON = 240
_DRAWS = 5
_FAR = 0.01  # of the root mean square: no rounding adds up to that


def examine(name: str) -> Row:
    """Build one model, run it on eager and on polyattn, and say what was found."""
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    register()
    try:
        kind = kind_of(name)
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
        stock = _library_runs(found, found.beside, 1)
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
    stock = _library_runs(found, found.beside, _DRAWS)
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
    return {name: _in_one([torch.atleast_1d(one[name]) for one in runs]) for name in runs[0]}


def _in_one(outputs: list[Tensor]) -> Tensor:
    """Put outputs behind one another, as numbers alone where weights tell how many there are."""
    of_one_shape = len({x.shape[1:] for x in outputs}) == 1
    return torch.cat(outputs if of_one_shape else [x.flatten() for x in outputs])


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
    with torch.no_grad(), in_float64():
        return tensors_of(twin(**{name: _wide(x) for name, x in inputs.items()}))


def _wide(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(_wide(one) for one in x)
    if isinstance(x, dict):
        return {name: _wide(one) for name, one in x.items()}
    if isinstance(x, Tensor):
        return x.double() if x.is_floating_point() else x
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{one.name: _wide(getattr(x, one.name)) for one in fields(x)})
    return x.double() if hasattr(x, "double") else x


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:_REASON]

"""The call that offloads a model: look, plan, put away, measure, bring back what may stay."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.asked import (
    Asked,
    asked_for,
    checked_paths,
    checked_resident,
    checked_units,
)
from polyattn.hooks.layerwise_offload.attach import Attached
from polyattn.hooks.layerwise_offload.between_calls import between_calls
from polyattn.hooks.layerwise_offload.devices import Carrier, carrier_for
from polyattn.hooks.layerwise_offload.handle import LayerwiseOffload
from polyattn.hooks.layerwise_offload.homes import Homes
from polyattn.hooks.layerwise_offload.leaves import leaves_of
from polyattn.hooks.layerwise_offload.offload_plan import OffloadPlan
from polyattn.hooks.layerwise_offload.others import refuse_others
from polyattn.hooks.layerwise_offload.partition import LEVELS, candidates, named
from polyattn.hooks.layerwise_offload.process_memory import held
from polyattn.hooks.layerwise_offload.settling import facts_of, settle
from polyattn.hooks.layerwise_offload.survey import Survey, refuse_training, survey_of
from polyattn.torch.internals import unwrapped

__all__ = ["enable_layerwise_offload", "offload"]

_HANDLES: weakref.WeakKeyDictionary[nn.Module, LayerwiseOffload] = weakref.WeakKeyDictionary()


def offload(
    model: nn.Module, budget: int | str | None = None, device: Any = None, *,
    disk: str | Path | None = None, weights: Any = None, depth: int | None = None,
    plan: OffloadPlan | str | Path | None = None, units: str | Sequence[str] | None = None,
    resident: Sequence[nn.Module] = (), sample: Any = None, pinned: bool = True,
    keep_files: bool = False, progress: bool = False,
) -> LayerwiseOffload:  # fmt: skip
    """Run a model in less memory than its weights: they come for each call and go afterwards.

    `budget`: bytes (``"8GiB"``) that this process may hold on `device`, activations included; None:
    as few as possible; one below what the process holds without the model is the model's alone.
    `device`: where it computes; None: CUDA if there is one, else ``"cpu"``,
    where weights stay in files; or a ``Carrier``, such as the simulated device. `disk`: a folder
    for weights that lie in no file; `weights`: the model's own safetensors file, files or folder,
    from which a model on the meta device gets its values. `sample`: inputs of a typical call (a
    tuple, a dict, a tensor, or a function), by which computation, copies and activations are
    measured; without it the plan knows no times and keeps nothing free for activations. `depth`:
    units fetched ahead; None: the best. `plan`: one made before, or its file. `units`: regular
    expressions of the modules that are moved, instead of the model's blocks. `resident`: modules
    that are left where they are. `pinned`: lock the host's copy for the device. `keep_files`: leave
    files of ours in `disk` for the next time. `progress`: show a bar while weights are put away.

    Returns a handle, at once a context manager: `plan`, `report()`, `loaded(...)`, `detach()`. The
    model's parameters stay the objects that they are, with their values. Offloading twice is once.
    Raises :class:`~polyattn.errors.OffloadError` before anything is moved if it cannot be.

    >>> import tempfile, torch
    >>> from polyattn.hooks import offload
    >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
    >>> x = torch.ones(1, 64)
    >>> want = model(x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with offload(model, device="cpu", disk=folder) as handle:
    ...         print(len(handle.units), torch.equal(model(x), want))
    4 True
    """
    model = unwrapped(model)
    known = _known(model)
    if known is not None:
        return known
    refuse_others(model)
    asked = asked_for(plan, budget, depth)
    patterns, staying = checked_units(units), checked_resident(resident, model)
    checked_paths(disk, weights)
    carrier = device if isinstance(device, Carrier) else carrier_for(_device(device))
    homes = None
    try:
        homes = _homes(carrier, disk, weights, pinned, keep_files)
        with between_calls(model):
            handle = _offload(model, carrier, homes, asked, patterns, staying, sample, progress)
    except BaseException:
        if homes is not None:
            homes.close()
        carrier.close()
        raise
    _HANDLES[model] = handle
    return handle


def enable_layerwise_offload(model: nn.Module, is_replace: bool = False) -> LayerwiseOffload:
    """Offload a model as FastVideo names it: every block streams; on CUDA from locked host memory.

    `is_replace`: give up an offload that is there and begin anew.

    >>> import tempfile, torch
    >>> from polyattn.hooks import enable_layerwise_offload, offload
    >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     handle = offload(model, device="cpu", disk=folder)
    ...     enable_layerwise_offload(model) is handle  # once is enough
    ...     handle.detach()
    True
    """
    known = _known(model)
    if known is not None and is_replace:
        if carrier_for(_device(None)).needs_files:
            _refuse_without_files()
        known.detach()
    with torch.no_grad():  # FastVideo takes models as they are made, in training mode
        return offload(model)


def _known(model: Any) -> LayerwiseOffload | None:
    if not isinstance(model, nn.Module):
        raise OffloadError(f"got {type(model).__name__}, expected a torch.nn.Module")
    found = _HANDLES.get(model)
    return found if found is not None and found.attached else None


def _device(device: Any) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OffloadError(f"got device={device!r}, expected 'cpu', 'cuda' or a device") from error


def _homes(carrier: Carrier, disk: Any, weights: Any, pinned: bool, keep_files: bool) -> Homes:
    if carrier.needs_files and disk is None and weights is None:
        _refuse_without_files()
    lock = pinned and carrier.locks_host
    return Homes(disk=disk, weights=weights, lock=lock, keep_files=keep_files)


def _offload(
    model: nn.Module, carrier: Carrier, homes: Homes, asked: Asked,
    units: Sequence[str] | None, resident: Sequence[nn.Module], sample: Any, progress: bool,
) -> LayerwiseOffload:  # fmt: skip
    device, tier = carrier.device, homes.tier
    every = leaves_of(model, apart=resident)
    homes.know(every)
    before = held(device)
    ours = sum(leaf.nbytes for leaf in every if leaf.tensor.device == device)
    other = max(0, before - ours)
    asked.read_budget(other)
    survey, plan = _surveyed(model, units, resident, asked, device, tier, other)
    refuse_training(model, survey)
    if asked.budget is not None and not plan.streamed and _is_here(model, device):
        return LayerwiseOffload(model, plan, None)
    homes.require(sum(found.nbytes for found in survey.units))
    with _Bar(progress) as shown:
        attached = Attached(model, survey, carrier, homes, shown)
    handle = LayerwiseOffload(model, plan, attached)
    try:
        homes.warn_of_others()
        settle(handle, attached, survey, asked, sample)
    except BaseException:
        handle.detach()
        raise
    return handle


def _surveyed(
    model: nn.Module, units: Sequence[str] | None, resident: Sequence[nn.Module], asked: Asked,
    device: torch.device, tier: str, other: int,
) -> tuple[Survey, OffloadPlan]:  # fmt: skip
    """Cut the model as coarsely as the budget allows."""
    if units is not None:
        survey = survey_of(model, named(model, units), resident)
        return survey, asked.plan_for(facts_of(survey, other), str(device), tier)
    failure: OffloadError | None = None
    for level in range(len(LEVELS)):
        survey = survey_of(model, candidates(model, level), resident)
        if not survey.units:
            continue
        try:
            return survey, asked.plan_for(facts_of(survey, other), str(device), tier)
        except OffloadError as error:
            failure = error if asked.plan is None else failure or error
    raise failure or OffloadError(
        f"got a {type(model).__name__} without modules that hold weights, expected some to move"
    )


def _is_here(model: nn.Module, device: torch.device) -> bool:
    return all(p.device == device for p in (*model.parameters(), *model.buffers()))


def _refuse_without_files() -> None:
    raise OffloadError(
        "got device='cpu' without files, expected disk= (a folder for the weights) or weights= "
        "(the model's safetensors): what computes on the processor can only stream from a disk"
    )


class _Bar:
    """A progress bar over the units that are put away, if it is asked for."""

    def __init__(self, wanted: bool) -> None:
        self._bar: Any = None
        if wanted:
            self._bar = importlib.import_module("rich.progress").Progress(transient=True)
            self._task = self._bar.add_task("weights are put away", total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        if self._bar is None:
            return lambda done, of: None
        self._bar.start()
        return lambda done, of: self._bar.update(self._task, completed=done, total=of)

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            self._bar.stop()

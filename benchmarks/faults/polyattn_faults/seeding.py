"""Seeding: which bugs an architecture can have and where, of which a seeded choice is made."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from polyattn_faults.edits import EDITS, Place
from polyattn_faults.kinds import arithmetic, attention, functions, handing
from polyattn_faults.kinds.kind import Kind
from polyattn_faults.operations import Call, changed, observed

__all__ = ["KINDS", "Fault", "faults"]

KINDS: list[Kind] = [*attention.KINDS, *functions.KINDS, *arithmetic.KINDS, *handing.KINDS]


@dataclass(frozen=True)
class Fault:
    """`kind` and `at`, where it is; `culprits`: the modules that hold it, each an exact answer.

    ``seeded(model)`` gives a model that has it while the context lasts.
    """

    kind: str
    at: str
    culprits: tuple[str, ...]
    seeded: Callable[[nn.Module], AbstractContextManager[nn.Module]]


def faults(
    model: nn.Module, inputs: Mapping[str, Any], *, of_kind: int, every_layer: int, seed: int
) -> list[Fault]:
    """Return a choice: of each kind so many, or up to `every_layer` of the kinds in EVERYWHERE.

    They are spread over layers, then over modules.
    """
    found: dict[str, list[Fault]] = {}
    for fault in (*_operations(model, inputs), *_edits(model)):
        found.setdefault(fault.kind, []).append(fault)
    chosen = []
    for kind, places in found.items():
        most = every_layer if kind in EVERYWHERE else of_kind
        chosen += _spread(places, most, random.Random(f"{seed} {kind}"))
    return chosen


EVERYWHERE = (
    "heads swapped", "softmax scale missing", "residual missing", "tokens rolled",
    "norm eps ten times", "bias dropped", "weight transposed", "two rows exchanged",
    "one percent more",
)  # fmt: skip
"""Kinds that are seeded into each layer."""

_LAYER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def _spread(places: list[Fault], most: int, source: random.Random) -> list[Fault]:
    """Choose so many places, one in each layer before there are two in one."""
    source.shuffle(places)
    layers: dict[tuple[str, ...], list[Fault]] = {}
    for fault in places:
        layers.setdefault((fault.at.split(".")[0], *_LAYER.findall(fault.at)[:1]), []).append(fault)
    turns = [group[at] for at in range(len(places)) for group in layers.values() if at < len(group)]
    return turns[:most]


def _operations(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[Fault]:
    seen: dict[tuple[str, str, str, int], Fault] = {}

    def see(call: Call) -> None:
        for kind in KINDS:
            key = (kind.name, call.module, call.name, call.index)
            if key not in seen and kind.possible(call):
                seen[key] = _operation(kind, call)

    with torch.no_grad(), observed(model, see):
        model(**inputs)
    yield from seen.values()


def _operation(kind: Kind, call: Call) -> Fault:
    module, name, index = call.module, call.name, call.index
    what = f" {call.child.removeprefix(module).lstrip('.')}" if call.child else ""

    @contextmanager
    def seeded(model: nn.Module) -> Iterator[nn.Module]:
        with changed(model, module, name, index, kind.wrong):
            yield model

    return Fault(kind.name, f"{module}: {name}{what} {index}", (module,), seeded)


def _edits(model: nn.Module) -> Iterator[Fault]:
    for edit in EDITS:
        for place in edit.places(model):
            yield Fault(edit.name, place.at, place.culprits, _edited(place))


def _edited(place: Place) -> Callable[[nn.Module], AbstractContextManager[nn.Module]]:
    @contextmanager
    def seeded(model: nn.Module) -> Iterator[nn.Module]:
        wrong = copy.deepcopy(model)
        place.apply(wrong)
        yield wrong

    return seeded

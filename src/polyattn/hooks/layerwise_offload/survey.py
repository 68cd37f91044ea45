"""What a model is made of: which bytes belong to which unit, and which to none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.leaves import Leaf, leaves_of
from polyattn.hooks.layerwise_offload.partition import Candidate
from polyattn.hooks.layerwise_offload.segments import Layout, Segment, segments_of

__all__ = ["Found", "Survey", "survey_of", "to_stream"]

_SMALL_BUFFER = 1 << 20
_PACKED = frozenset(
    getattr(torch, name)
    for name in (
        "int8", "uint8", "int16", "uint16", "int32", "uint32", "float8_e4m3fn", "float8_e5m2",
        "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
)  # fmt: skip
"""What quantised weights are packed in, which some keep in buffers. Other buffers are state: a
cache that a module writes to in its own call, past torch's count too, or a table."""


@dataclass
class Found:
    """A unit as it was found: modules that are called, and the bytes that they need."""

    name: str
    modules: list[nn.Module]
    segments: list[Segment] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """How much a slot for it has to hold."""
        return Layout(self.segments).nbytes


@dataclass
class Survey:
    """The units of a model, and the tensors that belong to none and stay on the device."""

    units: list[Found]
    outside: list[Leaf]

    @property
    def outside_bytes(self) -> int:
        """How much stays in any case."""
        return sum(segment.nbytes for segment in segments_of(self.outside))


def to_stream(leaf: Leaf, *, some_frozen: bool) -> bool:
    """Whether a tensor in a unit streams: weights do; what is trained, and other buffers, stay."""
    if leaf.is_buffer:
        return leaf.nbytes >= _SMALL_BUFFER and leaf.tensor.dtype in _PACKED
    return not (some_frozen and leaf.trained)


def survey_of(
    model: nn.Module, found: Sequence[Candidate], resident: Sequence[nn.Module] = ()
) -> Survey:
    """Sort a model's tensors into units.

    What two units share (tied weights) makes them one if it is most of one of them, an embedding
    and the head that is tied to it; otherwise it stays on the device.
    """
    modules = [each.module for each in found]
    inner = {id(m) for m in modules}
    everything = leaves_of(model, apart=resident)
    some_frozen = any(not leaf.is_buffer and not leaf.trained for leaf in everything)
    owners: dict[int, list[int]] = {}
    for index, each in enumerate(found):
        within = [m for m in each.module.modules() if id(m) in inner and m is not each.module]
        for leaf in leaves_of(each.module, each.name, apart=[*within, *resident]):
            if to_stream(leaf, some_frozen=some_frozen):
                owners.setdefault(id(leaf.tensor), []).append(index)
    units = [Found(each.name, [each.module]) for each in found]
    shared: list[tuple[Segment, set[int]]] = []
    outside = []
    for segment in segments_of(everything):
        whose = {index for leaf in segment.leaves for index in owners.get(id(leaf.tensor), ())}
        all_owned = all(id(leaf.tensor) in owners for leaf in segment.leaves)
        if not whose or not all_owned:
            outside += segment.leaves
        elif len(whose) == 1:
            units[whose.pop()].segments.append(segment)
        else:
            shared.append((segment, whose))
    outside += _shared_out(units, shared)
    for module in resident:
        outside += leaves_of(module, strict=False)
    return Survey([unit for unit in units if unit.segments], outside)


def _shared_out(units: list[Found], shared: list[tuple[Segment, set[int]]]) -> list[Leaf]:
    """Join units that share most of their bytes; return what stays because others share it."""
    into = list(range(len(units)))

    def joined(index: int) -> int:
        while into[index] != index:
            index = into[index]
        return index

    alone = [sum(segment.nbytes for segment in unit.segments) for unit in units]
    left: list[Leaf] = []
    for segment, whose in shared:
        first = joined(min(whose))
        if segment.nbytes < min(alone[index] for index in whose):
            left += segment.leaves
            continue
        units[first].segments.append(segment)
        for index in sorted({joined(other) for other in whose} - {first}):
            units[first].modules += units[index].modules
            units[first].segments += units[index].segments
            units[index].segments, units[index].modules = [], []
            into[index] = first
    return left


def refuse_training(model: nn.Module, survey: Survey) -> None:
    """Raise if the weights that would stream are the ones that are trained.

    Under ``no_grad`` a model is only used, whatever it was left as; a backward pass would raise.
    """
    trained = [
        leaf.name
        for unit in survey.units
        for segment in unit.segments
        for leaf in segment.leaves
        if leaf.trained
    ]
    if trained and model.training and torch.is_grad_enabled():
        raise OffloadError(
            f"got a model in training mode whose weights all want gradients ({trained[0]}, ...), "
            "expected frozen weights, beside which adapters may train: call "
            "model.requires_grad_(False) before adapters are added, or model.eval(); to use it "
            "as it is, offload it under torch.no_grad()"
        )

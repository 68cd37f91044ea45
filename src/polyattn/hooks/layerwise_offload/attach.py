"""Puts a model's weights away and brings them back: all of it, or nothing if something fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.devices import Carrier
from polyattn.hooks.layerwise_offload.guards import guarded
from polyattn.hooks.layerwise_offload.homes import Homes
from polyattn.hooks.layerwise_offload.leaves import Leaf, leaves_of, plain, put_data
from polyattn.hooks.layerwise_offload.placement import Placement
from polyattn.hooks.layerwise_offload.segments import Layout, Segment, bytes_of, segments_of
from polyattn.hooks.layerwise_offload.survey import Found, Survey, to_stream
from polyattn.hooks.layerwise_offload.unit import Unit

__all__ = ["Attached"]


class Attached:
    """The weights of a model while they are offloaded, and how to undo it."""

    def __init__(
        self, model: nn.Module, survey: Survey, carrier: Carrier, homes: Homes,
        progress: Callable[[int, int], None] = lambda done, of: None,
    ) -> None:  # fmt: skip
        """Put all units away; on an error everything is as it was."""
        self.model = weakref.ref(model)
        self.carrier = carrier
        self.homes = homes
        self.units: list[Unit] = []
        self._staying: set[int] = set()
        self._some_frozen = any(not p.requires_grad for p in model.parameters())
        self._undo: list[Callable[[], None]] = []
        self._made_real: list[Tensor] = []  # they had no values, and get none if this fails
        try:
            for index, found in enumerate(survey.units):
                progress(index, len(survey.units))
                self._put_away(index, found)
            self._move_outside(survey.outside)
            self._watch()
        except BaseException:
            try:
                self.restore()
            finally:
                for tensor in self._made_real:
                    on_no_device(tensor)
            raise
        self._made_real.clear()

    # -- to the device and back -------------------------------------------------------------------

    def _put_away(self, index: int, found: Found) -> None:
        layout = Layout(found.segments)
        origins = [_Origin(segment) for segment in layout.segments]
        home = self.homes.make(layout)
        try:
            with _as_they_were([leaf for segment in layout.segments for leaf in segment.leaves]):
                for origin in origins:
                    self._made_real += origin.make_real()
                unit = Unit(index, found.name, found.modules, layout, home)
        except BaseException:
            home.close()
            raise
        self._undo.append(lambda: self._bring_back(unit, origins))
        self.units.append(unit)

    def _bring_back(self, unit: Unit, origins: Sequence[_Origin]) -> None:
        """Give a unit's tensors memory of their own again, where they were, as they are now.

        Values that are lost, for somebody wrote to their file, are on no device afterwards.
        """
        devices = {id(leaf.tensor): origin.device for origin in origins for leaf in origin.leaves}
        try:
            if unit.shown is None:
                unit.home.check()
            self._bring(unit, devices)
            if unit.shown is None:
                unit.home.check()
        except OffloadError:
            for leaf in unit.leaves:
                on_no_device(leaf.tensor)
            raise
        finally:
            unit.home.close()

    def _bring(self, unit: Unit, devices: dict[int, torch.device | None]) -> None:
        for segment in segments_of(unit.leaves):
            device = devices.get(id(segment.leaves[0].tensor), torch.device("cpu"))
            if device is not None:
                memory = torch.empty(segment.nbytes, dtype=torch.uint8, device=device)
                memory.copy_(bytes_of(segment))
                for leaf, place in zip(segment.leaves, segment.places, strict=True):
                    put_data(leaf.tensor, place.over(memory))

    def _move_outside(self, leaves: Sequence[Leaf]) -> None:
        """Bring what belongs to no unit to the device, where it stays."""
        for segment in segments_of(leaves):
            origin = _Origin(segment)
            if origin.device == self.carrier.device:
                continue
            if origin.device is None:
                home = self.homes.make(Layout([segment]))
                given = home.segments()[0]
                self._made_real += origin.make_real()
            else:
                given = bytes_of(segment)
            memory = torch.empty(segment.nbytes, dtype=torch.uint8, device=self.carrier.device)
            memory.copy_(given)
            with _as_they_were(segment.leaves):
                for leaf, place in zip(segment.leaves, segment.places, strict=True):
                    put_data(leaf.tensor, place.over(memory))
            if origin.device is not None:
                self._undo.append(lambda segment=segment, device=origin.device: _move(  # type: ignore[misc]
                    segment.leaves, device
                ))  # fmt: skip

    def _watch(self) -> None:
        """See to gradients that nobody can keep, and to modules that are moved or cast."""
        for unit in self.units:
            for module in unit.modules:
                placement = Placement(module, unit)
                self._undo.append(placement.remove)
                self._undo += [guard.remove for guard in guarded(module, unit)]
            for leaf in unit.leaves:
                if leaf.outer.requires_grad and leaf.outer.is_leaf:
                    handle = leaf.outer.register_hook(_no_gradient(leaf.name))
                    self._undo.append(handle.remove)

    def restore(self) -> None:
        """Undo everything, last first; what fails does not keep the rest from it."""
        failure: BaseException | None = None
        self.carrier.drain()
        while self._undo:
            try:
                self._undo.pop()()
            except BaseException as error:
                failure = failure or error
        self.homes.close()
        if failure is not None:
            raise failure

    # -- while it is attached ---------------------------------------------------------------------

    def stay(self, unit: Unit) -> None:
        """Bring a unit to the device for good, into memory of its own."""
        if unit.index in self._staying:
            return
        self._staying.add(unit.index)
        memory = self.carrier.slot(unit.nbytes)
        self.carrier.await_filled(self.carrier.fetch(unit.home, memory, unit.nbytes, ()))
        unit.stay(memory)
        self.carrier.drain()  # copies that nobody waits for may be reading it still
        unit.home.close()

    def go(self, unit: Unit) -> None:
        """Put a unit away again that was to stay."""
        if unit.index in self._staying:
            self._staying.remove(unit.index)
            self.rehome(unit)

    def rehome(self, unit: Unit) -> None:
        """Give a unit whose tensors somebody changed or exchanged a home that holds them so."""
        leaves = [
            leaf
            for module in unit.modules
            for leaf in leaves_of(module, unit.name, apart=self._inner(unit, module))
        ]
        others = [other for other in self.units if other is not unit]
        outside = {id(leaf.tensor) for other in others for leaf in other.leaves}
        moved = [
            leaf
            for leaf in leaves
            if to_stream(leaf, some_frozen=self._some_frozen) and id(leaf.tensor) not in outside
        ]
        layout = Layout(segments_of(moved))
        old = unit.home
        if unit.shown is None:
            old.check()
        home = self.homes.make(layout)
        if unit.shown is None:
            old.check()
        unit.settle_in(layout, home)
        self.carrier.drain()  # copies that nobody waits for may be reading it still
        self.homes.replaced(old)
        streamed = {id(leaf.tensor) for leaf in moved}
        _move([leaf for leaf in leaves if id(leaf.tensor) not in streamed], self.carrier.device)

    def _inner(self, unit: Unit, module: nn.Module) -> list[nn.Module]:
        """Return the modules of other units within one of this unit's."""
        others = {id(m): m for other in self.units if other is not unit for m in other.modules}
        return [others[id(m)] for m in module.modules() if id(m) in others and m is not module]


class _Origin:
    """Where a segment was before; `device` is None for tensors that had no values."""

    def __init__(self, segment: Segment) -> None:
        self.leaves = list(segment.leaves)
        self.places = list(segment.places)
        tensor = self.leaves[0].tensor
        self.device = None if tensor.is_meta else tensor.device

    def make_real(self) -> Iterator[Tensor]:
        """Turn tensors that are on no device into tensors on the host, and yield them."""
        if self.device is not None:
            return
        for leaf in self.leaves:
            _put_on(leaf.tensor, "cpu")
            yield leaf.tensor


@contextmanager
def _as_they_were(leaves: Sequence[Leaf]) -> Iterator[None]:
    """Give tensors back the memory that they have now if what is done in the scope fails."""
    with plain():
        before = [(leaf.tensor, leaf.tensor.data) for leaf in leaves if not leaf.tensor.is_meta]
    try:
        yield
    except BaseException:
        for tensor, data in before:
            put_data(tensor, data)
        raise


def on_no_device(tensor: Tensor) -> None:
    """Take a tensor's values away, which are lost; it stays the same object."""
    _put_on(tensor, "meta")


def _put_on(tensor: Tensor, device: str) -> None:
    """Give a tensor memory elsewhere, without values; ``.data`` cannot change the device so."""
    shape, strides = tensor.shape, tensor.stride()
    with torch.inference_mode(tensor.is_inference()):
        other: Any = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, requires_grad=tensor.requires_grad)
            other.__class__ = type(tensor)
    torch.utils.swap_tensors(tensor, other)


def _move(leaves: Sequence[Leaf], device: torch.device) -> None:
    for segment in segments_of(leaves):
        now = bytes_of(segment)
        if now.device == device:
            continue
        memory = now.to(device)
        for leaf, place in zip(segment.leaves, segment.places, strict=True):
            put_data(leaf.tensor, place.over(memory))


def _no_gradient(name: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise OffloadError(
            f"got a backward pass that wants the gradient of {name}, whose values only stream by, "
            "expected frozen weights: model.requires_grad_(False), then train adapters beside them"
        )

    return refuse

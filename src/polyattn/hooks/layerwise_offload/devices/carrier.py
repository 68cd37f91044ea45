"""The contract of what carries weights: :class:`Carrier`, and what it gives back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from polyattn.hooks.layerwise_offload.sources import Source

__all__ = ["Carrier", "Fetch"]


class Fetch:
    """One filling of a slot: how much, and whether anybody waited for it.

    >>> from polyattn.hooks.layerwise_offload.devices import Fetch
    >>> Fetch(4096).awaited
    False
    """

    def __init__(self, nbytes: int, handle: Any = None) -> None:
        self.nbytes = nbytes
        self.handle = handle  # what the carrier waits for
        self.awaited = False
        self.counted = False


class Carrier(ABC):
    """Fills slots and keeps the order of copies and computations.

    >>> from polyattn.hooks.layerwise_offload.devices import Carrier, carrier_for
    >>> import torch
    >>> isinstance(carrier_for(torch.device("cpu")), Carrier)
    True
    """

    device: torch.device
    locks_host = False
    """Whether host memory is locked for it."""
    needs_files = False
    """Whether units must live in files, for host memory is where they are brought to."""

    @abstractmethod
    def slot(self, nbytes: int) -> Tensor:
        """Return memory for a slot (uint8)."""

    @abstractmethod
    def stream(self) -> Any:
        """Return where the caller computes now, something hashable; None: at once, in order."""

    @abstractmethod
    def fetch(self, source: Source, slot: Tensor, nbytes: int, users: Iterable[Any]) -> Fetch:
        """Begin to fill a slot from `source` once all is done that `users`, streams, do by now."""

    @property
    def readers(self) -> tuple[int, ...]:
        """How many threads may read from files, the usual number first; () where that is fixed."""
        return ()

    def use_readers(self, count: int) -> None:
        """Read from files by so many threads from now on, where that can be chosen."""
        del count

    @abstractmethod
    def await_filled(self, fetch: Fetch) -> None:
        """Hold the caller's computation back until it is filled."""

    @abstractmethod
    def finish(self, fetch: Fetch) -> None:
        """Have the host wait until a filling is over: what it was copied from may change then."""

    @abstractmethod
    def copied(self, fetch: Fetch) -> tuple[float, float]:
        """Return when the copies of a filling that was waited for began, and the seconds of them.

        On the clock of `when`; waits for them if need be.
        """

    @abstractmethod
    def abandon(self, fetch: Fetch) -> None:
        """Nobody waits for it: no byte of it comes after what fills its slot next."""

    @abstractmethod
    def retire(self, slot: Tensor, fetch: Fetch | None, users: Iterable[Any]) -> None:
        """Give up a slot; its memory stays until its filling and all that `users` do is over."""

    @abstractmethod
    def wait_for(self, users: Iterable[Any]) -> None:
        """Wait until all is done that `users`, streams, do by now."""

    @abstractmethod
    def write_back(self, slot: Tensor, segments: Iterable[tuple[Tensor, int]]) -> None:
        """Copy parts of a slot, each from a byte on, into memory on the host, and wait.

        Whoever changed the slot was waited for.
        """

    @abstractmethod
    def stamp(self) -> Any:
        """Note the time at which the caller's computation gets here."""

    @abstractmethod
    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two stamps; waits for it if need be."""

    @abstractmethod
    def when(self, stamp: Any) -> float:
        """Return the seconds of a stamp on the carrier's clock; waits for it if need be."""

    @abstractmethod
    def drain(self) -> None:
        """Wait for all that was begun, so that slots, and what fills them, may go."""

    @abstractmethod
    def close(self) -> None:
        """Wait for everything and give back what the carrier holds."""

"""Which trace is active. It is part of the key under which JAX keeps compiled functions.

So a function compiled without a trace is never run under one, nor the other way round; a second
trace with the same options takes the first one's place and its compiled functions.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from polyattn.errors import TraceError

__all__ = [
    "Active", "Rank", "Tapped", "active", "as_active", "deliver", "deliver_part", "free", "occupy",
]  # fmt: skip

# Older versions of JAX lack it, and polyattn.jax has more that works with them.
_context: Any = jax.make_user_context(None) if hasattr(jax, "make_user_context") else None
_receivers: dict[int, Callable[[Tapped, Any, Rank | None], None]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Active:
    """What a compiled function needs to know of a trace; the run itself is found by its `slot`."""

    slot: int
    layers: str | None = None
    gradients: bool = False
    ordered: bool = True

    def wants(self, module: str) -> bool:
        return self.layers is None or re.search(self.layers, module) is not None


@dataclass(frozen=True)
class Tapped:
    """A tensor's place in the model. `position`: the order in which the taps were traced."""

    module: str
    phase: str
    tensor: str
    cls: str
    shape: tuple[int, ...]
    dtype: Any
    position: int


@dataclass(frozen=True)
class Rank:
    """A device within ``shard_map``: `number` of `world` along the axes it is called over."""

    number: int
    world: int


def active() -> Active | None:
    """Return the trace of this thread, None if there is none."""
    return None if _context is None else _context.value


def as_active(value: Active | None) -> Any:
    """Return a context in which `value` is the trace of this thread."""
    if _context is None:
        raise TraceError(
            f"got jax {jax.__version__}, expected 0.8 or later: without make_user_context a "
            "function that was compiled before the trace would run without its taps. Update JAX."
        )
    return _context(value)


def occupy(receiver: Callable[[Tapped, Any, Rank | None], None]) -> int:
    """Return the lowest free slot, now of `receiver`."""
    with _lock:
        slot = next(n for n in range(len(_receivers) + 1) if n not in _receivers)
        _receivers[slot] = receiver
        return slot


def free(slot: int) -> None:
    """Let a later trace have the slot; what still comes for it is dropped."""
    with _lock:
        _receivers.pop(slot, None)


def deliver(slot: int, tapped: Tapped, vector: Any) -> None:
    """Hand over what the device sent. Nobody takes it if the trace has ended since."""
    receiver = _receivers.get(slot)
    if receiver is not None:
        receiver(tapped, vector, None)


def deliver_part(slot: int, tapped: Tapped, world: int, rank: Any, vector: Any) -> None:
    """Hand over what one device of many sent of its part."""
    receiver = _receivers.get(slot)
    if receiver is not None:
        receiver(tapped, vector, Rank(int(rank), world))

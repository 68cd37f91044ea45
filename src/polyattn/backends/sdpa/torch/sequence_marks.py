"""Where sequences begin that lie one behind the other: what FlashAttention takes as `cu_seqlens`.

What follows from shapes alone is made once and kept, since to make it costs the host as much as all
else of a short call. Nothing that is kept is given up: any stream may be reading it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.torch.internals import are_transforms_active, dispatch_modes
from polyattn.torch.kit.masking import may_be_kept

__all__ = ["Point", "Side", "begins", "marks"]

Point = Tensor | int
Made = tuple[Tensor, ...]
_MOST_KEPT = 512


class Side(NamedTuple):
    """The points at which sequences of a batch entry end, and how many rows apart entries begin.

    A point is a number, or (B,) int32.
    """

    points: Sequence[Point]
    step: int


def begins(batch: int, step: int, device: torch.device) -> Tensor:
    """Return where batch entries begin and the last one ends: (B + 1,) int32, `step` rows apart.

    >>> begins(3, 5, torch.device("cpu")).tolist()
    [0, 5, 10, 15]
    """
    return _kept(lambda: (batch, step), device, lambda: (_ramp(batch + 1, device) * step,))[0]


def marks(sides: Sequence[Side], batch: int, device: torch.device) -> Made:
    """Return for each side where its sequences begin and the last one ends: int32, 0 first.

    Sides have as many sequences as the longest, the last ones of others are empty.

    >>> side = Side([torch.tensor([2, 0], dtype=torch.int32), 4], 4)
    >>> [x.tolist() for x in marks([side, Side([4], 4)], 2, torch.device("cpu"))]
    [[0, 2, 4, 4, 8], [0, 4, 4, 8, 8]]
    """
    count = max(len(side.points) for side in sides)
    points = [[*side.points, *[side.points[-1]] * (count - len(side.points))] for side in sides]
    bounds: list[Tensor] = []
    for point in (point for side in points for point in side if isinstance(point, Tensor)):
        if not any(point is bound for bound in bounds):
            bounds.append(point)
    numbers = [[0 if isinstance(x, Tensor) else x for x in side] for side in points]
    places = [[[int(x is bound) for x in side] for side in points] for bound in bounds]
    steps = [side.step for side in sides]

    def make() -> Made:
        zero = _ramp(1, device).expand(len(sides), 1)
        first = _ramp(batch, device) * _column(steps, device)  # (sides, B)
        fixed = first.unsqueeze(-1) + _table(numbers, device).unsqueeze(1)  # (sides, B, count)
        return (zero, fixed, *(_table(place, device).unsqueeze(1) for place in places))

    zero, ends, *factors = _kept(lambda: repr((numbers, places, steps, batch)), device, make)
    for factor, bound in zip(factors, bounds, strict=True):
        ends = ends + factor * bound.unsqueeze(-1)
    return torch.cat([zero, ends.flatten(1)], 1).unbind(0)


def _ramp(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)


def _column(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers one below the other, made on the device: copies to it are waited for."""
    return torch.stack([torch.full((1,), x, dtype=torch.int32, device=device) for x in numbers])


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    return torch.stack([_column(row, device).squeeze(-1) for row in rows])


class _Filled(NamedTuple):
    """Arrays on a device; `done` tells when they are there, None once that has been asked."""

    arrays: Made
    done: torch.cuda.Event | None


_filled: dict[Any, _Filled] = {}


def _kept(of: Callable[[], Any], device: torch.device, make: Callable[[], Made]) -> Made:
    """Return what was made once: given to every stream, and to graphs, as soon as it is there."""
    if torch.compiler.is_compiling() or dispatch_modes() or are_transforms_active():
        return make()
    key = of(), device
    found = _filled.get(key)
    if found is not None and found.done is None:
        return found.arrays
    if not may_be_kept(device):
        return make()
    if found is not None:
        assert found.done is not None
        if not found.done.query():
            return make()
        _filled[key] = _Filled(found.arrays, None)
        return found.arrays
    with torch.inference_mode(False):  # it may serve a call that trains
        arrays = make()
    if len(_filled) < _MOST_KEPT:
        _filled[key] = _Filled(arrays, _recorded(device))
    return arrays


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return done

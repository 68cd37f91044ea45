"""Where sequences begin that lie one behind the other: what FlashAttention takes as `cu_seqlens`.

Numbers that follow from shapes alone are made once and kept, since to make them costs the host as
much as all else of a short call. Nothing that is kept is given up: any stream may be reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from polyattn.torch.internals import are_transforms_active, dispatch_modes
from polyattn.torch.kit.masking import may_be_kept

__all__ = ["Point", "begins", "marks"]

Point = Tensor | int
_MOST_KEPT = 512


class _Filled(NamedTuple):
    """Numbers on a device; `done` tells when they are there, None once that has been asked."""

    numbers: Tensor
    done: torch.cuda.Event | None


_filled: dict[tuple[int, int, torch.device], _Filled] = {}


def marks(points: Sequence[Point], batch: int, step: int, device: torch.device) -> Tensor:
    """Return where sequences end: `points` of each batch entry, which begin `step` rows apart.

    (1 + B * points,) int32, with 0 in front; a point is a number, or (B,) int32.

    >>> marks([torch.tensor([2, 0], dtype=torch.int32), 4], 2, 4, torch.device("cpu")).tolist()
    [0, 2, 4, 4, 8]
    """
    if len(points) == 1 and not isinstance(points[0], Tensor) and points[0] == step:
        return begins(batch, step, device)
    first = begins(batch, step, device)[:-1]
    columns = [first + point for point in points]
    return torch.nn.functional.pad(torch.stack(columns, 1).flatten(), (1, 0))


def begins(batch: int, step: int, device: torch.device) -> Tensor:
    """Return where batch entries begin and the last one ends: (B + 1,) int32, `step` rows apart.

    >>> begins(3, 5, torch.device("cpu")).tolist()
    [0, 5, 10, 15]
    """
    if torch.compiler.is_compiling() or dispatch_modes() or are_transforms_active():
        return _ramp(batch, device) * step
    key = batch, step, device
    found = _filled.get(key)
    if found is None:
        return _kept(key)
    if found.done is None:
        return found.numbers
    if not may_be_kept(device) or not found.done.query():  # of no use yet, to a stream of its own
        return _ramp(batch, device) * step
    _filled[key] = _Filled(found.numbers, None)
    return found.numbers


def _ramp(batch: int, device: torch.device) -> Tensor:
    return torch.arange(batch + 1, dtype=torch.int32, device=device)


def _kept(key: tuple[int, int, torch.device]) -> Tensor:
    batch, step, device = key
    if len(_filled) >= _MOST_KEPT or not may_be_kept(device):
        return _ramp(batch, device) * step
    with torch.inference_mode(False):  # they may serve a call that trains
        numbers = _ramp(batch, device) * step
    done = None
    if device.type == "cuda":
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(device))
    _filled[key] = _Filled(numbers, done)
    return numbers

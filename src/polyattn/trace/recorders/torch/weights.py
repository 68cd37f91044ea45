"""Fingerprints of a model's weights, computed where they are."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from polyattn.trace.recorders.torch.readable_tensors import plain, without_values
from polyattn.trace.recorders.torch.statistics_by_operations import real_values
from polyattn.trace.recorders.torch.tensor_statistics import SKETCH, tensor_statistics
from polyattn.trace.statistics.sketch_text import pack

__all__ = ["remembered_fingerprints", "weight_fingerprint", "weight_fingerprints"]

logger = logging.getLogger("polyattn.trace")

_CPU_CHUNK, _DEVICE_CHUNK = 1 << 17, 1 << 24
_Along = list[list[Tensor]]
_Key = tuple[torch.dtype, torch.Size, bytes]
_memory: ContextVar[dict[_Key, object] | None] = ContextVar("fingerprints", default=None)


def weight_fingerprints(model: nn.Module) -> dict[str, object]:
    """Return the fingerprint of each parameter that has values, tied ones under all their names.

    They are as :func:`polyattn.trace.fingerprints.fingerprint` gives them.
    """
    made: dict[int, object] = {}
    found: dict[str, object] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = _remembered(parameter)
        if made[id(parameter)] is not None:
            found[name] = made[id(parameter)]
    return found


@contextmanager
def remembered_fingerprints() -> Iterator[None]:
    """Compute the fingerprint of a weight's values once while this is on, as of copies of a model.

    Values are known again by their bytes, never by where they are: what changed is computed anew.

    >>> model = nn.Linear(2, 2)
    >>> with remembered_fingerprints():
    ...     weight_fingerprints(model) == weight_fingerprints(model)
    True
    """
    token = _memory.set({})
    try:
        yield
    finally:
        _memory.reset(token)


def _remembered(weight: Tensor) -> object:
    memory = _memory.get()
    if memory is None or not _in_bytes(weight) or without_values(weight):
        return weight_fingerprint(weight)
    with torch.no_grad():
        stored = weight.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    key = weight.dtype, weight.shape, hashlib.blake2b(stored.data, digest_size=32).digest()
    if key not in memory:
        memory[key] = weight_fingerprint(weight)
    return memory[key]


def _in_bytes(weight: Tensor) -> bool:
    """Whether its bytes are all that there is to its values."""
    usual = type(weight) is nn.Parameter and weight.is_cpu and weight.layout == torch.strided
    return usual and not (weight.is_quantized or weight.is_nested or weight.is_complex())


def weight_fingerprint(weight: Tensor) -> object:
    """Return a tensor's fingerprint, or None for one that has no values here or no plain numbers.

    >>> weight_fingerprint(torch.ones(2, 3))["sum"]
    6.0
    """
    try:
        return _fingerprint(weight)
    except Exception as error:  # sparse, quantised, or of a library that keeps them elsewhere
        logger.debug("a weight, a %s, has no fingerprint: %s", type(weight).__name__, error)
        return None


def _fingerprint(weight: Tensor) -> object:
    from polyattn.trace import fingerprints

    t = plain(weight)
    if t is None or t.is_nested or without_values(t):
        return None
    with torch.no_grad(), torch.inference_mode(False):
        values = real_values(t.detach())
        if values.device.type == "mps":  # it has no float64
            values = values.cpu()
        along = [torch.stack(of).cpu().numpy() for of in _marginals(values)]
        sketch = pack(tensor_statistics(t.detach())[SKETCH].tolist())
    dtype = str(weight.dtype).removeprefix("torch.")
    return fingerprints.assemble(tuple(t.shape), dtype, along, sketch)


def _marginals(values: Tensor) -> _Along:
    """For each dimension: sum, of squares, of cubes, min and max over all the others."""
    if values.dim() == 0:
        values = values[None]
    begin = torch.tensor([0, 0, 0, torch.inf, -torch.inf], dtype=torch.float64)
    found = [list(begin.to(values.device).repeat(size, 1).T.contiguous()) for size in values.shape]
    if values.numel() == 0:
        return found
    chunk = _CPU_CHUNK if values.is_cpu else _DEVICE_CHUNK
    rows = max(1, chunk * len(values) // values.numel())
    for start in range(0, len(values), rows):
        _add(values[start : start + rows].double(), start, found)
    return found


def _add(block: Tensor, start: int, found: _Along) -> None:
    if not bool(block.sum().isfinite()):
        block = block.nan_to_num(0.0, 0.0, 0.0)
    square = block * block
    powers = (block, square, square * block)
    for dim, of in enumerate(found):
        others = [other for other in range(block.dim()) if other != dim]
        at = slice(start, start + len(block)) if dim == 0 else slice(None)
        for power, total in zip(powers, of, strict=False):
            total[at] += power.sum(others) if others else power
        low, high = (block.amin(others), block.amax(others)) if others else (block, block)
        of[3][at] = torch.minimum(of[3][at], low)
        of[4][at] = torch.maximum(of[4][at], high)

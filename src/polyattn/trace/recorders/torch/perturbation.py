"""Weights moved by at most a rounding, so that a rerun shows which differences mean nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyattn.errors import TraceError
from polyattn.trace.recorders.torch.readable_tensors import without_values

__all__ = ["Perturbation", "perturbation_of"]

logger = logging.getLogger("polyattn.trace")

_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}
_COMPLEX = (torch.complex64, torch.complex128)
_CPU_CHUNK, _DEVICE_CHUNK = 1 << 18, 1 << 24
_NAMED = 4
_LONGEST = 160

_Place = tuple[Any, ...]


class _Moved(NamedTuple):
    """A weight that was perturbed: its generator's seed, and its old values if they are kept."""

    weight: Tensor
    name: str
    seed: int
    old: Tensor | None


class Perturbation:
    """Multiplies each floating-point parameter by ``1 + eps * u``, u uniform in -1..1.

    eps is the spacing of the parameter's dtype. A parameter that several models share is perturbed
    once. The old values are kept, which takes as much memory again, unless `keep` is False.
    `left`: the parameters that stay as they are, with the reason. Raises TraceError for a seed that
    is none.

    >>> model = nn.Linear(2, 2)
    >>> before = model.weight.clone()
    >>> perturbation = Perturbation(seed=1)
    >>> perturbation.apply(model), perturbation.changed
    (None, 2)
    >>> bool((model.weight != before).any()), perturbation.undo()
    (True, [])
    >>> torch.equal(model.weight, before)
    True
    """

    def __init__(self, seed: int, *, keep: bool = True) -> None:
        if type(seed) is not int or not 0 <= seed < 2**32:
            raise TraceError(f"got perturb={seed!r:.80}, expected a seed: an integer, 0 or more.")
        self.seed = seed
        self.changed = 0
        self.left: list[str] = []
        self._keep = keep
        self._moved: dict[int, _Moved] = {}

    def apply(self, model: nn.Module) -> None:
        """Perturb a model's parameters that were not yet."""
        places = {_place(one.weight) for one in self._moved.values()}
        left = []
        for name, weight in model.named_parameters():
            if id(weight) in self._moved:
                continue
            reason = _unfit(weight)
            if reason:
                left.append(f"{name} ({reason})")
            elif _place(weight) not in places:
                places.add(_place(weight))
                self._move(name, weight)
        if left:
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            logger.warning(
                "%d weights of a %s cannot be perturbed and stay as they are: %s%s",
                len(left),
                type(model).__name__,
                ", ".join(left[:_NAMED]),
                more,
            )
            self.left += left

    def _move(self, name: str, weight: Tensor) -> None:
        values = _values(weight)
        seed = (self.seed << 31) + self.changed
        self.changed += 1
        with _writable(weight):
            old = values.clone() if self._keep else None
            _multiply(values, seed)
        self._moved[id(weight)] = _Moved(weight, name, seed, old)

    def undo(self) -> list[str]:
        """Give all weights their old values, bit for bit; return the names of those that it cannot.

        What the program has changed since, as by training, stays as the program left it.
        """
        moved, self._moved = self._moved, {}
        changed = []
        for one in moved.values():
            if one.old is not None and not _restored(one.weight, one.old, one.seed):
                changed.append(one.name)
        if changed:
            logger.warning(
                "%d weights were changed while they were perturbed and stay as they are now, the "
                "first is %s",
                len(changed),
                changed[0],
            )
        return changed

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: the seed, how many weights were changed, and which were not."""
        return {"seed": self.seed, "changed": self.changed, "left": self.left}

    def __str__(self) -> str:
        left = f", {len(self.left)} stay as they are" if self.left else ""
        return f"{self.changed} weights perturbed with seed {self.seed}{left}"


def perturbation_of(
    given: int | Perturbation | None,
) -> tuple[Perturbation | None, Perturbation | None]:
    """Return the perturbation that is meant, and again if it is a new one, from a seed.

    Whoever gave one undoes it; a new one is the caller's to undo.

    >>> perturbation_of(None)
    (None, None)
    """
    if given is None or isinstance(given, Perturbation):
        return given, None
    new = Perturbation(given)
    return new, new


def _unfit(weight: Tensor) -> str:
    """Why a parameter cannot be perturbed; empty if it can."""
    try:
        return _reason(weight)
    except Exception as error:  # one that lets nobody ask
        return f"{type(error).__name__}: {error}"[:_LONGEST]


def _reason(weight: Tensor) -> str:
    distributed = _local(weight) is not weight
    custom = type(weight).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if nn.parameter.is_lazy(weight):
        return "not initialised"
    if custom and not distributed:
        return type(weight).__name__
    weight = _local(weight)
    if weight.is_meta:
        return "on the meta device"
    if weight.layout != torch.strided or weight.is_quantized or weight.is_nested:
        kind = "nested" if weight.is_nested else str(weight.layout).removeprefix("torch.")
        return "quantised" if weight.is_quantized else kind
    if weight.dtype not in _WIDER and weight.dtype not in _COMPLEX:
        return str(weight.dtype).removeprefix("torch.")
    shared = zip(weight.shape, weight.stride(), strict=True)
    if any(size > 1 and not stride for size, stride in shared):
        return "expanded"
    return "freed" if without_values(weight) else ""


def _local(weight: Any) -> Any:
    """A distributed tensor's part of this rank; any other as it is."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


def _place(weight: Tensor) -> _Place:
    """Where the values are; the same for parameters that share them."""
    t = _local(weight).detach()
    return t.device, t.data_ptr(), t.dtype, tuple(t.shape), t.stride()


def _values(weight: Tensor) -> Tensor:
    """The values, as real numbers, to be changed unseen by autograd."""
    values = _local(weight.detach()).data
    if type(values) is not Tensor:
        values = values.as_subclass(Tensor)
    return torch.view_as_real(values) if values.is_complex() else values


@contextmanager
def _writable(weight: Tensor) -> Iterator[None]:
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        yield


def _multiply(values: Tensor, seed: int) -> None:
    """Multiply in place, a few rows at a time. Zeros, NaN and infinities stay."""
    rows = values if values.dim() else values[None]
    generator = torch.Generator(values.device).manual_seed(seed)
    info, wide = torch.finfo(values.dtype), _WIDER[values.dtype]
    chunk = _CPU_CHUNK if values.is_cpu else _DEVICE_CHUNK
    step = max(1, chunk * len(rows) // max(rows.numel(), 1))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        factor = torch.rand(block.shape, generator=generator, dtype=wide, device=values.device)
        factor.mul_(2 * info.eps).add_(1 - info.eps)
        moved = factor.mul_(block)
        if not _far_from(info.max, block):  # or the largest numbers would become infinite
            moved = torch.where(moved.to(values.dtype).isfinite(), moved, block)
        block.copy_(moved)


def _far_from(limit: float, block: Tensor) -> bool:
    """Whether all are finite, and no rounding makes them infinite; NaN is not."""
    if not block.numel():
        return True
    low, high = block.aminmax()
    return bool((low > -limit / 2) & (high < limit / 2))


def _restored(weight: Tensor, old: Tensor, seed: int) -> bool:
    """Put the old values back, unless these are no longer the ones that `_multiply` made."""
    unfit = _unfit(weight)
    if unfit:
        return False
    values = _values(weight)
    if (values.shape, values.dtype) != (old.shape, old.dtype):
        return False
    with _writable(weight):
        expected = old.clone()
        _multiply(expected, seed)
        if not torch.equal(_bits(values), _bits(expected.to(values.device))):
            return False
        values.copy_(old)
    return True


def _bits(values: Tensor) -> Tensor:
    """The values as integers, for which NaN equals itself."""
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(sizes[values.element_size()])

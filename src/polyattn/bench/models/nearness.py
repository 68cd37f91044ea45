"""Whether two runs of a model say the same, by the rule of `polyattn.conformance.tolerance`.

    error(ours, float64) <= 2 * error(the library's own attention, float64) + a few ulp

An error is measured in units of the root mean square of the tensor, not of each element's own
terms: a hidden state has gone through every layer, and what is behind one element is all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from polyattn.conformance.tolerance import Excess, Yardstick, measure

__all__ = ["Compared", "compare", "in_float64", "tensors_of"]


@dataclass(frozen=True)
class Compared:
    """The worst of what is outside of the rule, and the largest share of the allowed error."""

    excess: Excess | None
    share: float


def compare(
    ours: Mapping[str, Tensor],
    stock: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    valid: Tensor | None = None,
) -> Compared:
    """Compare the outputs of three runs of one model; `valid` (B, T) says which positions count.

    With `valid`, only outputs (B, T, ...) are compared. Probabilities, which only eager attention
    has, are not.
    """
    found, share = None, 0.0
    stock = {name: x for name, x in stock.items() if name in ours or "attentions" not in name}
    if ours.keys() != stock.keys():
        only = sorted(ours.keys() ^ stock.keys())
        return Compared(Excess("outputs", f"{only} are in one of the runs only"), float("inf"))
    for name, want in stock.items():
        got, truth = ours[name], exact.get(name, want).double()
        if valid is not None:
            if want.shape[:2] != valid.shape or got.shape != want.shape:
                continue
            got, want, truth = got[valid], want[valid], truth[valid]
        if got.numel() == 0 or not bool(truth.isfinite().all()):
            continue
        yardstick = _yardstick(name, want, truth)
        excess = measure(got, yardstick)
        found = found or excess
        share = max(share, _share(got, want, truth))
    return Compared(found, share)


def _yardstick(name: str, stock: Tensor, truth: Tensor) -> Yardstick:
    scale = truth.pow(2).mean().sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    return Yardstick(name, truth, scale.expand(truth.shape), 0.0, lambda: stock)


def _share(got: Tensor, stock: Tensor, truth: Tensor) -> float:
    if got.shape != truth.shape:
        return float("inf")
    off, allowed = (got.double() - truth).abs().max(), (stock.double() - truth).abs().max()
    room = truth.pow(2).mean().sqrt() * 5 * torch.finfo(got.dtype).eps
    return float(off / (2 * allowed + room + torch.finfo(torch.float64).tiny))


def tensors_of(found: Any, at: str = "") -> dict[str, Tensor]:
    """Return the floating-point tensors in what a model returned, by their paths."""
    return dict(_tensors(found, at))


def _tensors(found: Any, at: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield at, found
        return
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(found, Mapping):
        parts = found.items()
    elif isinstance(found, (list, tuple)):
        parts = enumerate(found)
    for name, part in parts:
        yield from _tensors(part, f"{at}.{name}" if at else str(name))


class _Float64(TorchFunctionMode):
    """Keeps float64 where a model asks for float32, as it does to be exact in half types.

    What it makes in float32 (positions, time steps) is made in float64; what it has kept in float32
    past its buffers, or got from NumPy, is widened where it meets float64.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if func is not Tensor.view:  # of which a dtype means other bits
            args = tuple(torch.float64 if x is torch.float32 else x for x in args)
            if named.get("dtype") is torch.float32:
                named["dtype"] = torch.float64
        given = [x for x in _flat((*args, *named.values())) if x.is_floating_point()]
        in_place = getattr(func, "__name__", "").endswith("_")
        if len({x.dtype for x in given}) > 1 and not in_place:
            args, named = _widened(args), _widened(named)
        found = func(*args, **named)
        made = not types and isinstance(found, Tensor) and found.dtype is torch.float32
        return found.double() if made else found


def _flat(given: Any) -> Iterator[Tensor]:
    for one in given:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _flat(one)


def _widened(given: Any) -> Any:
    if isinstance(given, Tensor):
        return given.double() if given.dtype is torch.float32 else given
    if isinstance(given, dict):
        return {name: _widened(one) for name, one in given.items()}
    return type(given)(map(_widened, given)) if type(given) in (list, tuple) else given


@contextmanager
def in_float64() -> Iterator[None]:
    """Run a model that was made ``.double()`` in float64 throughout."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of what is made with no dtype
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)

"""Effect: whether a seeded bug changes anything beyond rounding, measured on whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from polyattn_faults.operations import tensors_of

__all__ = ["Seen", "apart", "seen"]

Seen = dict[str, list[Tensor]]
"""Tensors in the order of the run: what went into a module, under its name with <; what came out,
with >; and what was left then of what had gone in, with =."""


@contextmanager
def seen(model: nn.Module, names: Sequence[str] | None = None) -> Iterator[Seen]:
    """Keep what modules are given and return: all, or those of these names and their children."""
    found: Seen = {}
    handles = []

    def into(name: str) -> Any:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            keep(name + "<", (args, kwargs))

        return before

    def out_of(name: str) -> Any:
        def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
            keep(name + ">", out)
            keep(name + "=", (args, kwargs))

        return after

    def keep(key: str, value: Any) -> None:
        found.setdefault(key, []).extend(one.detach().clone() for one in tensors_of(value))

    for name, module in model.named_modules():
        if names is None or name in names or any(_child(name, of) for of in names):
            handles.append(module.register_forward_pre_hook(into(name), with_kwargs=True))
            handles.append(module.register_forward_hook(out_of(name), with_kwargs=True))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _child(name: str, of: str) -> bool:
    """Whether the code of `of` may call it: it is below, perhaps in a list or the like."""
    below = bool(name) and (not of or name.startswith(f"{of}."))
    return below and name.removeprefix(of).lstrip(".").count(".") < 4


def apart(reference: Seen, port: Seen, names: Sequence[str]) -> float:
    """Return how far the modules' own doings are apart, at most: what they return, hand on, and
    leave of what they were given.

    Relative to the norm, or to a typical element for a single one; infinite where sizes differ.
    """
    keys = [key for key in port if key[:-1] in names and key[-1] in ">="]
    keys += [k for k in port if k.endswith("<") and any(_child(k[:-1], of) for of in names)]
    found = 0.0
    for key in keys:
        ours, theirs = reference.get(key, []), port[key]
        if len(ours) != len(theirs):
            return float("inf")
        for one, other in zip(ours, theirs, strict=True):
            found = max(found, _distance(one, other))
    return found


def _distance(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    if not one.is_floating_point():
        return 0.0 if one.equal(other) else float("inf")
    a, b = one.double(), other.double()
    if not bool(b.isfinite().all()):
        return (
            0.0
            if bool(a.isfinite().logical_not().equal(b.isfinite().logical_not()))
            else float("inf")
        )
    norm = float(a.norm())
    return float((a - b).norm()) / norm if norm else float(b.norm() > 0)

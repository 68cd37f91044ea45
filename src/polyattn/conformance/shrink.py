"""Make a failing case smaller while it still fails in the same way, so that its line says why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from polyattn.conformance.cases import Case, Tree
from polyattn.errors import InvalidProblem

__all__ = ["shrink"]

_PLAIN = Case()
_DROPPED = (
    "quantized",
    "mask",
    "bias",
    "sinks",
    "softcap",
    "scale",
    "poison",
    "deterministic",
    "lse",
    "strides",
    "grad",
)
_SIZES = ("b", "n", "t", "s", "h", "v")


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 80) -> Case:
    """Return the smallest case found with at most `tries` calls of `fails`."""
    left = tries
    progress = True
    while progress and left > 0:
        progress = False
        for smaller in _smaller(case):
            left -= 1
            if left < 0:
                break
            try:
                still = fails(smaller)
            except InvalidProblem:
                continue
            if still:
                case, progress = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    for name in _DROPPED:
        if getattr(case, name) != (plain := getattr(_PLAIN, name)):
            changes: dict[str, Any] = {name: plain}
            gone = {"bias": "b", "sinks": "s"}.get(name)
            yield case.with_(**changes, **({"grad": case.grad.replace(gone, "")} if gone else {}))
    for tree in _subtrees(case.mask):
        yield case.with_(mask=tree)
    if case.n != case.k:
        yield case.with_(n=case.k)
    elif case.k > 1:
        yield case.with_(n=1, k=1)
    for name in _SIZES:
        size = getattr(case, name)
        for smaller in (1, size // 2, size - 1):
            if name != "n" and 0 < smaller < size:
                changes = {name: smaller}
                if name == "h" and case.v == case.h:
                    changes["v"] = smaller
                yield case.with_(**changes)
    if case.dtype != "float32":
        yield case.with_(dtype="float32")
    if case.layout == "BTNH":
        yield case.with_(layout="BNTH")


def _subtrees(tree: Tree | None) -> Iterator[Tree]:
    if tree is not None and tree[0] in ("and", "or", "not"):
        yield from tree[1:]

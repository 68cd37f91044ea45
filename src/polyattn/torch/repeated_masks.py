"""Masks of further calls of a class, and what is kept of one that comes again.

A model hands the same mask to all of its layers: its key, what it becomes at the sizes of the call
and where its lengths are found is kept while that object comes again. Arrays may hold other values
then, so what lengths hold is checked in each call; not every write to them is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.masks import LeftPadding, Mask, Padding
from polyattn.masks.fits import ends
from polyattn.masks.simplify import simplify
from polyattn.problem import Problem
from polyattn.torch.admission import refuse_sharded
from polyattn.torch.kit.masking import bind_mask, check_mask, is_there, known

__all__ = ["Lengths", "arrays_of_lengths", "rebinder", "signature_of"]

_OF_LENGTHS = (Padding, LeftPadding)
_MOST = 8  # masks that are kept: those of one model's layers


class Lengths(NamedTuple):
    """The sizes of a call that its mask has to fit."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    layout: str


def rebinder(problem: Problem) -> Callable[[Mask, Tensor, Tensor], Mask]:
    """Return ``bind(mask, q, k)`` for calls of one class."""
    kept: tuple[Callable[[], Mask | None], tuple[Any, ...], Mask, Callable[[], bool]] | None = None

    def bind(mask: Mask, q: Tensor, k: Tensor) -> Mask:
        nonlocal kept
        here, last = (q.shape, k.shape, q.device), kept
        again = last is not None and last[0]() is mask and last[1] == here
        if last is not None and again and last[3]():
            return last[2]
        lengths = problem if problem.layout == "packed" else _lengths(problem.layout, q, k)
        if last is not None and again:
            bound = last[2]
        else:
            refuse_sharded(mask)
            bound = _bound(mask, lengths, q.device)
            own = _holds_lengths(mask, q.device)
            kept = (weakref.ref(mask), here, bound, _asker(bound, lengths)) if own else None
        check_mask(bound, lengths)
        return bound

    return bind


def _asker(mask: Mask, lengths: Lengths | Problem) -> Callable[[], bool]:
    """Return what says, sooner than `check_mask`, that a mask of lengths fits; False: ask that."""
    batch, shape = lengths.batch, (lengths.batch,)
    arrays = tuple(
        (x, most)
        for leaf in mask.leaves()
        if type(leaf) in _OF_LENGTHS
        for x, most in zip(leaf.arguments, (lengths.q_len, lengths.kv_len), strict=True)
        if x is not None
    )
    any_read = lengths.layout != "packed" and batch > 0

    def fit() -> bool:
        if not any_read:
            return False
        for x, most in arrays:
            read = known(x)
            if x.shape != shape or read is None:
                return False
            low, high = ends(read)
            if low < 0 or high > most:
                return False
        return True

    return fit


def signature_of(mask: Mask) -> str | None:
    """Return the signature of a mask without arrays but lengths; None for other masks.

    The same object for the same mask, which is the sooner found to be equal.

    >>> mask = Padding(kv_lengths=torch.tensor([3, 4]))
    >>> signature_of(mask), signature_of(mask) is signature_of(mask)
    ('Padding(q=None, kv=2)', True)
    """
    found = _signatures.get(id(mask))
    if found is not None and found[0]() is mask and all(x.shape == s for x, s in found[1]):
        return found[2]
    arrays = arrays_of_lengths(mask)
    if arrays is None:
        return None
    if len(_signatures) >= _MOST:
        _signatures.clear()
    at, signature = id(mask), mask.signature
    held = weakref.ref(mask, lambda _: _signatures.pop(at, None))  # that of a later one, at worst
    _signatures[at] = held, tuple((x, x.shape) for x in arrays), signature
    return signature


_signatures: dict[int, tuple[Callable[[], Mask | None], tuple[Any, ...], str]] = {}


def arrays_of_lengths(mask: Mask) -> list[Tensor] | None:
    """Return the tensors of a mask that holds no arrays but lengths, else None."""
    found = []
    for leaf in mask.leaves():
        if leaf.static:
            continue
        if type(leaf) not in _OF_LENGTHS:
            return None
        arrays = [x for x in leaf.arguments if x is not None]
        if not all(isinstance(x, Tensor) for x in arrays):
            return None
        found += arrays
    return found


def _lengths(layout: str, q: Tensor, k: Tensor) -> Lengths:
    row = 1 if layout == "BTNH" else 2
    return Lengths(q.shape[0], q.shape[3 - row], q.shape[row], k.shape[row], layout)


def _bound(mask: Mask, lengths: Lengths | Problem, device: torch.device) -> Mask:
    """Return a mask as simple as the lengths make it, its arrays on the device."""
    if lengths.layout == "packed":
        return bind_mask(mask, device)
    simple = simplify(mask, lengths.q_len, lengths.kv_len)
    return bind_mask(mask if simple is None else simple, device)


def _holds_lengths(mask: Mask, device: torch.device) -> bool:
    """Say whether all arrays of a mask are a few lengths, and there already: none is copied."""
    arrays = arrays_of_lengths(mask)
    return arrays is not None and all(is_there(x, device) for x in arrays)

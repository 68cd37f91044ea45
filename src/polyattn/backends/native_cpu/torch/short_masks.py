"""The masks of the shortest way: those whose program all calls of one problem share.

A mask without arrays is encoded once. One of lengths is encoded once as well: each further call
only puts the places of its own lengths in. An array of booleans is read by the extension itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.arguments import memory, terms_of
from polyattn.masks import STATIC_KINDS, LeftPadding, Mask, Padding
from polyattn.native.program import OF_LENGTHS, WIDTH, Terms, encode
from polyattn.problem import Problem
from polyattn.torch.internals import is_lazy_copy

__all__ = ["is_short", "terms_reader"]

_OF_LENGTHS = (Padding, LeftPadding)
_LENGTHS = frozenset(kind.__name__ for kind in _OF_LENGTHS)

Reader = Callable[[Any, Tensor, Tensor], tuple[Terms, Any]]


def is_short(problem: Problem) -> bool:
    """Say whether :func:`terms_reader`, or the extension by itself, reads the problem's mask."""
    kinds = frozenset() if problem.mask is None else problem.mask.kinds
    return kinds <= STATIC_KINDS | _LENGTHS or kinds == {"Dense"}


def terms_reader(problem: Problem, layout: str) -> Reader | None:
    """Return ``read(mask, q, k)``: the terms of a call's mask, and the arrays they point into.

    None where there are none to read. `read` raises ValueError for lengths that are no plain
    tensors of the CPU, and for masks that the terms of the kernels cannot tell.
    """
    kinds = frozenset() if problem.mask is None else problem.mask.kinds
    if kinds & _LENGTHS:
        return _lengths_reader(layout)
    if problem.mask is None or not kinds <= STATIC_KINDS:
        return None
    found: Terms | None = None
    codes_of = _once()

    def read(mask: Any, q: Tensor, k: Tensor) -> tuple[Terms, Any]:
        nonlocal found
        if found is None:
            found = terms_of(codes_of(mask), (), layout)[0]
        return found, None

    return read


def _once() -> Callable[[Mask], Sequence[int]]:
    """Return what encodes masks until one has no program; ValueError then and from then on."""
    unknown = False

    def codes_of(mask: Mask) -> Sequence[int]:
        nonlocal unknown
        program = None if unknown else encode(mask)
        if program is None:
            unknown = True
            raise ValueError("a mask whose program is one of booleans")
        return program.codes

    return codes_of


def _lengths_reader(layout: str) -> Reader:
    template: list[tuple[int, ...]] | None = None
    codes_of = _once()
    places: list[int] = []
    kept: _Kept | None = None

    def read(mask: Any, q: Tensor, k: Tensor) -> tuple[Terms, Any]:
        nonlocal template, places, kept
        last = kept
        if last is not None and last.mask() is mask and last.holds():
            return last.terms, last.arrays
        own = [
            x
            for leaf in mask.leaves()
            if type(leaf) in _OF_LENGTHS
            for x in leaf.arguments
            if x is not None
        ]
        arrays = [_int64(x) for x in own]
        if template is None:
            codes = codes_of(mask)
            places = _places(codes)
            template = list(terms_of(codes, arrays, layout)[0])
        terms, found = template.copy(), [memory(x) for x in arrays]
        for place, where in zip(places, found, strict=True):
            terms[place] = (terms[place][0], *where)
        whole = tuple(terms)
        as_given = all(x is y for x, y in zip(arrays, own, strict=True))
        kept = _Kept(weakref.ref(mask), whole, arrays, found) if as_given else None
        return whole, arrays

    return read


class _Kept(NamedTuple):
    """What was read of a mask, for when the same object comes again: that of a model's layers."""

    mask: Callable[[], Mask | None]
    terms: Terms
    arrays: list[Tensor]
    found: list[tuple[int, int]]

    def holds(self) -> bool:
        """Say whether the lengths lie where they did."""
        return not any(is_lazy_copy(x) for x in self.arrays) and self.found == [
            memory(x) for x in self.arrays
        ]


def _places(codes: Sequence[int]) -> list[int]:
    """Return which terms hold a length's place, in the order of the arrays."""
    kinds, arrays = codes[::WIDTH], codes[1::WIDTH]
    limits = [at for at, kind in enumerate(kinds) if kind in OF_LENGTHS]
    return sorted(limits, key=lambda at: arrays[at])


def _int64(x: Any) -> Tensor:
    if type(x) is not Tensor or not x.is_cpu or is_lazy_copy(x) or x.is_neg():
        raise ValueError("lengths of another kind of array")
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()

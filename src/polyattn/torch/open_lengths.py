"""Numbers for the batch and the lengths that a model of a traced call leaves open.

A choice is that of a class of sizes (`polyattn.torch.size_classes`). Compiled code has to guard the
class, and where it grows out of it, it is compiled again: so neighbouring classes with the same
choice are one, and a cache of keys that grows is compiled as often as the choice changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from polyattn.errors import PolyattnError
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import registry
from polyattn.torch.call_model import ARRAY, ROWS, B, S, T

__all__ = ["limits_of", "with_numbers"]

_POWERS = 25
"""The powers of two that key lengths are tried at; beyond the last nothing is chosen otherwise."""

Bounds = tuple[
    int, int, int
]  # B and T up to powers of two, T 0 where it is S; the order of T and S


def limits_of(
    model: Any, bounds: Bounds, described: Callable[[Any], Any]
) -> tuple[tuple[int, int], ...]:
    """Return up to which key lengths one choice serves, and a number that stands for them.

    ``described(model)``: the problem and the wishes of a model of numbers. The limit of the last of
    the pairs means nothing.
    """
    runs: list[tuple[int, int]] = []
    before: Any = None
    for power in range(_POWERS):
        last = 1 << power
        choice = _choice(with_numbers(model, (*bounds, last)), described)
        if runs and choice is not None and choice == before:
            runs[-1] = last, runs[-1][1]
        else:
            runs.append((last, last))
        before = choice
    return tuple(runs)


def _choice(model: Any, described: Callable[[Any], Any]) -> Any:
    """Return what is chosen, as far as lengths may share it; None if they may not."""
    if model is None:
        return None
    try:
        problem, wishes = described(model)
        chosen = select_here(problem, wishes)
    except PolyattnError as error:  # of which the call itself will tell
        return type(error)
    if not registry[problem.framework, chosen.backend].any_lengths:
        return None
    return chosen.backend, json.dumps(chosen.config, sort_keys=True, default=repr), chosen.fallback


def with_numbers(model: Any, bounds: tuple[int, int, int, int]) -> Any:
    """Return a model with numbers for its names, or None where none tell the sizes apart.

    `bounds`: of batch and queries and their order, and the key length that others are stood for by.
    """
    taken = {size for size in _sizes(model) if isinstance(size, int)}
    for_b, for_t, order, s = bounds
    keys = _pick(s, taken)
    queries: int | None = keys
    if order:
        queries = _pick(for_t, taken)
    while order < 0 and keys is not None and queries is not None and keys <= queries:
        s *= 2
        keys = _pick(s, taken)
    while order > 0 and keys is not None and queries is not None and queries <= keys:
        for_t *= 2
        queries = _pick(for_t, taken)
    if keys is None or queries is None:
        return None
    batch = _pick(for_b, taken | {keys, queries})
    return None if batch is None else _filled(model, {B: batch, T: queries, S: keys})


def _pick(bound: int, taken: set[int]) -> int | None:
    """Return a size up to a power of two, and above the one before, that no other size has."""
    if bound <= 2:  # a class of one
        return bound
    return next((size for size in range(bound, bound // 2, -1) if size not in taken), None)


def _sizes(model: Any) -> Iterator[Any]:
    if isinstance(model, tuple):
        if model and model[0] == ARRAY:
            yield from model[1]
        else:
            for part in model:
                yield from _sizes(part)


def _filled(model: Any, numbers: dict[str, int]) -> Any:
    if not isinstance(model, tuple):
        return model
    if model and model[0] == ARRAY:
        return (ARRAY, tuple(_number(size, numbers) for size in model[1]), *model[2:])
    return tuple(_filled(part, numbers) for part in model)


def _number(size: Any, numbers: dict[str, int]) -> int:
    if isinstance(size, tuple):
        name, other = size
        return -(-numbers[T] // other) if name == ROWS else numbers[name] + other
    return numbers[size] if isinstance(size, str) else size

"""Masks and biases as pytrees, so that they pass into jit, grad, vmap and scan as arguments.

Their arrays are the leaves; everything else of them is part of the structure.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import jax

from polyattn.masks import LEAVES, OPERATORS, Mask
from polyattn.masks.biases import Alibi, Bias, DenseBias

__all__ = ["ensure_pytree"]

_known: set[type] = set()


class _Array:
    """Stands in the structure for a field whose value is a leaf."""

    def __repr__(self) -> str:
        return "array"


_ARRAY = _Array()


def ensure_pytree(value: Mask | Bias | None) -> None:
    """Make the class of a mask or bias, and of its parts, known to JAX."""
    for part in getattr(value, "parts", ()):
        ensure_pytree(part)
    if value is not None and type(value) not in _known:
        _register(type(value))


def _register(cls: type) -> None:
    _known.add(cls)
    jax.tree_util.register_pytree_with_keys(
        cls, _with_keys, lambda aux, leaves: _made(cls, aux, leaves), _flatten
    )


def _is_child(value: Any) -> bool:
    """Whether a field holds a leaf or masks: all but numbers, names and lists of numbers.

    Leaves are arrays and whatever JAX puts in their place.
    """
    if isinstance(value, tuple):
        return any(isinstance(one, Mask) for one in value)
    return value is not None and not isinstance(value, (int, float, str))


_LEAVES = "leaves_of_pytree"


def _flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    marked = value.__dict__.get(_LEAVES, ())
    held = [(f.name in marked, getattr(value, f.name)) for f in fields(value)]
    held = [(known or _is_child(one), one) for known, one in held]
    leaves = tuple(one for is_leaf, one in held if is_leaf)
    return leaves, tuple(_ARRAY if is_leaf else one for is_leaf, one in held)


def _with_keys(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    leaves, aux = _flatten(value)
    names = (f.name for f, one in zip(fields(value), aux, strict=True) if one is _ARRAY)
    keys = map(jax.tree_util.GetAttrKey, names)
    return tuple(zip(keys, leaves, strict=True)), aux


def _made(cls: type, aux: tuple[Any, ...], leaves: Any) -> Any:
    """Make the value again; nothing is checked, since JAX hands over objects of its own, too."""
    rest = iter(leaves)
    made: Any = object.__new__(cls)
    unlike = set()
    for field, one in zip(fields(cls), aux, strict=True):  # type: ignore[arg-type]
        found = next(rest) if one is _ARRAY else one
        if one is _ARRAY and not _is_child(found):
            unlike.add(field.name)
        object.__setattr__(made, field.name, found)
    if unlike:  # None, True or an axis for each leaf, as programs map them: the same structure
        object.__setattr__(made, _LEAVES, frozenset(unlike))
    return made


for _cls in (*LEAVES, *OPERATORS, Alibi, DenseBias):
    if _cls not in _known:
        _register(_cls)

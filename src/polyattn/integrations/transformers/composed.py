"""What a mask function of transformers is composed of, told by the code it runs.

The library builds masks as closures of its own factories. A closure is known by its code object,
which is that of the factory's inner function and of nothing else, and never by its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType
from typing import Any

from polyattn.integrations.transformers.library import library

__all__ = ["factory_of", "hides_the_future", "held", "is_plain_causal"]


@functools.cache
def _factories() -> dict[CodeType, str]:
    """Return the code of every closure that the library makes, and what it means."""
    masking = library().masking
    made = {
        "and": lambda: masking.and_masks(),
        "or": lambda: masking.or_masks(),
        "causal": lambda: masking.causal_mask_function,
        "everything": lambda: masking.bidirectional_mask_function,
        "window": lambda: masking.sliding_window_overlay(1),
        "both sides": lambda: masking.sliding_window_bidirectional_overlay(1),
        "chunk": lambda: masking.chunked_overlay(1, None),
        "blocks": lambda: masking.blockwise_overlay(None),
        "padding": lambda: masking.padding_mask_function(None),
        "packed": lambda: masking.packed_sequence_mask_function(None),
        "positions": lambda: masking.remap_positions_for_packed_sequence(None, None),
    }
    found = {}
    for name, make in made.items():
        try:
            found[make().__code__] = name
        except AttributeError:  # a version without this factory, whose closures nobody makes
            continue
    return found


def factory_of(function: Callable[..., Any]) -> str | None:
    """Return what a mask function means, or None for one that is not the library's.

    >>> from transformers.masking_utils import sliding_window_causal_mask_function
    >>> factory_of(sliding_window_causal_mask_function(4)), factory_of(lambda b, h, q, k: q > k)
    ('and', None)
    """
    code = getattr(function, "__code__", None)
    return None if code is None else _factories().get(code)


def held(function: Any, name: str) -> Any:
    """Return what a closure holds under `name`; KeyError if it holds no such thing."""
    cells = function.__closure__ or ()
    values = dict(zip(function.__code__.co_freevars, cells, strict=True))
    return values[name].cell_contents


def is_plain_causal(function: Callable[..., Any]) -> bool:
    """Say whether a mask function is the causal one and no more."""
    return function is library().masking.causal_mask_function


def hides_the_future(function: Callable[..., Any]) -> bool:
    """Say whether it is known that no query sees a key after itself.

    >>> from transformers.masking_utils import causal_mask_function, or_masks
    >>> hides_the_future(causal_mask_function)
    True
    >>> hides_the_future(or_masks(causal_mask_function, lambda b, h, q, k: q < k))
    False
    """
    kind = factory_of(function)
    if kind == "causal":
        return True
    if kind not in ("and", "or"):
        return False
    members = held(function, "mask_functions")
    return bool(members) and (any if kind == "and" else all)(map(_hides, members))


def _hides(member: Any) -> bool:
    if factory_of(member) == "positions":  # of packed sequences, in which positions rise
        return hides_the_future(held(member, "mask_function"))
    return hides_the_future(member)

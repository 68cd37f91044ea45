"""How a class of masks makes examples of itself: for the fuzzer, the command line and tuning."""

from __future__ import annotations

from random import Random
from typing import Any

from polyattn.masks.index import Align
from polyattn.masks.needs import Arrays, Sizes

__all__ = ["Examples"]


class Examples:
    """What every class of masks has of examples; the defaults are those of one without numbers."""

    @classmethod
    def draw(cls, rng: Random, align: Align, packed: bool) -> tuple[Any, ...]:
        """Draw the numbers of an example: what JSON can say of it, whatever the sizes."""
        return ()

    @classmethod
    def brackets(cls, sizes: Sizes, *numbers: Any) -> tuple[Any, ...]:
        """Return what the signature of an example has in its brackets: numbers, shapes of arrays.

        `numbers` are those of `draw`; without them it is the example that explains the class.
        """
        return numbers

    @classmethod
    def filled(cls, sizes: Sizes, arrays: Arrays, *brackets: Any, **named: Any) -> Any:
        """Make a mask whose signature has these brackets, with arrays that fit the sizes."""
        made: Any = cls
        return made(*brackets, **named)

    @classmethod
    def example(cls, sizes: Sizes, arrays: Arrays, *numbers: Any) -> Any:
        """Make the mask of these numbers, as `draw` gives them, or one that explains the class."""
        return cls.filled(sizes, arrays, *cls.brackets(sizes, *numbers))

"""Choices that a model makes of rounded numbers: a router its experts, a detector its proposals.

Two numbers that are nearly the same are told apart by their rounding. In bfloat16 and float16 a
right port so chooses another expert now and then, and everything that follows has other values, of
other shapes even. What is sorted by such numbers has some of its rows in another order, in float32
too. Only modules that are fed the reference's own inputs can be judged from there on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from polyattn.trace.compare.called import Event, Tensor
from polyattn.trace.compare.judge import coarse

__all__ = ["Choices"]

# an eighth of the rows in other places, if what is in one says nothing of the next
_FEW = 0.5
_UNSEEN = 1e-3


class Choices:
    """`first`: the event of the first choice that rounding may have made, or None."""

    def __init__(self) -> None:
        self.first: Event | None = None
        self._sorted = False

    def behind(
        self, event: Event, source: float, usual: float, agreed: Collection[tuple[object, ...]]
    ) -> bool:
        """Whether a difference may come of rounding by way of a choice, made here or before.

        `source`: the largest error among what the event was computed from; `usual`: up to which
        error its rounded numbers are off as others are; `agreed`: what was the same before.
        """
        if self.first is None and source > 0 and _ranked(event):
            self.first, self._sorted = event, True
        if self.first is None and source > 0 and any(_made(event, agreed)):
            main = next((one for one in event.tensors if one.main), None)
            off = main is not None and main.limit.how != "exact" and main.ratio > 1
            if main is None or not off or main.distance.error <= max(main.limit.grey, usual):
                self.first = event
        return self.first is not None

    def notes(self) -> Iterator[str]:
        """Yield what is to be said of it."""
        if self.first is not None:
            name = self.first.call.b.module or "the model"
            what = "returns" if self.first.out else "is given"
            if self._sorted:
                yield (
                    f"{name!r}: rounding may decide in which order some of the values are that it "
                    f"{what}, as where a detector takes its best proposals, and what follows may "
                    "differ because of it: isolate the modules"
                )
                return
            yield (
                f"{name!r}: rounding may decide which integers or booleans it {what}, as a router "
                "its experts, and what follows may differ because of it: isolate the modules, or "
                "run both in float32"
            )


def _ranked(event: Event) -> bool:
    """Whether all that differs has the same values, a few of them in other places.

    A fault of layout, as a wrong transpose, moves nearly all of them.
    """
    off = [one.distance for one in event.tensors if one.ratio > 1 and one.distance.comparable]
    moved = any(one.order for one in off)
    # rows that are nearly the same may change places unseen
    return moved and all(one.error < (_FEW if one.order else _UNSEEN) for one in off)


def _made(event: Event, agreed: Collection[tuple[object, ...]]) -> Iterator[Tensor]:
    """Yield integers and booleans that differ, and were no input that was right before."""
    for one in event.tensors:
        off = one.limit.how == "exact" and one.ratio > 1 and coarse(one)
        # how many are chosen is no matter of rounding, but how many tokens came to an expert is
        here = one.a.n == one.b.n if event.out else one.a.identity not in agreed
        if off and here:
            yield one

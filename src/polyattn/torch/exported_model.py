"""The model of a call that is exported: sizes that stay open are not compared, nor guarded.

torch.export takes each comparison of an open size for a condition on the program. So here sizes are
only asked for what is known of all that they may be, and a number stands in for each that is open:
the same for sizes that are known to be the same. What an exported call gets wrong in such a size,
its operators say.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, strided
from torch.fx.experimental.symbolic_shapes import statically_known_true

from polyattn.masks import Causal
from polyattn.masks.biases import DenseBias
from polyattn.torch.call_model import ARRAY, Names, sequences_of

__all__ = ["exported_model"]

_OPEN_BATCH, _OPEN_LENGTH, _OTHER = 1009, 10007, 3  # primes: no size of a call by accident
_LARGEST = 1 << 40


def exported_model(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, layout: Any
) -> tuple[Any, bool, Any]:
    """Return the model of a call, whether it is known to be empty, and its mask.

    The model is what `polyattn.torch.traced` admits: nested tuples of constants.
    """
    rank = {"BTNH": 4, "BNTH": 4, "packed": 3}.get(layout) if isinstance(layout, str) else None
    names, empty = _OpenNames(), False
    if rank is not None and _are_strided(q, k, v, rank):
        ti, ni = {"BTNH": (1, 2), "BNTH": (2, 1), "packed": (0, 1)}[layout]
        b = sequences_of(mask) if layout == "packed" else q.shape[0]
        t, s = q.shape[ti], k.shape[ti]
        names = _OpenNames(b, t, s)
        for size in (b, t, s, q.shape[ni]):
            empty = empty or number_of(size) == 0
        if isinstance(mask, Causal) and layout != "packed" and is_known(t == s):
            mask = Causal("top_left")
    model = (
        *[names.input(x, place, layout) for place, x in enumerate((q, k, v))],
        names.holder(mask),
        names.holder(bias),
        None if sinks is None else names.array(sinks),
    )
    return model, empty, mask


def is_known(comparison: Any) -> bool:
    """Say whether a comparison of sizes holds for all that they may be; it guards nothing."""
    if isinstance(comparison, Tensor):  # torch.jit.trace has tensors for sizes
        return False
    return statically_known_true(comparison)


def number_of(size: Any) -> int:
    """Return a size as a number, -1 for one that is open."""
    if isinstance(size, Tensor):
        return int(size)
    low, high = 0, 1
    while not is_known(size <= high):
        high *= 2
        if high > _LARGEST:
            return -1
    while low < high:
        middle = (low + high) // 2
        if is_known(size <= middle):
            high = middle
        else:
            low = middle + 1
    return high if is_known(size == high) else -1


def _are_strided(q: Any, k: Any, v: Any, rank: int) -> bool:
    return all(not (not isinstance(x, Tensor) or x.is_nested or x.dim() != rank) for x in (q, k, v))


class _OpenNames(Names):
    """What describes arguments by numbers, with one that stands in for each open size.

    An open size that nothing tells from the one which belongs in its place is taken for that.
    """

    def __init__(self, b: Any = 1, t: Any = 1, s: Any = 1) -> None:
        super().__init__()
        batch, queries, keys = number_of(b), number_of(t), number_of(s)
        if queries < 0 and keys < 0:
            queries = keys = _OPEN_LENGTH
        queries = _OPEN_LENGTH if queries < 0 else queries
        keys = _OPEN_LENGTH if keys < 0 else keys
        batch = _OPEN_BATCH if batch < 0 else batch
        self.batch, self.queries, self.keys = (b, batch), (t, queries), (s, keys)

    def of(self, size: Any, place: Any = None) -> int:
        number = number_of(size)
        if number >= 0:
            return number
        batch, queries, keys = self.batch, self.queries, self.keys
        for known, stand_in in (keys, queries, batch, (batch[0] + 1, batch[1] + 1)):
            if is_known(size == known):
                return stand_in
        if place is None or is_known(size != place[0]):
            return _OTHER
        return place[1]

    def input(self, x: Any, place: int, layout: str) -> Any:
        """Describe query, key or value."""
        rows = self.queries if place == 0 else self.keys
        first = rows if layout == "packed" else self.batch
        return self.array(x, places=(first, rows, rows))

    def array(self, x: Any, shaped: bool = True, places: Any = None) -> Any:
        if not isinstance(x, Tensor):
            return super().array(x)
        made = super().array(x, shaped=False)
        if x.is_nested or x.layout != strided:
            return made
        if places is None:  # of a mask: one row of numbers a sequence
            places = (self.batch, self.keys, self.keys, self.keys)
        shape = []
        for i in range(x.dim()):
            shape.append(self.of(x.shape[i], places[i] if i < len(places) else None))
        return (ARRAY, tuple(shape), *made[2:])

    def argument(self, x: Any, boolean: bool = False) -> Any:
        return self.scores(x) if boolean and isinstance(x, Tensor) else super().argument(x)

    def scores(self, x: Tensor) -> Any:
        """Describe what broadcasts to (B, N, T, S)."""
        places = (self.batch, None, self.queries, self.keys)
        return self.array(x, places=places[-x.dim() :] if x.dim() else ())

    def holder(self, x: Any) -> Any:
        if isinstance(x, DenseBias):
            return (type(x), (self.scores(x.payload),))
        return super().holder(x)

    def blocks(self, leaf: Any) -> Any:
        block_q = number_of(leaf.block_q)
        rows = (leaf.counts.shape[2], -(-self.queries[1] // block_q))
        made = []
        for x in (leaf.indices, leaf.counts):
            made.append(self.array(x, places=(self.batch, None, rows, None)))
        return (type(leaf), (block_q, number_of(leaf.block_k), *made))

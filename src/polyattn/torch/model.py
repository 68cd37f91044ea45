"""The model of a traced call: constants that stand for its arguments.

A compiler keeps lengths symbolic, and what is decided about a call may not depend on them but by
comparisons, which it guards. In the model each length is therefore stood in for by a number of its
class (see :func:`model_of`) such that two sizes are equal in the model exactly where they are equal
in the call: whether arguments fit each other is the same question of both. Where no such numbers
are found, and to say in an error what was really given, the model holds the sizes themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.admission import ArrayFacts, Other
from polyattn.biases import Bias
from polyattn.masks import BlockMap, Dense, Mask
from polyattn.payload import shape_of
from polyattn.simplify import simplify

__all__ = [
    "facts_of", "mask_of", "model_of", "model_of_plain", "model_of_sdpa", "plain_model_of",
]  # fmt: skip

_ARRAY, _OTHER = "array", "other"


def plain_model_of(q: Any, k: Any, v: Any, turned: bool) -> tuple[Any, Any]:
    """Return what :func:`model_of` does, for dense tensors of four dims and nothing else.

    `turned`: heads come second. The arrays of the model are lists. Most calls are such, and a
    compiler guards every global and built-in that is read, at each call: so nothing is read here,
    and what is called is nested.
    """

    def number_of(size: int, as_power: bool) -> int:
        # by comparisons only: those with powers of two guard a range of a symbolic size
        low, high = 0, 1
        while high < size:
            high *= 2
        while not as_power and low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if size <= middle else (middle + 1, high)
        return high if size else 0

    def apart(stand_in: int, size: int) -> int:
        for other, taken in stands:
            if stand_in == taken and size != other:
                return apart(stand_in * 2, size)
        return stand_in

    def modelled(size: int) -> int:
        for known, stand_in in stands:
            if size == known:
                return stand_in
        return -1

    ti, ni = (2, 1) if turned else (1, 2)
    b, t, s, n = q.shape[0], q.shape[ti], k.shape[ti], q.shape[ni]
    stands = [(1, 1), *[(x, number_of(x, False)) for x in (n, k.shape[ni], q.shape[3], v.shape[3])]]
    for_t, for_s = number_of(t, True), number_of(s, True)
    while t < s and for_s <= for_t:
        for_s = apart(for_s * 2, s)
    while s < t and for_t <= for_s:
        for_t = apart(for_t * 2, t)
    stands += [(t, for_t), (s, for_t if t == s else for_s)]
    if b != t and b != s:
        stands.append((b, apart(number_of(b, True), b)))
    found = []
    for x in (q, k, v):
        unit = x.stride(3) == 1 or x.shape[3] <= 1
        shape = [modelled(size) for size in x.shape]
        found.append([shape, x.dtype, x.device, x.requires_grad, unit])
    return (b, t, s, n), found


def model_of_plain(found: Any) -> Any:
    """Return the model that :func:`plain_model_of` describes; None where sizes are not known."""
    if any(min(shape) < 0 for shape, *_ in found):
        return None
    arrays = [
        (_ARRAY, tuple(shape), dtype, str(device), grad, unit, "strided")
        for shape, dtype, device, grad, unit in found
    ]
    return (*arrays, None, None, None)


def model_of(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, layout: Any, exact: bool
) -> tuple[Any, Any, Any]:
    """Return what may be empty of (B, T, S, N) as sizes, the simplified mask, and the model.

    The model is nested tuples of constants, or None where only an `exact` one can be made: with
    symbolic lengths T, S and B rounded up to powers of two, in the order that they have and apart
    from each other and from the other sizes where they differ.
    """
    rank = {"BTNH": 4, "BNTH": 4, "packed": 3}.get(layout) if isinstance(layout, str) else None
    fits = rank is not None and isinstance(q, Tensor) and isinstance(k, Tensor)
    fits = fits and isinstance(v, Tensor) and not (q.is_nested or k.is_nested or v.is_nested)
    fits = fits and q.dim() == rank and k.dim() == rank and v.dim() == rank
    sizes, stand_ins = (1, 1, 1, 1), _StandIns(exact)
    if fits:
        ti, ni = {"BTNH": (1, 2), "BNTH": (2, 1), "packed": (0, 1)}[layout]
        t, s = q.shape[ti], k.shape[ti]
        b = _sequences(mask) if layout == "packed" else q.shape[0]
        if isinstance(mask, Mask) and layout != "packed":
            mask = simplify(mask, t, s)
        if not exact:
            others = (q.shape[ni], k.shape[ni], q.shape[-1], v.shape[-1])
            stand_ins.find(b, t, s, others, mask is not None or bias is not None)
        sizes = b, t, s, q.shape[ni]
    elif not exact:
        return sizes, mask, None
    model = (
        stand_ins.array(q), stand_ins.array(k), stand_ins.array(v), stand_ins.holder(mask),
        stand_ins.holder(bias), None if sinks is None else stand_ins.array(sinks),
    )  # fmt: skip
    return sizes, mask, None if stand_ins.fall_short else model


def _round_up(size: int) -> int:
    """Return the next power of two, by comparisons only: they guard a range of a symbolic size."""
    bound = 1
    while bound < size:
        bound *= 2
    return bound if size else 0


def _number_of(size: int) -> int:
    """Return the size itself as a constant."""
    low, high = 0, _round_up(size)
    while low < high:
        middle = (low + high) // 2
        if size <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def _apart(stand_in: int, size: int, others: list[tuple[int, int]]) -> int:
    """Double a stand-in until no other size has it."""
    clash = True
    while clash:
        clash = False
        for other, taken in others:
            if stand_in == taken and size != other:
                stand_in *= 2
                clash = True
    return stand_in


class _StandIns:
    """What stands in for the sizes of one call, and its arguments described by that."""

    def __init__(self, exact: bool) -> None:
        self.exact = exact
        self.pairs: list[tuple[int, int]] = []  # sizes and what stands in for them
        self.fall_short = False  # a size was met that nothing stands in for
        self.rows = (1, 1)  # T, and what stands in for it

    def find(self, b: int, t: int, s: int, others: tuple[int, ...], has_arrays: bool) -> None:
        """Choose what stands in for B, T and S; where arrays are compared with them, apart."""
        fixed = [(1, 1)]
        for x in others:
            fixed.append((x, _number_of(x)))
        for_t, for_s = _round_up(t), _round_up(s)
        if has_arrays:
            for_t, for_s = _apart(for_t, t, fixed), _apart(for_s, s, fixed)
        if t == s:
            for_s = for_t
        elif t < s:
            while for_s <= for_t:
                for_s = _apart(for_s * 2, s, fixed)
        else:
            while for_t <= for_s:
                for_t = _apart(for_t * 2, t, fixed)
        self.pairs = [*fixed, (t, for_t), (s, for_s)]
        self.rows = t, for_t
        if b != t and b != s:
            self.pairs.append((b, _apart(_round_up(b), b, self.pairs)))
        # packed sequences are told by one number more than there are of them
        self.pairs.append((b + 1, _apart(self.of(b) + 1, b + 1, self.pairs)))

    def of(self, size: int) -> int:
        if self.exact:
            return _number_of(size)
        for known, stand_in in self.pairs:
            if size == known:
                return stand_in
        self.fall_short = True
        return _number_of(size)

    def array(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return (_OTHER, type(x).__name__)
        if x.is_nested or x.layout != torch.strided:
            form = "nested" if x.is_nested else "sparse"
            return (_ARRAY, (), x.dtype, str(x.device), x.requires_grad, True, form)
        unit = x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1
        shape = tuple([self.of(size) for size in x.shape])
        return (_ARRAY, shape, x.dtype, str(x.device), x.requires_grad, unit, "strided")

    def argument(self, x: Any, boolean: bool = False) -> Any:
        if isinstance(x, Tensor):
            return self.array(x)
        if isinstance(x, tuple):  # a list of the caller's, whose numbers nothing rests on
            dtype = torch.bool if boolean else torch.int64
            shape = tuple([self.of(size) for size in shape_of(x)])
            return (_ARRAY, shape, dtype, "cpu", False, True, "strided")
        return _number_of(x) if isinstance(x, int) and not isinstance(x, bool) else x

    def blocks(self, leaf: Any) -> Any:
        """Describe a block map, of whose dims some count blocks: these are compared here."""
        if self.exact or not isinstance(leaf.counts, Tensor):
            return (type(leaf), tuple([self.argument(x) for x in leaf.arguments]))
        block_q, block_k = _number_of(leaf.block_q), _number_of(leaf.block_k)
        t, for_t = self.rows
        counts = leaf.counts.shape
        if counts[2] != -(-t // block_q):
            self.fall_short = True
        shape = (self.of(counts[0]), self.of(counts[1]), -(-for_t // block_q))
        found = []
        for x, dims in (
            (leaf.indices, (*shape, _number_of(leaf.indices.shape[3]))),
            (leaf.counts, shape),
        ):
            found.append((_ARRAY, dims, x.dtype, str(x.device), False, True, "strided"))
        return (type(leaf), (block_q, block_k, *found))

    def holder(self, x: Any) -> Any:
        if isinstance(x, Mask):
            if x.parts:
                return (type(x), (tuple([self.holder(part) for part in x.parts]),))
            if isinstance(x, BlockMap):
                return self.blocks(x)
            return (type(x), tuple([self.argument(a, isinstance(x, Dense)) for a in x.arguments]))
        if isinstance(x, Bias):
            return (type(x), (self.array(x.payload),))
        return None if x is None else (_OTHER, type(x).__name__, isinstance(x, Tensor))


def model_of_sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    """Return the model of a call with torch's signature, or text that says why it can have none.

    Here sizes are only compared with each other: one of each set of equal ones stands for it.
    """
    arrays = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    for x in arrays:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"a tensor of type {type(x).__name__}"
    seen: list[Any] = [0, 1]  # sizes that mean something by themselves
    grouped = False
    if gqa and q.dim() == k.dim() == v.dim() and q.dim() >= 3 and k.shape[-3] == v.shape[-3]:
        grouped = k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0

    def modelled(x: Tensor, as_query: bool) -> Any:
        if x.is_nested or x.layout != torch.strided:
            form = "nested" if x.is_nested else "sparse"
            return (_ARRAY, (), x.dtype, str(x.device), False, True, form)
        shape = []
        for at in range(x.dim()):
            # heads that share keys and values fit as if they did not
            size = q.shape[at] if as_query and at == x.dim() - 3 else x.shape[at]
            place = -1
            for i in range(len(seen)):
                if size == seen[i]:
                    place = i
                    break
            if place < 0:
                place = len(seen)
                seen.append(size)
            shape.append(place)
        return (_ARRAY, tuple(shape), x.dtype, str(x.device), False, True, "strided")

    made = [modelled(x, grouped and x is not attn_mask and x is not q) for x in arrays]
    return (*made, *(() if attn_mask is not None else (None,)), dropout_p, is_causal, scale, gqa)


def _sequences(mask: Any) -> Any:
    """Return how many sequences are packed; 1 where no mask says it, which admission refuses."""
    if isinstance(mask, Mask):
        for leaf in mask.leaves():
            if type(leaf).__name__ == "Packed" and isinstance(leaf.arguments[0], Tensor):
                return leaf.arguments[0].shape[0] - 1
    return 1


def facts_of(x: Any) -> ArrayFacts | Other:
    """Return an array of the model as admission sees it."""
    if isinstance(x, (ArrayFacts, Other)):
        return x
    if isinstance(x, tuple) and x and x[0] == _ARRAY:
        _, shape, dtype, device, grad, unit_stride, form = x
        return ArrayFacts(shape, str(dtype).rpartition(".")[2], device, grad, unit_stride, form)
    if isinstance(x, tuple) and x and x[0] == _OTHER:
        return Other(*x[1:])
    return Other(type(x).__name__)


def mask_of(x: Any) -> Any:
    """Return the mask or bias that the model holds, with facts in place of its arrays."""
    if x is None:
        return None
    kind, arguments = x[0], x[1]
    if kind == _OTHER:
        return Other(*x[1:])

    def made(argument: Any) -> Any:
        if not isinstance(argument, tuple) or not argument:
            return argument
        if isinstance(argument[0], type):
            return mask_of(argument)
        return facts_of(argument) if argument[0] in (_ARRAY, _OTHER) else tuple(map(made, argument))

    return kind(*map(made, arguments))

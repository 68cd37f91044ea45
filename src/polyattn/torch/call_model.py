"""The model of a traced call: constants that stand for its arguments.

A compiler keeps batch and lengths symbolic, and what is decided about a call may not depend on them
but by comparisons, which it guards. In the model they are therefore names (:data:`B`, :data:`T`,
:data:`S`), for which `polyattn.torch.open_lengths` puts numbers, such that two sizes are equal in
the model exactly where they are equal in the call: whether arguments fit each other is the same
question of both. Where a size has no name and no number, and to say in an error what was really
given, the model holds the sizes themselves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyattn.masks import BlockMap, Dense, Mask, Not, Packed
from polyattn.masks.biases import Bias
from polyattn.masks.payload import shape_of
from polyattn.problem.admission import ArrayFacts, Other
from polyattn.torch.internals import holds, is_known
from polyattn.torch.traced_sizes import bounds_of, class_of, may_be, simplified

__all__ = [
    "ARRAY", "B", "JaggedRows", "Names", "ROWS", "S", "T", "facts_of", "has_unit_stride",
    "mask_of", "model_of", "model_of_sdpa", "sequences_of",
]  # fmt: skip

B, T, S = "batch", "queries", "keys"
"""The sizes that a model leaves open."""
ROWS = "rows of blocks"
"""How many blocks the queries make: ``(ROWS, block_q)``."""
ARRAY, _OTHER = "array", "other"


class JaggedRows(Packed):
    """The offsets of jagged tensors inside a compiler: how many there are is not asked.

    A guard on the size that counts the sequences of a jagged input makes torch's compiler (2.13)
    fail or not as its hashes fall: it may know no source for the symbol.
    """


def has_unit_stride(x: Tensor) -> bool:
    """Say whether entries of the last dim are neighbours; decided, as a symbol is no constant."""
    if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1:  # noqa: SIM103
        return True
    return False


def model_of(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, sinks: Any, layout: Any, asked: Any, limits: Any
) -> tuple[Any, Any, Any, Any]:
    """Return what may be empty of (B, T, S, N) as sizes, the simplified mask, model and bounds.

    The model is nested tuples of constants, or None where only an exact one can be made. The bounds
    are those of `polyattn.torch.traced_sizes`. `limits`: None for an exact model, else what these
    take.
    """
    exact = limits is None
    rank = {"BTNH": 4, "BNTH": 4, "packed": 3}.get(layout) if isinstance(layout, str) else None
    fits = rank is not None and isinstance(q, Tensor) and isinstance(k, Tensor)
    fits = fits and isinstance(v, Tensor) and not (q.is_nested or k.is_nested or v.is_nested)
    fits = fits and q.dim() == rank and k.dim() == rank and v.dim() == rank
    sizes, names, bounds = (1, 1, 1, 1), Names(), (1, 1, 0, 1, None, False)
    if fits:
        ti, ni = {"BTNH": (1, 2), "BNTH": (2, 1), "packed": (0, 1)}[layout]
        t, s = q.shape[ti], k.shape[ti]
        b = sequences_of(mask) if layout == "packed" else q.shape[0]
        if isinstance(mask, Mask) and layout != "packed":
            mask = simplified(mask, t, s)
        if not exact:
            fixed = (q.shape[ni], k.shape[ni], q.shape[-1], v.shape[-1])
            names = Names(b, t, s, fixed, layout == "packed")
        sizes = b, t, s, q.shape[ni]
    elif not exact:
        return sizes, mask, None, bounds
    model = (
        *[names.input(x, place, layout) for place, x in enumerate((q, k, v))],
        names.holder(mask),
        names.holder(bias),
        None if sinks is None else names.array(sinks),
    )
    if names.fall_short:
        return sizes, mask, None, bounds
    if not exact:
        bounds = bounds_of(2 if _is_of_jagged(mask) else b, t, s, model, asked, limits)
    return sizes, mask, model, bounds


def _is_of_jagged(mask: Any) -> bool:
    if isinstance(mask, Mask):
        for leaf in mask.leaves():
            if isinstance(leaf, JaggedRows):
                return True
    return False


def _number_of(size: int) -> int:
    """Return the size itself as a constant."""
    low, high = 0, class_of(size)
    while low < high:
        middle = (low + high) // 2
        if size <= middle:
            high = middle
        else:
            low = middle + 1
    return low


class Names:
    """The names of one call's sizes, and its arguments described by them; without: by numbers."""

    def __init__(
        self,
        b: int = 0,
        t: int = 0,
        s: int = 0,
        fixed: tuple[int, ...] | None = None,
        packed: bool = False,
    ) -> None:
        self.exact = fixed is None
        self.pairs: list[tuple[int, Any]] = []
        self.fall_short = False  # a size was met that has no name and no number
        self.rows = t
        self.places: list[Any] = []
        if fixed is None:
            return
        self.pairs = [(s, S), (t, S if t == s else T), (b, B)]
        if packed:  # sequences are told by one number more than there are of them
            self.pairs.append((b + 1, (B, 1)))
        numbers = [_number_of(x) for x in fixed]
        self.pairs += [(1, 1), *zip(fixed, numbers, strict=True)]
        n, kv, h, last = zip(fixed, numbers, strict=True)
        heads = (n, (t, S if t == s else T), h), (kv, (s, S), h), (kv, (s, S), last)
        self.places = [((b, B), *rest) for rest in heads]

    def of(self, size: int) -> Any:
        if self.exact:
            return _number_of(size)
        for known, name in self.pairs:  # one that needs no guard, which a size may have to be left
            if is_known(size == known):
                return name
        for known, name in self.pairs:
            if may_be(size, known) and size == known:
                return name
        self.fall_short = True
        return _number_of(size)

    def input(self, x: Any, place: int, layout: str) -> Any:
        """Describe query, key or value: where a dim is what it has to be, it is not looked for."""
        found = self.array(x, shaped=self.exact)
        if self.exact or found[0] != ARRAY or found[-1] != "strided":
            return found
        batch, head, row, last = self.places[place]
        order = {"BNTH": (batch, head, row, last), "BTNH": (batch, row, head, last)}
        wanted = order.get(layout, (row, head, last))
        shape = []
        for size, (known, name) in zip(x.shape, wanted, strict=True):
            shape.append(name if size == known else self.of(size))
        return (ARRAY, tuple(shape), *found[2:])

    def array(self, x: Any, shaped: bool = True) -> Any:
        if not isinstance(x, Tensor):
            return (_OTHER, type(x).__name__)
        if x.is_nested or x.layout != torch.strided:
            form = "nested" if x.is_nested else "sparse"
            return (ARRAY, (), x.dtype, str(x.device), x.requires_grad, True, form)
        unit = has_unit_stride(x)
        shape = tuple([self.of(size) for size in x.shape]) if shaped else ()
        return (ARRAY, shape, x.dtype, str(x.device), x.requires_grad, unit, "strided")

    def argument(self, x: Any, boolean: bool = False) -> Any:
        if isinstance(x, Tensor):
            return self.array(x)
        if isinstance(x, tuple):  # a list of the caller's, whose numbers nothing rests on
            dtype = torch.bool if boolean else torch.int64
            shape = tuple([self.of(size) for size in shape_of(x)])
            return (ARRAY, shape, dtype, "cpu", False, True, "strided")
        if isinstance(x, int):
            return x if isinstance(x, bool) else _number_of(x)
        if x is None or isinstance(x, str):
            return x
        return self.argument(torch.as_tensor(x), boolean)  # of NumPy

    def blocks(self, leaf: Any) -> Any:
        """Describe a block map, of whose dims some count blocks: these are compared here."""
        if self.exact or not isinstance(leaf.counts, Tensor):
            return (type(leaf), tuple([self.argument(x) for x in leaf.arguments]))
        block_q, block_k = _number_of(leaf.block_q), _number_of(leaf.block_k)
        counts = leaf.counts.shape
        if counts[2] != -(-self.rows // block_q):
            self.fall_short = True
        shape = (self.of(counts[0]), self.of(counts[1]), (ROWS, block_q))
        found = []
        for x, dims in (
            (leaf.indices, (*shape, _number_of(leaf.indices.shape[3]))),
            (leaf.counts, shape),
        ):
            found.append((ARRAY, dims, x.dtype, str(x.device), False, True, "strided"))
        return (type(leaf), (block_q, block_k, *found))

    def offsets(self, x: Any) -> Any:
        """Describe the offsets of a jagged tensor: of one more size than there are sequences."""
        if self.exact:
            return self.array(x)
        return (ARRAY, ((B, 1),), *self.array(x, shaped=False)[2:])

    def holder(self, x: Any) -> Any:
        if isinstance(x, Mask):
            if isinstance(x, Not):
                return (type(x), (self.holder(x.member),))
            if x.parts:
                return (type(x), (tuple([self.holder(part) for part in x.parts]),))
            if isinstance(x, BlockMap):
                return self.blocks(x)
            if isinstance(x, JaggedRows):
                return (Packed, tuple([self.offsets(a) for a in x.arguments]))
            return (type(x), tuple([self.argument(a, isinstance(x, Dense)) for a in x.arguments]))
        if isinstance(x, Bias):
            return (type(x), (self.array(x.payload),))
        return None if x is None else (_OTHER, type(x).__name__, isinstance(x, Tensor))


def model_of_sdpa(
    q: Any, k: Any, v: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
) -> Any:
    """Return the model of a call with torch's signature, or text that says why it can have none.

    Here sizes are only compared where they have to fit: a number stands for each that does not.
    """
    arrays = (q, k, v) if attn_mask is None else (q, k, v, attn_mask)
    for x in arrays:
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"a tensor of type {type(x).__name__}"
    rank = q.dim()
    grouped = False
    if gqa and rank == k.dim() == v.dim() and rank >= 3 and k.shape[-3] == v.shape[-3]:
        grouped = k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0

    def sizes_of(x: Tensor, first: int) -> list[Any]:
        return [(x.shape[x.dim() - 1 - i], first + i) for i in range(x.dim())]

    if q.is_nested or k.is_nested or v.is_nested or rank < 3 or k.dim() < 3:
        made = [_fitted(x, [], 10) for x in arrays]
        return (
            *made,
            *(() if attn_mask is not None else (None,)),
            dropout_p,
            is_causal,
            scale,
            gqa,
        )
    of_q, of_k = sizes_of(q, 10), sizes_of(k, 30)
    lead = of_q[3:]
    heads = (k.shape[-3], of_q[2][1]) if grouped else of_q[2]
    last = of_q[0][1]
    made = [_fitted(q, of_q, 10), _fitted(k, [of_q[0], of_k[1], heads, *lead], 30)]
    kept = (k.shape[-3], made[1][1][-3])  # the heads of the keys, as they are described
    made.append(_fitted(v, [(q.shape[-1], last), of_k[1], kept, *lead], 50))
    if attn_mask is not None:
        made.append(_fitted(attn_mask, [of_k[1], of_q[1], of_q[2], *lead], 70))
    return (*made, *(() if attn_mask is not None else (None,)), dropout_p, is_causal, scale, gqa)


def _fitted(x: Tensor, fits: list[Any], first: int) -> Any:
    """Describe a tensor; `fits`: from its last dim on, a size and the number that it has.

    A dim of another size has a number of its own, from `first` on.
    """
    if x.is_nested or x.layout != torch.strided:
        form = "nested" if x.is_nested else "sparse"
        return (ARRAY, (), x.dtype, str(x.device), False, True, form)
    shape: list[int] = []
    for i in range(x.dim()):
        size, number = x.shape[x.dim() - 1 - i], first + i
        if i < len(fits) and holds(size == fits[i][0]):
            number = fits[i][1]
        elif holds(size == 1):
            number = 1
        shape.insert(0, 0 if holds(size == 0) else number)
    return (ARRAY, tuple(shape), x.dtype, str(x.device), False, True, "strided")


def sequences_of(mask: Any) -> Any:
    """Return how many sequences are packed; 1 where no mask says it, which admission refuses."""
    if isinstance(mask, Mask):
        for leaf in mask.leaves():
            if isinstance(leaf, Packed) and isinstance(leaf.cu_q, Tensor):
                return leaf.cu_q.shape[0] - 1
    return 1


def facts_of(x: Any) -> ArrayFacts | Other:
    """Return an array of the model as admission sees it."""
    if isinstance(x, (ArrayFacts, Other)):
        return x
    if isinstance(x, tuple) and x and x[0] == ARRAY:
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
        return facts_of(argument) if argument[0] in (ARRAY, _OTHER) else tuple(map(made, argument))

    return kind(*map(made, arguments))

"""The kinds of problems that evidence is about, and how much work one is.

Everything here is a function of a problem's class (see :attr:`polyattn.Problem.class_sizes`): all
lengths of a class are one kind, and get one choice.
"""

from __future__ import annotations

import functools

from polyattn.masks.structure import Structure
from polyattn.problem import MaskFacts, Problem

__all__ = [
    "DTYPES",
    "KINDS",
    "UNCALIBRATED",
    "WIDER",
    "is_array",
    "is_band",
    "is_small",
    "is_small_training",
    "is_tiny_training",
    "kind_of",
    "kinds_beside",
    "share_of",
    "trains",
    "work_of",
]

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that the native CPU kernels have."""

KINDS = {
    "dense": "dense",
    "wide": "dense, heads wider than 64,",
    "causal": "causal",
    "short": "short (at most 512 keys)",
    "decode": "decoding",
    "long decode": "decoding from beyond the caches",
    "short decode": "decoding with few keys (at most 512)",
    "grouped decode": "decoding with grouped heads",
    "small": "small (some 20 us)",
    "small decode": "small (some 20 us) decoding",
    "small train": "small (some 1 ms) training",
    "train": "training",
}
"""Each kind, and how it is called in a sentence before the dtype."""

WIDER = {"long decode": "decode", "short decode": "decode"}
"""The kind whose figure counts where one has none: records may be older than it, or have no row."""

UNCALIBRATED = ("long decode",)
"""Kinds that take too long to be calibrated."""

_SMALL, _SMALL_DECODE = 1 << 21, 1 << 18
_TINY_TRAINING, _SMALL_TRAINING, _FEW_KEYS = 1 << 20, 1 << 24, 32
_LONG_DECODE = 1 << 25  # keys and values of 128 MiB in float32, of which caches hold little

_SHORT = 512
_EDGE = 128  # keys that a tile visits beyond a window's edges


_TRAINING = ("small train", "train")


def kinds_beside(kind: str) -> tuple[str, ...]:
    """Return the kinds that are calibrated together with one, the quickest to try first.

    >>> kinds_beside("train"), kinds_beside("dense")[0]
    (('train',), 'small decode')
    """
    left_out = {*_TRAINING, *UNCALIBRATED}
    return (
        ("train",) if kind in _TRAINING else tuple(k for k in reversed(KINDS) if k not in left_out)
    )


def kind_of(p: Problem) -> str:
    """Return the kind of a problem, by its class.

    >>> p = Problem(batch=1, q_len=1000, kv_len=1000, heads=8, kv_heads=8, head_dim=64)
    >>> kind_of(p), kind_of(p.with_(q_len=1, kv_heads=2)), kind_of(p.with_(head_dim=128))
    ('dense', 'grouped decode', 'wide')
    >>> kind_of(p.with_(q_len=1)), kind_of(p.with_(q_len=1, kv_len=4000, batch=8))
    ('decode', 'long decode')
    >>> kind_of(p.with_(q_len=1, kv_len=400))
    'short decode'
    """
    _, t, s = p.class_sizes
    if trains(p):
        return "small train" if is_small_training(p) else "train"
    if is_small(p):
        return "small decode" if t <= 16 < s else "small"
    if t <= 16 < s:
        return "grouped decode" if p.gqa else _decode(p)
    if p.mask is not None and p.mask.kinds - {"Full"} == {"Causal"}:
        return "causal"
    if s <= _SHORT:
        return "short"
    return "wide" if p.head_dim > 64 else "dense"


def _decode(p: Problem) -> str:
    """Return the kind of decoding with one head each.

    Whether caches hold much of what it reads; and if so whether a head is over in a microsecond,
    which on an Intel Xeon with AMX torch's kernel is quicker to begin with than the native one.
    """
    _, t, s = p.class_sizes
    if work_of(p) // t >= _LONG_DECODE:
        return "long decode"
    return "short decode" if s <= _SHORT else "decode"


def trains(p: Problem) -> bool:
    """Say whether a gradient is wanted of anything."""
    return p.grad or p.bias_grad or p.sinks_grad


def is_small(p: Problem) -> bool:
    """Say whether a call is over in some 20 us, of which what is done around a kernel is a share.

    Few queries are bound by memory, and take as long as many do with eight times the work.

    >>> p = Problem(batch=1, q_len=32, kv_len=32, heads=8, kv_heads=8, head_dim=64)
    >>> is_small(p), is_small(p.with_(q_len=256, kv_len=256)), is_small(p.with_(q_len=1))
    (True, False, True)
    """
    _, t, s = p.class_sizes
    return work_of(p) < (_SMALL_DECODE if t <= 16 < s else _SMALL)


def is_tiny_training(p: Problem) -> bool:
    """Say whether a call that trains is over in some 100 us, of which much is not the kernel's.

    There torch's own node of the graph is quicker than one in Python (``polyattn bench harm --only
    "fwd+bwd tiny*"``), unless a mask has to be made for its kernel.

    >>> p = Problem(batch=2, q_len=16, kv_len=16, heads=4, kv_heads=4, head_dim=16, grad=True)
    >>> is_tiny_training(p), is_tiny_training(p.with_(q_len=64, kv_len=64))
    (True, False)
    """
    # in half types the native kernels are several times faster
    limit = _TINY_TRAINING if p.dtype == "float32" else _TINY_TRAINING >> 4
    return trains(p) and not is_array(p) and work_of(p) < limit


def is_small_training(p: Problem) -> bool:
    """Say whether a float32 call that trains is over in a millisecond or so, or meets few keys.

    The native backward pass packs for more rows than there are, which some processors mind and
    others do not: a kind of its own. In half types the native kernels are several times faster all
    the same, and masks that torch's kernel takes wrapped cost more than that.

    >>> p = Problem(batch=16, q_len=32, kv_len=32, heads=4, kv_heads=4, head_dim=32, grad=True)
    >>> is_small_training(p), is_small_training(p.with_(q_len=256, kv_len=256))
    (True, False)
    """
    kinds = frozenset() if p.mask is None else p.mask.kinds - {"Full"}
    taken = kinds <= {"Causal"} or kinds == {"Dense"}
    if not (trains(p) and taken) or p.dtype != "float32":
        return False
    return p.class_sizes[2] <= _FEW_KEYS or work_of(p) <= _SMALL_TRAINING


def work_of(p: Problem) -> int:
    """Return the work of the problem's class: B * N * T * S * (H + V), in multiplications.

    >>> work_of(Problem(batch=1, q_len=100, kv_len=128, heads=2, kv_heads=2, head_dim=8))
    524288
    """
    batch, t, s = p.class_sizes
    return batch * p.heads * t * s * (p.head_dim + p.value_dim)


def is_array(p: Problem) -> bool:
    """Say whether torch's kernel is given the mask as an array: it knows causal ones alone.

    >>> p = Problem(batch=1, q_len=1, kv_len=128, heads=8, kv_heads=8, head_dim=64)
    >>> is_array(p), is_array(p.with_(mask=MaskFacts.parse("Causal()", None)))
    (False, False)
    >>> is_array(p.with_(mask=MaskFacts.parse("Window(left=31)", None)))
    True
    """
    return p.mask is not None and bool(p.mask.kinds - {"Full", "Causal"})


def is_band(p: Problem) -> bool:
    """Say whether the mask leaves some keys to each position, and by positions alone.

    So do windows, chunks and first keys, also joined with causal masks. The native kernels know
    such a mask by positions and skip tiles; torch's reads an array of it.
    """
    kinds = frozenset() if p.mask is None else p.mask.kinds
    return bool(kinds & _NARROW) and kinds <= _BY_POSITION


def share_of(p: Problem) -> float:
    """Return the share of the tiles that a static mask leaves, at most; 1.0 where it is not known.

    Known are windows, chunks and first keys, also joined with causal masks: the native kernels
    skip what these empty, torch's kernel does not. Whole tiles are visited at the edges of each,
    and the shortest length of the class counts.

    >>> from polyattn.problem import MaskFacts
    >>> p = Problem(batch=1, q_len=4096, kv_len=4096, heads=8, kv_heads=8, head_dim=64)
    >>> share_of(p), share_of(p.with_(mask=MaskFacts.parse("Window(left=255, right=0)", None)))
    (1.0, 0.1875)
    >>> [
    ...     share_of(p.with_(mask=MaskFacts.parse(mask, None)))
    ...     for mask in (
    ...         "Chunked(384) & Causal()",
    ...         "Causal() & (Window(left=251, right=None) | FirstKeys(4))",
    ...     )
    ... ]
    [0.25, 0.25]
    """
    width = _width(p.mask) if p.mask is not None and is_band(p) else None
    if width is None:
        return 1.0
    keys = max(1, p.class_sizes[2] // 2)
    return min(1.0, width / keys)


_NARROW = {"Window", "Chunked", "FirstKeys"}
_BY_POSITION = _NARROW | {"Causal", "And", "Or", "Full"}


@functools.lru_cache(maxsize=256)
def _width(mask: MaskFacts) -> int | None:
    """Return how many keys are visited for a query at most, with those at the edges."""
    return _seen(mask.structure, None, None)


def _seen(mask: Structure, left: int | None, right: int | None) -> int | None:
    """Return it of a mask that is seen within so many keys around the query; None: no bound."""
    if mask.kind == "Or":
        each = [_seen(part, left, right) for part in mask.parts]
        return None if None in each else sum(one for one in each if one is not None)
    parts = mask.parts if mask.kind == "And" else (mask,)
    for part in parts:
        if part.kind == "Causal":
            right = _least(right, 0)
        elif part.kind == "Window":
            left = _least(left, part.named["left"])
            right = _least(right, part.named["right"])
    found = None if left is None or right is None else left + right + 1 + _EDGE
    for part in parts:
        if part.kind in ("Chunked", "FirstKeys"):
            found = _least(found, part.arguments[0] + _EDGE)
        elif part.kind == "Or":
            found = _least(found, _seen(part, left, right))
    return found


def _least(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)

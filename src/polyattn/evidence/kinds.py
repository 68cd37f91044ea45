"""The kinds of problems that evidence is about, and how much work one is.

Everything here is a function of a problem's class (see :attr:`polyattn.Problem.class_sizes`): all
lengths of a class are one kind, and get one choice.
"""

from __future__ import annotations

import functools
import re

from polyattn.problem import Problem

__all__ = ["DTYPES", "KINDS", "NATIVE_FROM", "kind_of", "kinds_beside", "share_of", "work_of"]

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that the native CPU kernels have."""

KINDS = {
    "dense": "dense",
    "wide": "dense, heads wider than 64,",
    "causal": "causal",
    "short": "short (at most 512 keys)",
    "decode": "decoding",
    "grouped decode": "decoding with grouped heads",
    "train": "training",
}
"""Each kind, and how it is called in a sentence before the dtype."""

NATIVE_FROM = 1 << 21
"""The work of a class from which the native CPU kernels may be preferred: about 20 us."""

_SHORT = 512
_EDGE = 128  # keys that a tile visits beyond a window's edges


def kinds_beside(kind: str) -> tuple[str, ...]:
    """Return the kinds that are calibrated together with one, the quickest to try first.

    >>> kinds_beside("train"), kinds_beside("dense")[0]
    (('train',), 'grouped decode')
    """
    return ("train",) if kind == "train" else tuple(k for k in reversed(KINDS) if k != "train")


def kind_of(p: Problem) -> str:
    """Return the kind of a problem, by its class.

    >>> p = Problem(batch=1, q_len=1000, kv_len=1000, heads=8, kv_heads=8, head_dim=64)
    >>> kind_of(p), kind_of(p.with_(q_len=1, kv_heads=2)), kind_of(p.with_(head_dim=128))
    ('dense', 'grouped decode', 'wide')
    """
    _, t, s = p.class_sizes
    if p.grad or p.bias_grad or p.sinks_grad:
        return "train"
    if t <= 16 < s:
        return "grouped decode" if p.gqa else "decode"
    if p.mask is not None and p.mask.kinds - {"Full"} == {"Causal"}:
        return "causal"
    if s <= _SHORT:
        return "short"
    return "wide" if p.head_dim > 64 else "dense"


def work_of(p: Problem) -> int:
    """Return the work of the problem's class: B * N * T * S * (H + V), in multiplications.

    >>> work_of(Problem(batch=1, q_len=100, kv_len=128, heads=2, kv_heads=2, head_dim=8))
    524288
    """
    batch, t, s = p.class_sizes
    return batch * p.heads * t * s * (p.head_dim + p.value_dim)


def share_of(p: Problem) -> float:
    """Return the share of the tiles that a static mask leaves, at most; 1.0 where it is not known.

    Known are windows, also joined to causal masks by ``&``: the native kernels skip what these
    empty, torch's kernel does not. Whole tiles are visited at a window's edges, and the shortest
    length of the class counts.

    >>> from polyattn.problem import MaskFacts
    >>> p = Problem(batch=1, q_len=4096, kv_len=4096, heads=8, kv_heads=8, head_dim=64)
    >>> share_of(p), share_of(p.with_(mask=MaskFacts.parse("Window(left=255, right=0)", None)))
    (1.0, 0.1875)
    """
    if p.mask is None or "Window" not in p.mask.kinds or p.mask.kinds - _BANDS:
        return 1.0
    width = _width(p.mask.signature)
    if width is None:
        return 1.0
    keys = max(1, p.class_sizes[2] // 2)
    return min(1.0, (width + _EDGE) / keys)


_BANDS = {"Window", "Causal", "And", "Full"}
_SIDES = re.compile(r"Window\(left=(\w+), right=(\w+)")


@functools.lru_cache(maxsize=256)
def _width(signature: str) -> int | None:
    """Return how many keys a query sees in the narrowest band of all that are joined by ``&``."""
    sides = [found.groups() for found in _SIDES.finditer(signature)]
    lefts = [int(left) for left, _ in sides if left.isdigit()]
    rights = [int(right) for _, right in sides if right.isdigit()]
    if "Causal" in signature:
        rights.append(0)
    return min(lefts) + min(rights) + 1 if lefts and rights else None

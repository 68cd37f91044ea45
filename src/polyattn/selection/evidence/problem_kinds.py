"""The kinds of problems that evidence is about, and how much work one is.

Everything here is a function of a problem's class (see :attr:`polyattn.Problem.class_sizes`): all
lengths of a class are one kind, and get one choice.
"""

from __future__ import annotations

import functools

from polyattn.problem import MaskFacts, Problem

__all__ = [
    "DTYPES",
    "KINDS",
    "is_band",
    "is_small",
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
    "grouped decode": "decoding with grouped heads",
    "small": "small (some 20 us)",
    "small decode": "small (some 20 us) decoding",
    "train": "training",
}
"""Each kind, and how it is called in a sentence before the dtype."""

_SMALL, _SMALL_DECODE = 1 << 21, 1 << 18

_SHORT = 512
_EDGE = 128  # keys that a tile visits beyond a window's edges


def kinds_beside(kind: str) -> tuple[str, ...]:
    """Return the kinds that are calibrated together with one, the quickest to try first.

    >>> kinds_beside("train"), kinds_beside("dense")[0]
    (('train',), 'small decode')
    """
    return ("train",) if kind == "train" else tuple(k for k in reversed(KINDS) if k != "train")


def kind_of(p: Problem) -> str:
    """Return the kind of a problem, by its class.

    >>> p = Problem(batch=1, q_len=1000, kv_len=1000, heads=8, kv_heads=8, head_dim=64)
    >>> kind_of(p), kind_of(p.with_(q_len=1, kv_heads=2)), kind_of(p.with_(head_dim=128))
    ('dense', 'grouped decode', 'wide')
    """
    _, t, s = p.class_sizes
    if trains(p):
        return "train"
    if is_small(p):
        return "small decode" if t <= 16 < s else "small"
    if t <= 16 < s:
        return "grouped decode" if p.gqa else "decode"
    if p.mask is not None and p.mask.kinds - {"Full"} == {"Causal"}:
        return "causal"
    if s <= _SHORT:
        return "short"
    return "wide" if p.head_dim > 64 else "dense"


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


def work_of(p: Problem) -> int:
    """Return the work of the problem's class: B * N * T * S * (H + V), in multiplications.

    >>> work_of(Problem(batch=1, q_len=100, kv_len=128, heads=2, kv_heads=2, head_dim=8))
    524288
    """
    batch, t, s = p.class_sizes
    return batch * p.heads * t * s * (p.head_dim + p.value_dim)


def is_band(p: Problem) -> bool:
    """Say whether the mask is a window, also joined to causal ones by ``&``.

    The native kernels know such a mask by positions and skip tiles; torch's reads an array of it.
    """
    return p.mask is not None and "Window" in p.mask.kinds and not p.mask.kinds - _BANDS


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
    width = _width(p.mask) if p.mask is not None and is_band(p) else None
    if width is None:
        return 1.0
    keys = max(1, p.class_sizes[2] // 2)
    return min(1.0, (width + _EDGE) / keys)


_BANDS = {"Window", "Causal", "And", "Full"}


@functools.lru_cache(maxsize=256)
def _width(mask: MaskFacts) -> int | None:
    """Return how many keys a query sees in the narrowest band of all that are joined by ``&``."""
    windows = [window.named for window in mask.structure.of("Window")]
    lefts = [window["left"] for window in windows if window["left"] is not None]
    rights = [window["right"] for window in windows if window["right"] is not None]
    if "Causal" in mask.kinds:
        rights.append(0)
    return min(lefts) + min(rights) + 1 if lefts and rights else None

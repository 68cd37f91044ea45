"""Random cases: small, so that thousands run a minute, and odd, so that they find something.

One in fifty has few queries on many keys: more than a kernel meets in one step, or by one thread.
"""

from __future__ import annotations

from random import Random

from polyattn.conformance.cases import Case, Tree
from polyattn.masks import LEAVES, Causal
from polyattn.masks.index import Align
from polyattn.problem import CODES

__all__ = ["random_case"]

_EDGES = (7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80)
_MOST_SCORES = 24_000  # of B * N * T * S: what keeps a case at milliseconds
_MOST_OF_LONG = 160_000  # the same where there are many keys, which are rare
_KINDS = [kind for kind in LEAVES for _ in range(kind.weight)]


def random_case(rng: Random) -> Case:
    """Draw a case; equal states of `rng` give equal cases."""
    layout = rng.choice(("BTNH", "BTNH", "BNTH", "BNTH", "packed"))
    b, t, s, n, k = _sizes(rng, layout)
    h = _head_dim(rng)
    v = h if rng.random() < 0.75 else _head_dim(rng)
    bias, sinks = None if layout == "packed" else _bias(rng), 0
    if rng.random() < 0.15:
        sinks = rng.choice((1, 1, 2, 3))
    case = Case(
        seed=rng.randrange(1 << 31), b=b, t=t, s=s, n=n, k=k, h=h, v=v,
        dtype=_weighted(rng, (("float32", 9), ("bfloat16", 4), ("float16", 4), ("float64", 3))),
        layout=layout, mask=_packed_mask(rng) if layout == "packed" else _mask(rng),
        bias=bias, sinks=sinks,
        scale=rng.choice((-0.3, 0.0, 0.05, 0.5, 1.0)) if rng.random() < 0.3 else None,
        softcap=rng.choice((0.5, 2.0, 30.0)) if rng.random() < 0.12 else None,
        strides="ccc" if rng.random() < 0.45 else "".join(rng.choice("cteso") for _ in "qkv"),
        grad=_grad(rng, bias is not None, sinks > 0),
        lse=rng.random() < 0.35, deterministic=rng.random() < 0.15, poison=rng.random() < 0.5,
    )  # fmt: skip
    if case.packed:
        return case
    if case.seed % 50 == 1:
        case = _long(case)
    return case if case.seed % 25 and case.seed % 200 != 1 else _quantized(case)


def _long(case: Case) -> Case:
    """Return the case with few queries and many keys, drawn of its seed as codes are."""
    rng = Random(case.seed)
    b, k, t = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 8)), rng.choice((1, 1, 1, 2, 5, 40))
    n, s = k * rng.choice((1, 1, 2, 4)), rng.randint(200, 5000)
    if b * n * t * s > _MOST_OF_LONG:
        b, n = 1, k
    if n * t * s > _MOST_OF_LONG:
        n, k = 1, 1
    s = min(s, _MOST_OF_LONG // (b * n * t))
    return case.with_(b=b, t=t, s=s, n=n, k=k, h=min(case.h, 40), v=min(case.v, 40))


def _quantized(case: Case) -> Case:
    """Return the case on codes, which are constants; drawn of its seed: others stay as they are."""
    rng = Random(case.seed)
    codes = rng.choice(CODES), rng.choice((1, 2, 3, 7, 16, 32, 64, 100))
    constant = case.grad.replace("k", "").replace("v", "") if rng.random() < 0.2 else ""
    return case.with_(quantized=codes, grad=constant, deterministic=False)


def _weighted(rng: Random, choices: tuple[tuple[str, int], ...]) -> str:
    return rng.choice([name for name, weight in choices for _ in range(weight)])


def _length(rng: Random) -> int:
    kind = rng.random()
    if kind < 0.02:
        return 0
    if kind < 0.12:
        return 1
    if kind < 0.3:
        return rng.choice(_EDGES)
    return rng.randint(2, 20) if kind < 0.75 else rng.randint(21, 80)


def _sizes(rng: Random, layout: str) -> tuple[int, int, int, int, int]:
    b = rng.choice((1, 1, 1, 2, 2, 3)) if rng.random() > 0.015 else 0
    if layout == "packed":
        b = rng.choice((1, 2, 3, 4))
    k = rng.choice((1, 1, 2, 3))
    n = k * rng.choice((1, 1, 1, 2, 3, 4))
    t = _length(rng)
    s = t if rng.random() < 0.35 else _length(rng)
    rows = 1 if layout == "packed" else max(b, 1)
    if rows * n * t * s > _MOST_SCORES:
        b, n, k = min(b, 4 if layout == "packed" else 1), (2 if n > k else 1), 1
    return b, t, s, n, k


def _head_dim(rng: Random) -> int:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice((8, 16, 24, 32, 40, 64, 80))
    return rng.randrange(1, 80, 2) if kind < 0.6 else rng.randint(1, 40)


def _grad(rng: Random, bias: bool, sinks: bool) -> str:
    if rng.random() < 0.55:
        return ""
    wanted = "qkv" if rng.random() < 0.75 else "".join(x for x in "qkv" if rng.random() < 0.5)
    wanted += "b" if bias and rng.random() < 0.5 else ""
    return wanted + ("s" if sinks and rng.random() < 0.5 else "")


def _bias(rng: Random) -> Tree | None:
    kind = rng.random()
    dtype = rng.choice(("own", "float32"))
    if kind < 0.18:
        dims = "".join(dim for dim in "bnts" if rng.random() < 0.6)
        return ("dense", dims, dtype, rng.random() < 0.3)
    return ("alibi", rng.random() < 0.3, dtype) if kind < 0.26 else None


def _mask(rng: Random) -> Tree | None:
    kind = rng.random()
    align: Align = "top_left" if rng.random() < 0.3 else "bottom_right"
    if kind < 0.15:
        return None
    if kind < 0.55:
        return _leaf(rng, align)
    if kind < 0.8:
        return _turned(rng, ("and", *(_leaf(rng, align) for _ in range(2))))
    if kind < 0.9:
        return _turned(rng, ("or", *(_leaf(rng, align) for _ in range(2))))
    outer, inner = rng.choice((("and", "or"), ("or", "and")))
    a, b, c = (_leaf(rng, align) for _ in range(3))
    return (outer, a, _turned(rng, (inner, b, c)))


def _packed_mask(rng: Random) -> Tree | None:
    """What is joined with Packed by &."""
    kind = rng.random()
    align: Align = "top_left" if rng.random() < 0.3 else "bottom_right"
    if kind < 0.2:
        return None
    if kind < 0.65:
        return _leaf(rng, align, packed=True)
    join = "and" if kind < 0.85 else "or"
    return _turned(rng, (join, *(_leaf(rng, align, packed=True) for _ in range(2))))


def _leaf(rng: Random, align: Align, packed: bool = False) -> Tree:
    kind = rng.choice([kind for kind in _KINDS if kind.packs or not packed])
    if kind.only_align not in (None, align):
        kind = Causal
    return _turned(rng, (kind.__name__, *kind.draw(rng, align, packed)))


def _turned(rng: Random, tree: Tree) -> Tree:
    return ("not", tree) if rng.random() < 0.1 else tree

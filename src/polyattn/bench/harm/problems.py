"""The ordinary problems of ``bench harm``: a fixed list, each in every dtype.

Shapes are what models call attention with: language models of several families at prefill and
decoding, encoders with padding, vision transformers, cross attention of image models, speech. The
problems of the outside bench that found harm (dense, causal, ViT, GQA, window, decode) are in it.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polyattn.bench.cpu.cases import SHORT, Case, Size
from polyattn.errors import PolyattnError

__all__ = ["UserCase", "chosen", "problems"]


@dataclass(frozen=True)
class UserCase(Case):
    """A case as a program has it. `numbers`: its mask comes as numbers to add, not as booleans."""

    numbers: bool = False


@dataclass(frozen=True)
class _Family:
    """Shapes of one kind: (batch, heads, length, head dim), with kv heads and key length if other.

    A shape is written ``(B, N, T, H)``; N may be ``(N, K)`` and T ``(T, S)``. Those under `bnth`
    come heads second and contiguous, those under `btnh` as projections leave them, heads third.
    """

    group: str
    mask: str = "none"
    bnth: Sequence[tuple[object, ...]] = ()
    btnh: Sequence[tuple[object, ...]] = ()
    train: bool = False
    numbers: bool = False


_SELF = (
    _Family("dense", bnth=(
        (1, 8, 16, 64), (2, 8, 64, 64), (1, 12, 128, 64), (2, 8, 256, 64), (1, 8, 512, 64),
        (1, 12, 333, 64), (1, 8, 1024, 64), (1, 8, 2048, 64), (1, 8, 4096, 64), (1, 16, 2048, 128),
    ), btnh=((4, 12, 128, 64), (2, 12, 512, 64), (1, 16, 512, 128))),
    _Family("dense", bnth=((2, 8, 512, 32), (2, 8, 512, 40), (2, 8, 512, 96)),
            btnh=((2, 8, 512, 80),)),
    _Family("causal", "causal", bnth=(
        (1, 8, 16, 64), (1, 8, 64, 64), (1, 12, 77, 64), (1, 8, 1024, 64), (1, 8, 4096, 64),
        (1, 16, 2048, 128),
    ), btnh=((1, 12, 128, 64), (2, 12, 512, 64), (1, 8, 2048, 64))),
    _Family("causal", "causal", bnth=((2, 8, 512, 40), (2, 8, 512, 80), (2, 4, 512, 256)),
            btnh=((2, 8, 512, 96),)),
    _Family("GQA", bnth=((1, (32, 8), 512, 64), (1, (32, 8), 2048, 64))),
    _Family("GQA causal", "causal", bnth=(
        (1, (32, 8), 128, 128), (1, (32, 8), 2048, 128), (2, (16, 2), 512, 64),
        (1, (8, 1), 1024, 256),
    ), btnh=((1, (32, 8), 512, 128), (1, (32, 8), 1024, 64))),
    _Family("ViT", bnth=((8, 16, 197, 64), (4, 12, 50, 64), (64, 4, 49, 32)),
            btnh=((8, 12, 197, 64), (1, 16, 577, 64), (1, 16, 1024, 80))),
    _Family("speech", btnh=((1, 8, 1500, 64),)),
)  # fmt: skip
_MASKED = (
    _Family("half padding", "padding", bnth=((8, 12, 256, 64), (4, 8, 2048, 64)),
            btnh=((4, 12, 128, 64), (4, 8, 512, 64))),
    _Family("causal padding", "causal padding", bnth=((4, 12, 128, 64), (2, 8, 1024, 64)),
            btnh=((4, (32, 8), 512, 64),)),
    _Family("causal padding as numbers", "causal padding", bnth=((4, 12, 256, 64),), numbers=True),
    _Family("window 256", "window", bnth=((1, 8, 512, 64), (1, 8, 4096, 64),
            (1, (32, 8), 2048, 128)), btnh=((1, 8, 1024, 64),)),
    _Family("window 256 as numbers", "window", bnth=((1, 8, 1024, 64), (1, 8, 2048, 64)),
            numbers=True),
    _Family("90% block-sparse", "blocks", bnth=((1, 8, 1024, 64), (1, 8, 4096, 64)),
            btnh=((2, 8, 2048, 64),)),
)  # fmt: skip
_CROSS = (
    _Family(
        "cross",
        bnth=((2, 8, (256, 77), 40), (2, 8, (4096, 77), 40), (1, 8, (64, 1500), 64)),
        btnh=((2, 10, (1024, 77), 64),),
    ),
    _Family(
        "rectangle",
        bnth=((1, 8, (300, 1000), 64), (1, 8, (64, 2048), 64), (1, (32, 8), (4, 1024), 128)),
    ),
    _Family("few keys", bnth=((2, 8, (512, 4), 64),)),
)
_DECODE = (
    _Family("tiny decode", bnth=((1, 4, (1, 32), 32), (1, 8, (1, 16), 64), (1, 12, (1, 64), 64))),
    _Family("first tokens", bnth=((1, 8, (1, 1), 64), (1, 12, (1, 4), 64), (8, 12, (1, 8), 64))),
    _Family("decode", bnth=tuple((1, 12, (1, s), 64) for s in (128, 512, 2048, 8192))),
    _Family("decode", bnth=tuple((8, 12, (1, s), 64) for s in (128, 1024, 4096))),
    _Family("decode", bnth=tuple((1, 32, (1, s), 128) for s in (4096, 16384))),
    _Family("decode", bnth=tuple(
        (1, (32, 8), (1, s), 128) for s in (128, 512, 1024, 4096, 8192, 32768)
    ), btnh=tuple((1, (32, 8), (1, s), 128) for s in (1024, 4096))),
    _Family("decode", bnth=tuple((8, (32, 8), (1, s), 128) for s in (128, 1024, 4096, 8192))),
    _Family("decode speech", btnh=((1, 8, (1, 1500), 64),)),
    _Family("decode half padding", "padding", bnth=((8, 12, (1, 128), 64),
            (8, (32, 8), (1, 1024), 128))),
)  # fmt: skip
_TRAINED = (
    _Family("fwd+bwd dense", train=True, bnth=((1, 8, 1024, 64), (1, 8, 2048, 64)),
            btnh=((4, 12, 128, 64), (8, 12, 197, 64), (2, 8, 512, 80))),
    _Family("fwd+bwd tiny", train=True, bnth=((2, 4, 16, 16), (1, 8, 16, 64), (2, 4, 32, 32))),
    _Family("fwd+bwd tiny causal", "causal", train=True,
            bnth=((2, 4, 16, 16), (2, 4, 64, 16), (2, (4, 2), 16, 16), (2, (4, 2), 64, 32))),
    _Family("fwd+bwd tiny causal padding", "causal padding", train=True,
            bnth=((2, 4, 16, 16), (2, 4, 64, 16), (2, (4, 2), 64, 16))),
    _Family("fwd+bwd small", train=True, bnth=((2, 4, 65, 32), (16, 4, 32, 32), (16, 4, 64, 32))),
    _Family("fwd+bwd causal", "causal", train=True,
            bnth=((1, 12, 1024, 64), (1, 8, 2048, 64), (1, 16, 1024, 128), (2, 8, 512, 96)),
            btnh=((8, 12, 128, 64), (2, 12, 512, 64))),
    _Family("fwd+bwd GQA causal", "causal", train=True, bnth=((1, (16, 4), 512, 64),)),
    _Family("fwd+bwd half padding", "padding", train=True, bnth=((4, 8, 512, 64),),
            btnh=((4, 12, 128, 64),)),
    _Family("fwd+bwd window 256", "window", train=True,
            bnth=((1, 8, 1024, 64), (1, 8, 2048, 64))),
    _Family("fwd+bwd cross", train=True, bnth=((2, 8, (1024, 77), 40),)),
)  # fmt: skip
_FAMILIES = (*_SELF, *_MASKED, *_CROSS, *_DECODE, *_TRAINED)
_QUICK_SHARE = 10
_QUICK_FLOPS = 1e10


def problems() -> Iterator[UserCase]:
    """Yield every problem, in the same order each time; no two have the same name."""
    for family in _FAMILIES:
        for layout, shapes in (("BNTH", family.bnth), ("BTNH", family.btnh)):
            for shape in shapes:
                for dtype in SHORT:
                    yield UserCase(
                        family.group,
                        _size(shape),
                        dtype,
                        family.mask,
                        family.train,
                        layout,
                        numbers=family.numbers,
                    )


def _size(shape: tuple[object, ...]) -> Size:
    batch, heads, length, dim = shape
    n, k = heads if isinstance(heads, tuple) else (heads, heads)
    t, s = length if isinstance(length, tuple) else (length, length)
    return Size(batch, n, k, t, s, dim)  # type: ignore[arg-type]


def chosen(only: str = "", quick: bool = False) -> list[UserCase]:
    """Return the problems whose name holds `only` or matches its wildcards; `quick`: a tenth.

    The tenth is the same each time, has every group and dtype, and none of the long ones.
    """
    found = [c for c in problems() if only in c.name or fnmatch.fnmatch(c.name, only)]
    if not found:
        raise PolyattnError(
            f"got --only {only!r}, which no problem holds, expected a part of a name such as "
            '"fwd+bwd causal (1,12,1024,64) fp32", or wildcards as in "decode * bf16".'
        )
    if not quick:
        return found
    short = [c for c in found if c.useful_flops / c.density <= _QUICK_FLOPS] or found[:1]
    picked = {_one_of_group(short, group, n) for n, group in enumerate(_groups(short))}
    rest = [case for case in short if case not in picked]
    more = -(-len(found) // _QUICK_SHARE) - len(picked)
    picked.update(random.Random(0).sample(rest, max(0, min(more, len(rest)))))
    return [case for case in short if case in picked]


def _groups(cases: Sequence[UserCase]) -> list[str]:
    return list(dict.fromkeys(case.group for case in cases))


def _one_of_group(cases: Sequence[UserCase], group: str, turn: int) -> UserCase:
    """Return a problem of the group, in each turn of another dtype where there is one."""
    members = [case for case in cases if case.group == group]
    dtypes = sorted({case.dtype for case in members})
    members = [case for case in members if case.dtype == dtypes[turn % len(dtypes)]]
    return members[len(members) // 2]

"""The rows of ``bench gpu``: what models call attention with on a GPU, in the half type they use.

Sizes fill the device, but for those that show what a call costs before its kernel runs.
"""

from __future__ import annotations

import dataclasses
import fnmatch

from polyattn.bench.cpu.cases import Case, Size
from polyattn.errors import PolyattnError

__all__ = ["CASES", "chosen"]


def _case(group: str, size: tuple[int, ...], mask: str = "none", **more: object) -> Case:
    return Case(group, Size(*size), **{"dtype": "bfloat16", "mask": mask, **more})  # type: ignore[arg-type]


_LONG, _WIDE = (4, 16, 16, 4096, 4096, 64), (2, 16, 16, 4096, 4096, 128)

CASES: tuple[Case, ...] = (
    _case("dense", _WIDE),
    _case("dense", _LONG),
    _case("dense", (2, 16, 16, 4096, 4096, 128), layout="BTNH"),
    _case("short", (8, 12, 12, 512, 512, 64)),
    _case("ViT", (64, 12, 12, 197, 197, 64)),
    _case("cross", (2, 10, 10, 4096, 77, 64)),
    _case("causal", _WIDE, "causal"),
    _case("causal", _LONG, "causal"),
    _case("GQA causal", (1, 32, 8, 4096, 4096, 128), "causal"),
    _case("half padding", (4, 16, 16, 2048, 2048, 64), "padding"),
    _case("half padding", (8, 12, 12, 512, 512, 64), "padding"),
    _case("causal padding", (4, 16, 16, 2048, 2048, 64), "causal padding"),
    _case("window 256", (1, 16, 16, 8192, 8192, 64), "window"),
    _case("90% block-sparse", (1, 16, 16, 8192, 8192, 64), "blocks"),
    _case("decode", (8, 32, 8, 1, 4096, 128)),
    _case("decode", (1, 32, 8, 1, 32768, 128)),
    _case("decode, padded", (8, 32, 8, 1, 4096, 128), "padding"),
    _case("decode, padded", (8, 32, 8, 1, 4096, 128), "padding", layout="BTNH"),
    _case("decode, padded", (8, 32, 8, 1, 32768, 128), "padding"),
    _case("tiny", (1, 8, 8, 16, 16, 64)),
    _case("tiny causal", (1, 8, 8, 64, 64, 64), "causal"),
    _case("dense", (2, 16, 16, 2048, 2048, 64), dtype="float32"),
    _case("causal", (2, 16, 16, 2048, 2048, 64), "causal", dtype="float32"),
    _case("fwd+bwd dense", _WIDE, train=True),
    _case("fwd+bwd causal", _LONG, "causal", train=True),
    _case("fwd+bwd causal", (4, 16, 16, 1024, 1024, 64), "causal", train=True),
    _case("fwd+bwd half padding", (4, 16, 16, 2048, 2048, 64), "padding", train=True),
    _case("fwd+bwd half padding", (8, 12, 12, 512, 512, 64), "padding", train=True),
    _case("fwd+bwd causal padding", (4, 16, 16, 2048, 2048, 64), "causal padding", train=True),
    _case("fwd+bwd window 256", (1, 16, 16, 8192, 8192, 64), "window", train=True),
)
"""What is timed."""


def chosen(only: str = "", quick: bool = False) -> list[Case]:
    """Return the cases whose names hold `only` or match its wildcards; `quick`: shorter by 8.

    >>> [str(case.size) for case in chosen("cross*", quick=True)]
    ['(2,10,512x9,64)']
    """
    found = [case for case in CASES if only in case.name or fnmatch.fnmatch(case.name, only)]
    if not found:
        raise PolyattnError(
            f"got --only {only!r}, which no case holds, expected a part of a name such as "
            f"{CASES[0].name!r}, or wildcards as in 'decode*'."
        )
    return [_shorter(case) for case in found] if quick else found


def _shorter(case: Case) -> Case:
    size = case.size
    lengths = {name: max(1, getattr(size, name) // 8) for name in ("q_len", "kv_len")}
    return dataclasses.replace(case, size=dataclasses.replace(size, **lengths))

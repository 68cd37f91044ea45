"""The rows of ``bench cpu``: what is timed, and how much of it is useful work."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BLOCK", "CASES", "PAGE", "SHORT", "WINDOW", "Case", "Size", "blocks_of_row", "padded_lengths",
    "quick",
]  # fmt: skip

WINDOW = 256
"""Keys that a query sees in the window cases: itself and the 255 before it."""
BLOCK = 64
PAGE = 16
"""Keys of a page, where decoding is timed on pages too."""
BLOCKS_KEPT = 0.1
SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

_PADDED = (0.2441, 0.3911, 0.6089, 0.7559)  # lengths over S; their mean is a half


@dataclass(frozen=True)
class Size:
    """The sizes of a call, in the letters used everywhere."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int

    def __str__(self) -> str:
        heads = f"{self.heads}"
        if self.heads != self.kv_heads:
            heads += f"/{self.kv_heads}"
        lengths = f"{self.q_len}"
        if self.q_len != self.kv_len:
            lengths += f"x{self.kv_len}"
        return f"({self.batch},{heads},{lengths},{self.head_dim})"


@dataclass(frozen=True)
class Case:
    """One row. `mask`: none, causal, window, blocks, padding or "causal padding", which is both.

    `layout` is that of all arrays. `goal`: how many times as long the stock function takes.
    """

    group: str
    size: Size
    dtype: str = "float32"
    mask: str = "none"
    train: bool = False
    layout: str = "BNTH"
    goal: float | None = None

    @property
    def name(self) -> str:
        """The row's name, which is unique."""
        layout = "" if self.layout == "BNTH" else f" {self.layout}"
        return f"{self.group} {self.size} {SHORT[self.dtype]}{layout}"

    @property
    def is_decode(self) -> bool:
        """Whether memory bandwidth, and not arithmetic, is what the case is about."""
        return self.size.q_len == 1

    @property
    def pairs(self) -> int:
        """Pairs of query and key that the mask allows, of one head, over the batch."""
        s = self.size
        if self.mask == "causal":
            return s.batch * sum(range(s.kv_len - s.q_len + 1, s.kv_len + 1))
        if self.mask == "window":
            return s.batch * sum(min(t + 1, WINDOW) for t in range(s.q_len))
        if self.mask == "blocks":
            columns, rows = s.kv_len // BLOCK, s.q_len // BLOCK
            return s.batch * BLOCK**2 * sum(blocks_of_row(i, columns) for i in range(rows))
        if self.mask == "padding":
            return s.q_len * sum(padded_lengths(s))
        if self.mask == "causal padding":
            return sum(min(t + 1, end) for end in padded_lengths(s) for t in range(s.q_len))
        return s.batch * s.q_len * s.kv_len

    @property
    def density(self) -> float:
        """The share of all pairs that the mask allows."""
        return self.pairs / (self.size.batch * self.size.q_len * self.size.kv_len)

    @property
    def useful_flops(self) -> float:
        """Operations on allowed pairs: two products of 2 H each, 3.5 times that with backward."""
        return 4.0 * self.size.heads * self.pairs * self.size.head_dim * (3.5 if self.train else 1)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        s, width = self.size, 4 if self.dtype == "float32" else 2
        return 2 * s.batch * s.kv_heads * s.kv_len * s.head_dim * width

    def described(self) -> dict[str, Any]:
        """Return what a record says of the case."""
        return {
            "name": self.name, "group": self.group, **dataclasses.asdict(self.size),
            "dtype": self.dtype, "mask": self.mask, "train": self.train, "layout": self.layout,
            "density": round(self.density, 5), "goal": self.goal,
        }  # fmt: skip


def blocks_of_row(row: int, columns: int) -> int:
    """Return how many blocks a row of blocks visits, so that all rows together keep a tenth.

    >>> [blocks_of_row(i, 64) for i in range(5)]
    [6, 6, 7, 6, 7]
    """
    kept = columns * BLOCKS_KEPT
    return max(1, int((row + 1) * kept) - int(row * kept))


def padded_lengths(size: Size) -> list[int]:
    """Return the key lengths of the padding cases, half of all keys together."""
    return [round(size.kv_len * _PADDED[b % len(_PADDED)]) for b in range(size.batch)]


def _pair(group: str, size: tuple[int, ...], **more: object) -> list[Case]:
    """Return the case in float32 and in bfloat16."""
    return [
        Case(group, Size(*size), dtype, **more)  # type: ignore[arg-type]
        for dtype in ("float32", "bfloat16")
    ]


_LONG = (1, 8, 8, 4096, 4096, 64)
_CACHES = [(batch, 32, 8, 1, keys, 128) for keys in (4096, 32768) for batch in (1, 8)]

CASES: tuple[Case, ...] = (
    *_pair("dense", _LONG),
    *_pair("dense", (1, 16, 16, 2048, 2048, 128)),
    *_pair("ViT", (8, 12, 12, 197, 197, 64)),
    *_pair("short", (2, 12, 12, 512, 512, 64)),
    *_pair("causal", _LONG, mask="causal"),
    *_pair("window 256", _LONG, mask="window"),
    *_pair("90% block-sparse", _LONG, mask="blocks"),
    *_pair("half padding", (4, 8, 8, 2048, 2048, 64), mask="padding"),
    *_pair("GQA prefill", (1, 32, 8, 2048, 2048, 64)),
    *(
        case
        for size in _CACHES
        for layout in ("BNTH", "BTNH")
        for case in _pair("decode", size, layout=layout)
    ),
    *_pair("fwd+bwd dense", _LONG, train=True),
    *_pair("fwd+bwd window 256", _LONG, mask="window", train=True),
)
"""What is timed; :mod:`polyattn.bench.cpu.goals` says what is wanted of it."""


def quick(case: Case) -> Case:
    """Return the case at an eighth of its lengths, without a goal, which is for the real sizes."""
    s = case.size
    lengths = {n: max(1, getattr(s, n) // 8) for n in ("q_len", "kv_len")}
    return dataclasses.replace(case, size=dataclasses.replace(s, **lengths), goal=None)

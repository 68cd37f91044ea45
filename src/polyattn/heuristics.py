"""Which backend to prefer where nothing was asked for and nothing was measured: rows of data.

The first row of the problem's framework whose condition holds gives the order; backends that it
does not name follow in order of registration. A row's reason says what it rests on; "not measured"
marks what was read only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyattn.capabilities import arch_number
from polyattn.problem import Problem

__all__ = ["ROWS", "Row", "preference"]


@dataclass(frozen=True)
class Row:
    """A condition on a framework's problems, the order it prefers, and why."""

    name: str
    when: Callable[[Problem], bool]
    prefer: tuple[str, ...]
    reason: str
    framework: str = "torch"


NATIVE_FROM = 1 << 20
"""The work, B * N * T * S * (H + V), from which the native CPU kernels are preferred."""


def _sparse(p: Problem) -> bool:
    kinds = p.mask.kinds if p.mask else frozenset()
    return bool(kinds & {"Window", "BlockMap", "Segments", "Packed"}) and p.kv_len >= 1024


def _work(p: Problem) -> int:
    return p.batch * p.heads * p.q_len * p.kv_len * (p.head_dim + p.value_dim)


ROWS: tuple[Row, ...] = (
    Row(
        "cpu, scores that fused kernels cannot express, small",
        lambda p: p.device == "cpu" and p.softcap is not None and _work(p) < 1 << 28,
        ("native_cpu", "reference", "flex"),
        "the native kernels cap scores in their tiles; compiling FlexAttention takes seconds, the "
        "float64 reference less at this size",
    ),
    Row(
        "cpu, scores that fused kernels cannot express",
        lambda p: p.device == "cpu" and p.softcap is not None,
        ("native_cpu", "flex", "reference"),
        "the native kernels cap scores in their tiles, and so does compiled FlexAttention",
    ),
    Row(
        "cpu, native kernels",
        lambda p: p.device == "cpu" and _work(p) >= NATIVE_FROM,
        ("native_cpu", "sdpa_flash", "sdpa_math", "reference", "flex"),
        "the native kernels skip masked tiles and use the processor's bfloat16 products: 3 x "
        "torch's kernel as the mean of `polyattn bench cpu --grid` (AVX-512; from 1.2 x on AVX2)",
    ),
    Row(
        "cpu",
        lambda p: p.device == "cpu",
        ("sdpa_flash", "sdpa_math", "native_cpu", "reference", "flex"),
        "torch's flash kernel is faster than its math path on CPUs; "
        "FlexAttention must compile for seconds and is slower unless it skips blocks",
    ),
    Row(
        "cuda, block-sparse masks",
        lambda p: p.device == "cuda" and _sparse(p),
        ("flex", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"),
        "FlexAttention skips the tiles that the mask empties (not measured)",
    ),
    Row(
        "cuda, Hopper",
        lambda p: p.device == "cuda" and p.arch is not None and arch_number(p.arch) == 90,
        ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "sdpa_math"),
        "cuDNN uses Hopper's own instructions, the flash kernel in torch does not (not measured)",
    ),
    Row(
        "cuda",
        lambda p: p.device == "cuda",
        ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "sdpa_math"),
        "torch's own order: flash, memory-efficient, cuDNN (not measured)",
    ),
)


def preference(problem: Problem, names: Iterable[str]) -> tuple[tuple[str, ...], str]:
    """Return all of `names` in preferred order, and the reason.

    >>> p = Problem(batch=1, q_len=8, kv_len=8, heads=1, kv_heads=1, head_dim=8)
    >>> preference(p, ["flex", "sdpa_flash"])[0]
    ('sdpa_flash', 'flex')
    """
    known = tuple(names)
    rows = (row for row in ROWS if row.framework == problem.framework and row.when(problem))
    row = next(rows, None)
    if row is None:
        where = f"{problem.framework} on {problem.device}"
        return known, f"order of registration (no row for {where})"
    listed = tuple(name for name in row.prefer if name in known)
    passed = [name for name in row.prefer if name not in known]
    first = row.prefer.index(listed[0]) if listed else len(row.prefer)
    reason = f"{', '.join(passed[:first])} cannot run it; " if passed[:first] else ""
    return (*listed, *(name for name in known if name not in listed)), reason + row.reason

"""The tuning table of this process, and the classes that problems fall into."""

from __future__ import annotations

import re
import threading

from polyattn import settings
from polyattn.problem import Problem
from polyattn.tuning import Key, Measurement, TuningTable

__all__ = ["key_for", "measured", "problem_class", "table"]

_lock = threading.Lock()
_tables: dict[str, TuningTable] = {}
_DIMS = re.compile(r"\d+(?:x\d+)+|(?<==)\d+(?=[,)])")


def table() -> TuningTable:
    """Return the tuning table in the cache directory; it touches the disk at first use."""
    path = settings.current().cache_dir / "tuning.sqlite3"
    with _lock:
        if str(path) not in _tables:
            _tables[str(path)] = TuningTable(path)
        return _tables[str(path)]


def problem_class(problem: Problem) -> str:
    """Return the class a problem is measured as: lengths and batch rounded up to powers of two.

    >>> p = Problem(batch=3, q_len=100, kv_len=100, heads=8, kv_heads=8, head_dim=64)
    >>> problem_class(p) == problem_class(p.with_(batch=4, q_len=128, kv_len=128))
    True
    """
    mask = problem.mask
    if mask is not None:
        signature = (
            mask.signature if "Window" in mask.kinds else _DIMS.sub(_broadcast, mask.signature)
        )
        mask = type(mask)(signature, mask.kinds, mask.align)
    bias = None if problem.bias is None else _DIMS.sub(_broadcast, problem.bias)
    return problem.with_(
        batch=_up(problem.batch), q_len=_up(problem.q_len), kv_len=_up(problem.kv_len),
        mask=mask, bias=bias, arch=None, scale=None if problem.scale is None else 1.0,
        contiguous=True, compiled=False,
    ).to_json()  # fmt: skip


def _up(size: int) -> int:
    return size if size <= 2 else 1 << (size - 1).bit_length()


def _broadcast(match: re.Match[str]) -> str:
    return "x".join("1" if size == "1" else "n" for size in match.group().split("x"))


def key_for(problem: Problem, device: str, versions: str) -> Key:
    """Return the key under which times for this problem are stored."""
    return Key(device=device, versions=versions, problem=problem_class(problem))


def measured(problem: Problem, device: str, versions: str) -> list[Measurement]:
    """Return verified measurements for the problem's class, fastest first."""
    return table().best(key_for(problem, device, versions))

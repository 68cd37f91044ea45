"""The tuning table of this process, and the classes that problems fall into.

A choice reads a snapshot in memory, never the file: that is read once, again when this process has
changed the table, and when another one has, which is looked for once a second.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyattn import epoch, settings
from polyattn.forks import kept_free
from polyattn.masks.structure import with_sizes
from polyattn.problem import MaskFacts, Problem
from polyattn.tuning import Key, Measurement, TuningTable

__all__ = ["key_for", "measured", "problem_class", "stored", "table"]

_lock = kept_free(threading.Lock())
_tables: dict[str, TuningTable] = {}
_LOOK_EVERY_S = 1.0


def table() -> TuningTable:
    """Return the tuning table in the cache directory; it touches the disk at first use."""
    return _at(settings.current().cache_dir)


def _at(folder: Path) -> TuningTable:
    found = _tables.get(str(folder))
    if found is None:
        with _lock:
            found = _tables.setdefault(str(folder), TuningTable(folder / "tuning.sqlite3"))
    return found


def problem_class(problem: Problem) -> str:
    """Return the class a problem is measured as: lengths and batch rounded up to powers of two.

    >>> p = Problem(batch=3, q_len=100, kv_len=100, heads=8, kv_heads=8, head_dim=64)
    >>> problem_class(p) == problem_class(p.with_(batch=4, q_len=128, kv_len=128))
    True
    """
    batch, q_len, kv_len = problem.class_sizes
    return _written(
        Problem(
            batch=batch,
            q_len=q_len,
            kv_len=kv_len,
            heads=problem.heads,
            kv_heads=problem.kv_heads,
            head_dim=problem.head_dim,
            value_dim=problem.value_dim,
            dtype=problem.dtype,
            device=problem.device,
            framework=problem.framework,
            layout=problem.layout,
            mask=_mask_class(problem.mask),
            bias=_dims(problem.bias),
            bias_grad=problem.bias_grad,
            scale=None if problem.scale is None else 1.0,
            softcap=problem.softcap,
            sinks=problem.sinks,
            sinks_grad=problem.sinks_grad,
            dropout_p=problem.dropout_p,
            grad=problem.grad,
            lse=problem.lse,
            deterministic=problem.deterministic,
            paged=problem.paged,
            quantized=problem.quantized,
        )
    )


@functools.lru_cache(maxsize=4096)
def _written(of_class: Problem) -> str:
    return of_class.to_json()


@functools.lru_cache(maxsize=4096)
def _mask_class(mask: MaskFacts | None) -> MaskFacts | None:
    if mask is None or "Window" in mask.kinds:
        return mask
    return MaskFacts(with_sizes(mask.signature, _broadcast), mask.kinds, mask.align)


def _dims(signature: str | None) -> str | None:
    return None if signature is None else with_sizes(signature, _broadcast)


def _broadcast(sizes: str) -> str:
    return "x".join("1" if size == "1" else "n" for size in sizes.split("x"))


def key_for(problem: Problem, device: str, versions: str) -> Key:
    """Return the key under which times for this problem are stored."""
    return Key(device=device, versions=versions, problem=problem_class(problem))


def measured(problem: Problem, device: str, versions: str) -> list[Measurement]:
    """Return verified measurements for the problem's class, fastest first."""
    known = stored(device, versions)
    return known.get(problem_class(problem), []) if known else []


def stored(device: str, versions: str) -> Mapping[str, list[Measurement]]:
    """Return the verified measurements of a device by their problems, each's fastest first.

    The same object as before, as long as nothing has changed.
    """
    snapshot = _snapshot_now()
    found = snapshot.by_device.get((device, versions))
    if found is None:
        found = snapshot.by_device[device, versions] = _read(snapshot.table, device, versions)
    return found


@dataclass(frozen=True)
class _Snapshot:
    """What was read of one table, and how its file and its writes stood then."""

    table: TuningTable
    file: tuple[int, ...] | None
    writes: int
    by_device: dict[tuple[str, str], dict[str, list[Measurement]]]


_snapshot: _Snapshot | None = None
_looked = 0.0


def _snapshot_now() -> _Snapshot:
    """Return the snapshot, empty where the table is another one or has changed."""
    global _snapshot, _looked
    known, now = _snapshot, time.monotonic()
    here = _at(settings.current().cache_dir)
    if known is not None and known.table is here and known.writes == here.writes:
        if now - _looked < _LOOK_EVERY_S:
            return known
        _looked = now
        if known.file == _file(here) and not here.in_passing:
            return known
    _looked = now
    # how it stands is noted before it is read: a change in between is seen the next time
    _snapshot = made = _Snapshot(here, _file(here), here.writes, {})
    return made


def _file(of: TuningTable) -> tuple[int, ...] | None:
    try:
        found = os.stat(of.path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(of: TuningTable, device: str, versions: str) -> dict[str, list[Measurement]]:
    """Return a device's verified rows by problem, each's fastest first."""
    found: dict[str, list[Measurement]] = {}
    for key, one in of.rows(device, versions):
        if one.verified:
            found.setdefault(key.problem, []).append(one)
    for rows in found.values():
        rows.sort(key=lambda one: (one.median_s, one.backend, one.config))
    return found


def _look() -> None:
    """Look at the file at the next choice, not only when a second has passed."""
    global _looked
    _looked = -_LOOK_EVERY_S


epoch.listeners.append(_look)

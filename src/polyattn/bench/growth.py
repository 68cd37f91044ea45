"""Whether memory stays bounded while calls of ever new shapes are made: ``bench growth``."""

from __future__ import annotations

import datetime
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from polyattn.bench import machine
from polyattn.bench.records import SCHEMA
from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["measure"]

_STEPS = 20
_COMPILED_EVERY = 100  # compiled calls cost most; they hold nothing for a shape if one graph serves
_MOST_MIB = 48.0  # by which the second half may grow: fragments, and a table that is filled again


def measure(shapes: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Send calls of `shapes` distinct shapes through every way in; return the record.

    Every tenth goes through torch's signature, every hundredth also through a compiled function
    with dynamic shapes. Raises :class:`MissingDependency` without PyTorch.
    """
    try:
        import torch
    except ImportError:
        raise MissingDependency(
            "got `bench growth` without PyTorch, expected torch: pip install 'polyattn[torch]'"
        ) from None
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        steps = list(_run(shapes, progress))
    finally:
        torch.set_num_threads(before)
    middle = steps[len(steps) // 2]["resident_mib"]
    grown = max(step["resident_mib"] for step in steps[len(steps) // 2 :]) - middle
    return {
        "schema": SCHEMA,
        "kind": "growth",
        "command": machine.command_line("growth"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "versions": machine.versions(),
        "shapes": shapes,
        "steps": steps,
        "second_half_grew_mib": round(grown, 1),
        "allowed_mib": _MOST_MIB,
        "bounded": grown <= _MOST_MIB,
    }


def _run(shapes: int, progress: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    import torch

    from polyattn.torch import attention, scaled_dot_product_attention
    from polyattn.torch.cache import table

    compiled = torch.compile(lambda q, k: attention(q, k, k), backend="eager", dynamic=True)
    start = time.perf_counter()
    every = max(1, shapes // _STEPS)
    for done, (t, s, h) in enumerate(_distinct(shapes), 1):
        q, k = torch.zeros(1, t, 1, h), torch.zeros(1, s, 1, h)
        if done % 10 == 5:
            heads_first = k.transpose(1, 2)
            scaled_dot_product_attention(q.transpose(1, 2), heads_first, heads_first)
        else:
            attention(q, k, k)
        if done % _COMPILED_EVERY == 0 and 16 < t < s <= 32:  # one class: one graph
            compiled(q[..., :8], k[..., :8])
        if done % every == 0 or done == shapes:
            step = {
                "shapes": done,
                "resident_mib": round(_resident_mib(), 1),
                "entries": table.count,
                "seconds": round(time.perf_counter() - start, 1),
            }
            progress(
                f"{done:>9} shapes  {step['resident_mib']:8.1f} MiB  "
                f"{step['entries']:>5} entries  {step['seconds']:7.1f} s"
            )
            yield step


def _distinct(count: int) -> Iterator[tuple[int, int, int]]:
    """Yield lengths of queries and keys and a head dim, no three twice, small ones first."""
    made = 0
    for side in itertools.count(2):
        for other in range(2, side + 1):
            for t, s in dict.fromkeys(((side, other), (other, side))):
                for h in (8, 16, 24, 32):
                    if made == count:
                        return
                    made += 1
                    yield t, s, h


def _resident_mib() -> float:
    """Return the memory of this process that is resident."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    try:
        import resource
    except ImportError:
        raise PolyattnError(
            "got a system that does not tell how much memory a process holds, expected Linux or "
            "macOS; run `polyattn bench growth` there."
        ) from None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS: bytes, the most ever

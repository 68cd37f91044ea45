"""The trace of an isolated run: an ordinary one, with what was fed said in it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyattn.errors import TraceError
from polyattn.trace.format.header import META
from polyattn.trace.format.jsonline import exact

__all__ = ["mark_isolated"]


def mark_isolated(
    source: Path,
    target: Path,
    marks: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    header: Mapping[str, Any],
) -> Path:
    """Copy a trace that this process wrote, whole or not at all, with what `marks` gives for a
    record said in its line, ``isolated`` in its selection, and `header` over what its header has.

    Raises TraceError if `target` cannot be written or holds something.
    """
    if target.exists() and target.stat().st_size:
        raise TraceError(
            f"got {target}, which holds {target.stat().st_size} bytes already, expected a new or "
            "empty file; name another one, or remove it."
        )
    draft = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with open(source, "rb") as lines, open(draft, "wb") as out:
            head = json.loads(next(lines))[META] | dict(header)
            head["selection"] = dict(head.get("selection") or {}) | {"isolated": True}
            out.write(exact({META: head}).encode() + b"\n")
            for line in lines:
                record = json.loads(line)
                said = marks(record) if "seq" in record else {}
                begin = exact(said)[:-1] + "," if said else "{"
                out.write(begin.encode() + line[1:])
        os.replace(draft, target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise TraceError(f"got {target}, which cannot be written ({error}).") from error
    return target

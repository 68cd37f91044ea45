"""The files of one process that traces several models, one for each: a trace is of one model."""

from __future__ import annotations

import threading
from pathlib import Path

from torch import nn

from polyattn.trace.format.output import process_path

__all__ = ["file_for", "give_back"]

_given: set[Path] = set()
_giving = threading.Lock()


def file_for(path: Path, model: nn.Module) -> Path:
    """Return `path` for the first model of this process, then ``run.<class>.jsonl``.

    ``<pid>`` in it is the process's number.

    >>> [file_for(Path("nowhere.jsonl"), nn.Linear(2, 2)).name for _ in range(3)]
    ['nowhere.jsonl', 'nowhere.Linear.jsonl', 'nowhere.Linear-2.jsonl']
    """
    name, number = type(model).__name__, 1
    found = path = process_path(path).absolute()
    with _giving:
        while found in _given:
            more = f"-{number}" if number > 1 else ""
            found = path.with_name(f"{path.stem}.{name}{more}{path.suffix}")
            number += 1
        _given.add(found)
    return found


def give_back(path: Path) -> None:
    """Let another model have a file that came to nothing.

    >>> give_back(Path("nobody-has-this.jsonl"))
    """
    with _giving:
        _given.discard(path)

"""The private folder of a run: what its processes are told, and where they write.

A process finds it by the variable :data:`VARIABLE`, and what Python runs first in it, `start_up`,
by ``PYTHONPATH``. Without the variable nothing of this has any effect.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyattn import settings
from polyattn.errors import PolyattnError
from polyattn.integrations.program.asked import Record
from polyattn.integrations.program.fragments import record_of_folder

__all__ = ["VARIABLE", "Asked", "RunFolder", "run_folder", "told"]

VARIABLE = "POLYATTN_RUN"
START_UP = Path(__file__).resolve().parent / "start_up"
_TOLD = "run.json"


@dataclass(frozen=True)
class Asked:
    """A request for backends, as `use_backend` takes it."""

    names: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    on_unsupported: str | None = None

    @property
    def anything(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.names or self.never or self.on_unsupported)


@dataclass(frozen=True)
class Told:
    """What a process is told: whose program it is of, and what is asked for, outermost first."""

    supervisor: int
    asked: tuple[Asked, ...]


class RunFolder:
    """A folder for one run, with the environment that its processes are started in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def environment(self) -> dict[str, str]:
        """Return the whole environment for the program."""
        before = settings.variable("PYTHONPATH")
        paths = os.pathsep.join([str(START_UP), *([before] if before else [])])
        return settings.environment({VARIABLE: str(self.path), "PYTHONPATH": paths})

    def record(self, program: Sequence[str]) -> Record:
        """Return what the processes have written so far."""
        return record_of_folder(self.path, program)


@contextmanager
def run_folder(asked: Asked, program: Sequence[str]) -> Iterator[RunFolder]:
    """Make a folder for a run, and remove it in the end.

    Within the program of another run, that run's requests hold on, around these, and its report
    says that this one has its own.
    """
    outer = _outer()
    around: tuple[Asked, ...] = ()
    if outer is not None:
        around = told(outer).asked
        _say(outer, " ".join(["polyattn run", *program]), "it makes a report of its own")
    try:
        path = Path(tempfile.mkdtemp(prefix="polyattn-run-"))
    except OSError as error:
        raise PolyattnError(
            f"got no folder for the run ({error}), expected one that can be written; set TMPDIR."
        ) from error
    try:
        asks = [asdict(one) for one in (*around, asked) if one.anything]
        text = json.dumps({"supervisor": os.getpid(), "asked": asks})
        (path / _TOLD).write_text(text, encoding="utf-8")
        yield RunFolder(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)  # a process that goes on may be writing just now


def told(folder: str | os.PathLike[str]) -> Told:
    """Return what the processes of a run are told."""
    plain: dict[str, Any] = json.loads((Path(folder) / _TOLD).read_text(encoding="utf-8"))
    asked = (
        Asked(tuple(one["names"]), tuple(one["never"]), one["on_unsupported"])
        for one in plain["asked"]
    )
    return Told(plain["supervisor"], tuple(asked))


def _outer() -> Path | None:
    found = settings.variable(VARIABLE)
    return Path(found) if found and (Path(found) / _TOLD).is_file() else None


def _say(folder: Path, what: str, why: str) -> None:
    with (folder / f"{os.getpid()}.said").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "why": why}) + "\n")

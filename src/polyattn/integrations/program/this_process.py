"""What begins in a process of a program as soon as it has imported torch: routing and counting."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from polyattn.integrations.program.asked import Process
from polyattn.integrations.program.ledger import FileLedger
from polyattn.integrations.program.process_names import of_this_process
from polyattn.integrations.program.recorder import Recorder
from polyattn.integrations.program.run_folder import told
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.selection.requests import use_backend

__all__ = ["Routed", "route", "routed_here"]

_Leave = Callable[[int], NoReturn]


class Routed:
    """This process of a run; its forks too, each with a ledger of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._told = folder, told(folder)
        self._ledger = self._new_ledger()
        self.recorder = Recorder(self._ledger)

    def begin(self) -> None:
        """Route attention from now on, for as long as the process lasts."""
        for one in self._told.asked:
            asked = use_backend(*one.names, never=one.never, on_unsupported=one.on_unsupported)
            route_sdpa(request=asked).__enter__()
        route_sdpa(self.recorder).__enter__()
        self._ledger.begin()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._in_fork)
        atexit.register(self._end)
        # how forks end, those of multiprocessing too
        os._exit = _first(self._end, os._exit)  # type: ignore[assignment]

    def _new_ledger(self) -> FileLedger:
        return FileLedger(self._folder, self._process)

    def _process(self, asked: bool) -> Process:
        """Ask torch for its threads once it works: the question settles them."""
        return of_this_process(self._told.supervisor, torch.get_num_threads() if asked else None)

    def _in_fork(self) -> None:
        """Begin anew: what was counted is the parent's. The file is made when there is a call."""
        self._ledger.close()
        self._ledger = self._new_ledger()
        self.recorder.begin(self._ledger)

    def _end(self) -> None:
        self._ledger.end()


def _first(before: Callable[[], None], leave: _Leave) -> _Leave:
    def _exit(status: int) -> NoReturn:
        before()
        leave(status)

    return _exit


_here: Routed | None = None


def route(folder: str) -> None:
    """Route this process, of the run whose folder this is; once."""
    global _here
    if _here is None:
        _here = Routed(Path(folder))
        _here.begin()


def routed_here() -> Routed | None:
    """Return what routes this process, if anything does."""
    return _here

"""One of several ranks that a launcher started, each of which isolates its own part of a program.

The program runs twice and meets its other ranks in both runs, and a rank that is done with the
first must not meet one that is not. So the first run has a meeting place of its own.
"""

from __future__ import annotations

import datetime
import time
from dataclasses import dataclass
from pathlib import Path

from polyattn import settings
from polyattn.errors import TraceError
from polyattn.trace import Trace, rank_path

__all__ = ["Ranks"]

_PATIENCE = datetime.timedelta(minutes=10)
_ADDRESS, _PORT, _AGENT = "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"


@dataclass(frozen=True)
class Ranks:
    """This process's `rank`, and how many there are: a `world` of 1 without a launcher."""

    rank: int
    world: int

    @classmethod
    def here(cls) -> Ranks:
        """Return what the launcher of this process says."""
        from polyattn.trace.recorders.torch.heading import rank_and_world

        return cls(*rank_and_world())

    def file(self, path: str | Path) -> Path:
        """Return this rank's own file of a name.

        >>> Ranks(1, 2).file("run.jsonl").name, Ranks(0, 1).file("run.jsonl").name
        ('run.rank1.jsonl', 'run.jsonl')
        """
        return rank_path(path, self.rank, self.world)

    def own(self, path: str, option: str) -> str:
        """Return which file of a recorded trace is this rank's; TraceError where there is none."""
        if self.world == 1 or self.file(path).is_file():
            return str(self.file(path))
        raise TraceError(
            f"got {option} {path} in rank {self.rank} of {self.world}, and there is no "
            f"{self.file(path)}, expected a file of each rank: record it with as many ranks, "
            f"started in the same way, and name it without the rank ({path})."
        )

    def check(self, trace: Trace, option: str) -> None:
        """Raise TraceError for a trace of another rank, or of another number of them."""
        found = trace.header.rank, trace.header.world
        if self.world > 1 and found != (self.rank, self.world):
            raise TraceError(
                f"got {option} of rank {found[0]} of {found[1]} in rank {self.rank} of "
                f"{self.world}, expected this rank's own: record it with as many ranks."
            )

    def first_run(self) -> dict[str, str] | None:
        """Return the environment in which the program runs for the first time; None: this one's.

        Its ranks meet at the next port, in a store that rank 0 holds.
        """
        port = settings.variable(_PORT) or ""
        if self.world == 1 or not port.isdigit():
            return None
        return settings.environment({_PORT: str(int(port) + 1), _AGENT: "False"})

    def wait_for_all(self) -> None:
        """Wait until every rank has come here, if a torchrun waits: it ends all when one fails."""
        address, port = settings.variable(_ADDRESS), settings.variable(_PORT)
        if self.world == 1 or settings.variable(_AGENT) != "True" or not address or not port:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore(address, int(port), None, False, _PATIENCE)
        done, until = "polyattn.isolate.done", time.monotonic() + _PATIENCE.total_seconds()
        store.add(done, 1)
        while store.add(done, 0) < self.world and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.5)  # the last to come has told the others, which still have to look

"""A file for each rank of what is tapped inside ``shard_map``, opened with its first record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from polyattn.errors import TraceError
from polyattn.trace.format.header import Header
from polyattn.trace.recorders.jax.active_trace import Rank, Tapped
from polyattn.trace.recorders.numpy import TraceWriter

__all__ = ["RankFiles"]


class RankFiles:
    """The writers of a trace's ranks, all of one world; `step`: that of what is added."""

    def __init__(self, path: str | Path, header: Header, *, overwrite: bool) -> None:
        self.step: int | None = None
        self._path, self._header, self._overwrite = path, header, overwrite
        self._writers: dict[Rank, TraceWriter] = {}

    @property
    def any(self) -> bool:
        """Whether there is a file of a rank."""
        return bool(self._writers)

    def add(self, rank: Rank, tapped: Tapped, found: Mapping[str, Any]) -> None:
        """Record a part; raise TraceError for ranks of another world than those before."""
        self._writer(rank).add(
            tapped.module, tapped.phase, tapped.tensor, found, cls=tapped.cls, step=self.step
        )

    def _writer(self, rank: Rank) -> TraceWriter:
        found = self._writers.get(rank)
        if found is not None:
            return found
        others = {one.world for one in self._writers} - {rank.world}
        if others:
            raise TraceError(
                f"got taps over {rank.world} devices after others over {others.pop()}, expected "
                "one number of them in a trace; choose by layers=."
            )
        header = replace(self._header, rank=rank.number, world=rank.world)
        made = TraceWriter(self._path, header, overwrite=self._overwrite)
        self._writers[rank] = made
        return made

    def close(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End every file, as the program ended."""
        for writer in self._writers.values():
            if error is None:
                writer.close()
            else:
                writer.__exit__(kind, error, traceback)

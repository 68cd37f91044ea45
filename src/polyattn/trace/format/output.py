"""The file that a trace is written to: opened for this run alone, holding whole lines only."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from pathlib import Path
from types import ModuleType

from polyattn.errors import TraceError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows: a file is not locked against a second writer
    fcntl = None

__all__ = ["WAYS_OUT", "Output", "process_path", "rank_path", "tensor_folder"]


def process_path(path: str | Path) -> Path:
    """Return the path with this process's number for each ``<pid>`` in it.

    >>> process_path("run-<pid>.jsonl").name == f"run-{os.getpid()}.jsonl"
    True
    """
    return Path(str(path).replace("<pid>", str(os.getpid())))


def rank_path(path: str | Path, rank: int, world: int) -> Path:
    """Return the file of one rank: the path itself in a world of one; `process_path` of both.

    >>> rank_path("run.jsonl", 3, 8).name, rank_path("run.jsonl", 0, 1).name
    ('run.rank3.jsonl', 'run.jsonl')
    """
    path = process_path(path)
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


def tensor_folder(trace: Path) -> Path:
    """Return the folder of a trace's whole tensors, which stands beside it.

    Records name it, and no record may name what is elsewhere on some system: characters that might,
    as a colon, are replaced in it, and a digest keeps two such names apart.

    >>> tensor_folder(Path("run.jsonl")).name, tensor_folder(Path("run-14:30.jsonl")).name
    ('run.tensors', 'run-14_30-86a26e3e.tensors')
    """
    name = "".join(c if c.isprintable() and c not in ":\\" else "_" for c in trace.stem)
    if name != trace.stem:
        digest = hashlib.sha256(trace.stem.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        name = f"{name}-{digest}"
    return trace.with_name(f"{name}.tensors")


WAYS_OUT = (
    "Give it another name (<pid> in it is the process's number), remove it, or have it replaced: "
    "overwrite=True, POLYATTN_TRACE_OVERWRITE=1 or --overwrite."
)
"""What to do about a file that holds an earlier run."""


class Output:
    """A file open for appending whole lines; what it holds is always a valid trace so far.

    ``<pid>`` in its name is this process's number; `path` says where it is, wherever the process
    goes. Raises TraceError if it cannot be written, is another program's at the moment, or holds a
    run already and `overwrite` is not set.
    """

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self._given = process_path(path)
        try:
            self.path = self._given.absolute()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(self.path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
        except (OSError, ValueError) as error:
            raise TraceError(
                f"got the output {self._given}, which cannot be written ({error}); name a file in "
                "a folder that can."
            ) from error
        try:
            self._claim(overwrite)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _claim(self, overwrite: bool) -> None:
        status = os.fstat(self._descriptor)
        self._regular = stat.S_ISREG(status.st_mode)
        if self._regular and fcntl is not None:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise TraceError(
                        f"got the output {self._given}, which another run is writing now; name "
                        "another file for each run, as with <pid> in the name, which is the "
                        "process's number."
                    ) from error
            status = os.fstat(self._descriptor)  # what a run that has just ended left
        if self._regular and status.st_size:
            if not overwrite:
                raise TraceError(
                    f"got the output {self._given}, which holds {status.st_size} bytes already, "
                    f"expected a new or empty file: a trace is of one run. {WAYS_OUT}"
                )
            os.ftruncate(self._descriptor, 0)

    @property
    def descriptor(self) -> int:
        """The file's, -1 of what is no regular file: writing to a pipe may wait for its reader."""
        return self._descriptor if self._regular else -1

    @property
    def closed(self) -> bool:
        """Whether nothing more can be written."""
        return self._descriptor < 0

    def size(self) -> int:
        """How many bytes it holds."""
        return os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Hand whole lines to the operating system; OSError where it does not take them all.

        What it took of a line that it did not take wholly is removed again.
        """
        before, view = self.size(), memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except BaseException:  # KeyboardInterrupt too, which does not tell what was taken before it
            with contextlib.suppress(OSError):
                self.cut(data, before)
            raise

    def cut(self, data: bytes, before: int) -> None:
        """Keep the lines of `data` that were taken wholly; `before`: where it begins."""
        if not self._regular:
            return
        size = self.size()
        whole = before + data.rfind(b"\n", 0, size - before) + 1
        if whole < size:
            os.ftruncate(self._descriptor, whole)

    def close(self) -> None:
        """Close the file and let others write it, also while forked children have it open."""
        if fcntl is not None and self._regular:
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def forget(self) -> None:
        """Close it in a forked child, where it stays the parent's."""
        descriptor, self._descriptor = self._descriptor, -1
        with contextlib.suppress(OSError):
            os.close(descriptor)

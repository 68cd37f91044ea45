"""Files of our own for weights: named by what they hold, checked before they are trusted.

A folder may be shared by models and by processes: equal weights are one file, different weights
never are. A file appears whole or not at all, with a manifest beside it that says what lies where.
What a process made it takes away again at the end, unless anybody wants to keep it; what one left
that was killed, the next one takes away.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.mapped import FilePart, MappedFile
from polyattn.hooks.layerwise_offload.segments import Layout
from polyattn.hooks.layerwise_offload.sources import FileSource

__all__ = ["SCHEMA", "OwnFiles"]

SCHEMA = "polyattn.offload.file/2"
_CHUNK = 16 << 20
_READ = 1 << 20


class OwnFiles:
    """A folder for weights that lie in no file yet."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: bool = False) -> None:
        self.folder = Path(folder).absolute()  # wherever the process goes
        self.keep = keep
        self._made: set[Path] = set()
        self._lent: Counter[Path] = Counter()
        self._remove = weakref.finalize(self, _remove, self._made, os.getpid())
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove_leavings(self.folder)
        except OSError as error:
            raise OffloadError(
                f"got disk={str(self.folder)!r}, which cannot be made or read ({error.strerror}), "
                "expected a folder that can be written to"
            ) from error

    def require(self, nbytes: int) -> None:
        """Raise unless that much fits on the disk."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # somebody may have taken it away
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            raise OffloadError(
                f"got disk={str(self.folder)!r}, which is not there any more ({error.strerror}), "
                "expected a folder that can be written to"
            ) from error
        if nbytes > free:
            raise OffloadError(
                f"got a disk with {free:,} bytes free at {self.folder}, expected {nbytes:,} for "
                "the weights: free some, or name another folder in disk="
            )

    def put(self, layout: Layout, segments: Sequence[Tensor]) -> FileSource:
        """Store the bytes of a unit and return where they lie."""
        name = _digest(layout, segments)
        path = self.folder / f"{name}.weights"
        file = _opened(path, name, layout.nbytes)
        if file is None:
            file = self._write(path, name, layout, segments)
        elif self.keep:
            self._want(path, name, layout)
        parts = [
            FilePart(file, offset, segment.nbytes)
            for offset, segment in zip(layout.offsets, layout.segments, strict=True)
        ]
        self._lent[path] += 1
        return FileSource(layout, parts, own=file)

    def drop(self, path: Path) -> None:
        """Take away a file that one unit less lies in, if it was the last: it would fill the disk.

        Others that have it open go on reading it.
        """
        self._lent[path] -= 1
        if self._lent[path] <= 0 and path in self._made and not self.keep:
            _remove({path}, os.getpid())
            if not path.exists():  # else somebody has it open where that keeps it
                self._made.discard(path)

    def close(self) -> None:
        """Take away what was made, unless it is to be kept."""
        if self.keep:
            self._remove.detach()
        else:
            self._remove()

    def _want(self, path: Path, name: str, layout: Layout) -> None:
        """Have a file stay that somebody else made."""
        try:
            _write_manifest(path, name, layout, kept=True)
        except OSError as error:
            raise OffloadError(
                f"got {path.with_suffix('.json')}, which cannot be written ({error.strerror}), "
                "expected to note there that the file is kept: free some room, or name another "
                "folder in disk="
            ) from error

    def _write(
        self, path: Path, name: str, layout: Layout, segments: Sequence[Tensor]
    ) -> MappedFile:
        """Write a file and return it as it was written, whoever takes it away meanwhile."""
        self.require(layout.nbytes)
        draft = path.with_suffix(f".{os.getpid()}-{id(layout):x}.draft")
        self._made.add(path)  # before it is there: a Ctrl-C on the way leaves nothing behind
        try:
            with draft.open("wb") as file:
                _each_chunk(layout, segments, file.write)
                file.flush()
                os.fsync(file.fileno())
            _write_manifest(path, name, layout, kept=self.keep)
            made = MappedFile(draft)
            made.rename(path)
        except OSError as error:
            raise OffloadError(
                f"got an error from the disk while writing {layout.nbytes:,} bytes to {path} "
                f"({error.strerror}), expected room for the weights: free some, or name another "
                "folder in disk="
            ) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
        return made


def _each_chunk(
    layout: Layout, segments: Sequence[Tensor], take: Callable[[memoryview], object]
) -> None:
    """Hand over the bytes of a unit from first to last, the gaps as zeros."""
    done = 0
    for offset, segment in zip(layout.offsets, segments, strict=True):
        take(memoryview(bytes(offset - done)))
        for start in range(0, segment.numel(), _CHUNK):
            take(segment[start : start + _CHUNK].cpu().numpy().data)
        done = offset + segment.numel()


def _digest(layout: Layout, segments: Sequence[Tensor]) -> str:
    whole = hashlib.sha256()
    _each_chunk(layout, segments, whole.update)
    return whole.hexdigest()


def _opened(path: Path, name: str, nbytes: int) -> MappedFile | None:
    """Open a file if it holds what its name says: it is read to know, as it was opened."""
    if not path.exists():
        return None
    try:
        file = MappedFile(path)
    except OffloadError:
        return None  # it went just now
    whole, buffer = hashlib.sha256(), memoryview(bytearray(_READ))
    try:
        if file.nbytes == nbytes:
            for start in range(0, nbytes, _READ):
                part = buffer[: min(_READ, nbytes - start)]
                file.read(start, part)
                whole.update(part)
            file.check()
            if whole.hexdigest() == name:
                return file
    except OffloadError:
        pass  # somebody writes to it
    file.close()
    return None


def _write_manifest(path: Path, name: str, layout: Layout, *, kept: bool) -> None:
    manifest = path.with_suffix(f".{os.getpid()}-{id(layout):x}.manifest")
    text = json.dumps(_manifest(name, layout, kept=kept), indent=1)
    try:
        manifest.write_text(text, encoding="utf-8")
        manifest.replace(path.with_suffix(".json"))
    except BaseException:
        with contextlib.suppress(OSError):
            manifest.unlink(missing_ok=True)
        raise


def _manifest(name: str, layout: Layout, *, kept: bool) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "sha256": name,
        "kept": kept,
        "maker": {"machine": platform.node(), "process": os.getpid()},
        "nbytes": layout.nbytes,
        "tensors": [
            {
                "name": leaf.name,
                "start": layout.offsets[index] + place.offset,
                "shape": list(place.shape),
                "strides": list(place.strides),
                "dtype": str(place.dtype).removeprefix("torch."),
            }
            for leaf, place, index in layout.leaves()
        ],
    }


def _remove(paths: set[Path], maker: int) -> None:
    if os.getpid() != maker:  # a forked child: the files are its parent's
        return
    try:
        _take_away_unwanted(paths)
    except BaseException:  # a Ctrl-C amid it: what ends a process asks only once
        _take_away_unwanted(paths)
        raise


def _take_away_unwanted(paths: set[Path]) -> None:
    for path in paths:
        if not _facts_of(path).get("kept", False):
            _take_away(path)
    paths.clear()


def _take_away(path: Path) -> None:
    for each in (path, path.with_suffix(".json")):
        with contextlib.suppress(OSError):
            each.unlink(missing_ok=True)


def _facts_of(path: Path) -> dict[str, Any]:
    """Return what the manifest beside a file says; nothing if there is none that can be read."""
    try:
        facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) and facts.get("schema") == SCHEMA else {}


def _remove_leavings(folder: Path) -> None:
    """Take away what processes of this machine left that are gone, and nobody wants to keep.

    Who has such a file open goes on reading it.
    """
    for pattern in ("*.draft", "*.manifest"):
        for draft in folder.glob(pattern):
            process = draft.suffixes[-2].removeprefix(".").partition("-")[0]
            if process.isdecimal() and not _lives(int(process)):
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
    for manifest in folder.glob("*.json"):
        facts = _facts_of(manifest)
        maker = facts.get("maker")
        if facts.get("kept", True) or not isinstance(maker, dict):
            continue
        number, here = maker.get("process"), maker.get("machine") == platform.node()
        if here and isinstance(number, int) and number > 0 and not _lives(number):
            _take_away(manifest.with_suffix(".weights"))


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

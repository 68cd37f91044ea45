"""Files of our own for weights: named by what they hold, checked before they are trusted.

A folder may be shared by models and by processes: equal weights are one file, different weights
never are. A file appears whole or not at all, with a manifest beside it that says what lies where.
What this process made it takes away again at the end, unless it is to be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.mapped import FilePart, MappedFile
from polyattn.hooks.layerwise_offload.segments import Layout
from polyattn.hooks.layerwise_offload.sources import FileSource

__all__ = ["SCHEMA", "OwnFiles"]

SCHEMA = "polyattn.offload.file/1"
_CHUNK = 16 << 20


class OwnFiles:
    """A folder for weights that lie in no file yet."""

    def __init__(self, folder: str | os.PathLike[str], *, keep: bool = False) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self._made: set[Path] = set()
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
        free = shutil.disk_usage(self.folder).free
        if nbytes > free:
            raise OffloadError(
                f"got a disk with {free:,} bytes free at {self.folder}, expected {nbytes:,} for "
                "the weights: free some, or name another folder in disk="
            )

    def put(self, layout: Layout, segments: Sequence[Tensor]) -> FileSource:
        """Store the bytes of a unit and return where they lie."""
        name = _digest(layout, segments)
        path = self.folder / f"{name}.weights"
        if not _holds(path, name, layout.nbytes):
            self._write(path, name, layout, segments)
        file = MappedFile(path)
        if file.nbytes != layout.nbytes:
            raise OffloadError(
                f"got {path} of {file.nbytes:,} bytes, expected {layout.nbytes:,}: somebody else "
                "writes into this folder; name another in disk="
            )
        parts = [
            FilePart(file, offset, segment.nbytes)
            for offset, segment in zip(layout.offsets, layout.segments, strict=True)
        ]
        return FileSource(layout, parts, own=file)

    def close(self) -> None:
        """Take away what was made, unless it is to be kept."""
        if self.keep:
            self._remove.detach()
        else:
            self._remove()

    def _write(self, path: Path, name: str, layout: Layout, segments: Sequence[Tensor]) -> None:
        self.require(layout.nbytes)
        draft = path.with_suffix(f".{os.getpid()}-{id(layout):x}.draft")
        try:
            with draft.open("wb") as file:
                _each_chunk(layout, segments, file.write)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            manifest = draft.with_suffix(".manifest")
            manifest.write_text(json.dumps(_manifest(name, layout), indent=1), encoding="utf-8")
            manifest.replace(path.with_suffix(".json"))
        except OSError as error:
            raise OffloadError(
                f"got an error from the disk while writing {layout.nbytes:,} bytes to {path} "
                f"({error.strerror}), expected room for the weights: free some, or name another "
                "folder in disk="
            ) from error
        finally:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
                draft.with_suffix(".manifest").unlink(missing_ok=True)
        self._made |= {path, path.with_suffix(".json")}


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


def _holds(path: Path, name: str, nbytes: int) -> bool:
    """Whether a file that is there already holds what its name says: it is read to know."""
    try:
        if path.stat().st_size != nbytes:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == name
    except OSError:
        return False


def _manifest(name: str, layout: Layout) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "sha256": name,
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
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
    paths.clear()


def _remove_leavings(folder: Path) -> None:
    """Take away drafts of processes that are gone."""
    for draft in folder.glob("*.draft"):
        process = draft.suffixes[-2].removeprefix(".").partition("-")[0]
        if process.isdecimal() and not _lives(int(process)):
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

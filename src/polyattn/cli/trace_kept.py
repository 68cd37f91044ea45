"""How many tensors were kept whole beside traces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Kept", "kept"]


@dataclass(frozen=True)
class Kept:
    """`tensors` files of `bytes` together, in `folders`."""

    tensors: int
    bytes: int
    folders: tuple[Path, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**vars(self), "folders": [str(folder) for folder in self.folders]}

    def __str__(self) -> str:
        counted = f"{self.tensors} tensor{'' if self.tensors == 1 else 's'} kept whole"
        if not self.tensors:
            return counted
        size = f"{self.bytes / 1e6:.1f} MB" if self.bytes >= 1e6 else f"{self.bytes / 1e3:.1f} kB"
        return f"{counted}, {size}, in {', '.join(map(str, self.folders))}"


def kept(traces: Iterable[Path]) -> Kept:
    """Count the whole tensors beside trace files.

    >>> str(kept([Path("nowhere.jsonl")]))
    '0 tensors kept whole'
    """
    from polyattn.trace.format.output import tensor_folder

    folders = [tensor_folder(path) for path in traces]
    files = {folder: [*folder.glob("*.safetensors")] for folder in folders if folder.is_dir()}
    sizes = [file.stat().st_size for found in files.values() for file in found]
    return Kept(len(sizes), sum(sizes), tuple(folder for folder, found in files.items() if found))

"""What a command writes: files, looked at before it runs what takes its time, and consoles."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from polyattn.errors import PolyattnError

__all__ = ["PipedConsole", "check_output"]


class PipedConsole(Console):
    """A console that leaves a broken pipe to the command line; its own answer is exit code 1."""

    def on_broken_pipe(self) -> None:
        raise


def check_output(flag: str, path: str | None, *, makes_folders: bool = False) -> None:
    """Raise where no file can be written at `path`, which `flag` named; "-" is standard output.

    `makes_folders`: whether the folders to it are made, if they are not there.
    """
    if not path or path == "-":
        return
    if os.path.exists(path):  # a file, a pipe or a terminal, which may be replaced or written
        why = "it is a folder" if os.path.isdir(path) else ""
    else:
        folder = Path(os.path.realpath(path)).parent
        while makes_folders and not folder.exists() and folder != folder.parent:
            folder = folder.parent
        why = "" if folder.is_dir() else f"there is no folder {folder}"
        if not why and not os.access(folder, os.W_OK):
            why = f"the folder {folder} is read-only here"
    if not why:
        return
    raise PolyattnError(f"got {flag}={path}, which cannot be written ({why}); name another file.")

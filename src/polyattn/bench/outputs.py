"""The files that a bench is to write, tried before it measures: a run may take an hour."""

from __future__ import annotations

import argparse
import importlib.util
from contextlib import suppress
from pathlib import Path

from polyattn.errors import MissingDependency, PolyattnError

__all__ = ["check_outputs"]


def check_outputs(options: argparse.Namespace) -> None:
    """Raise for a file that cannot be written, and for a plot where nothing can draw it.

    An option that is empty names no file: where its record goes is known when it is made.
    """
    for flag in ("out", "record", "plot", "json"):
        path = getattr(options, flag, None)
        if isinstance(path, str) and path not in ("", "-"):
            _try(f"--{flag}", Path(path))
    if getattr(options, "plot", None) and importlib.util.find_spec("matplotlib") is None:
        raise MissingDependency(
            "got --plot without matplotlib, expected it installed: pip install 'polyattn[bench]'"
        )


def _try(flag: str, path: Path) -> None:
    """Open the file without changing it, and leave nothing where there was nothing."""
    made = []
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return  # a pipe or a terminal
        folders = [one for one in path.parents if not one.exists()]
        for folder in reversed(folders):
            folder.mkdir()
            made.append(folder)
        new = not path.exists()
        path.open("a").close()
        if new:
            path.unlink()
    except OSError as error:
        raise PolyattnError(
            f"got {flag} {path}, which cannot be written ({error.strerror}); name another file."
        ) from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):
                folder.rmdir()

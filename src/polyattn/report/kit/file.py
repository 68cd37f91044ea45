"""The page's file: written whole or not at all, and never over anything but such a page."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from polyattn.errors import TraceError

__all__ = ["refuse_others", "write_document"]


def write_document(text: str, path: str | Path, begins: str) -> Path:
    """Write a page to a file; return its path.

    The file is replaced if it begins with `begins`, as such a page does, and refused if it is
    anything else. Raises TraceError if it is refused or cannot be written; what was there before is
    then as it was.
    """
    path = Path(path)
    content = text.encode()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(content)  # a pipe or a terminal
            return path
        target = Path(os.path.realpath(path))  # of a link, what it points at is replaced
        refuse_others(path, begins)
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, content)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"got the page {path}, which cannot be written ({error}); name a file in a folder that "
            "can."
        ) from error
    return path


def refuse_others(path: str | Path, begins: str) -> None:
    """Raise TraceError if there is a file that is not such a page, and so would not be replaced."""
    target = Path(os.path.realpath(path))
    if not target.is_file() or not target.stat().st_size:
        return
    with target.open("rb") as file:
        found = file.read(len(begins) + 2).replace(b"\r\n", b"\n")
    if not found.startswith(begins.encode()):
        raise TraceError(
            f"got the page {path}, which holds something else than such a page, as a trace; name "
            "another file, or remove this one."
        )


def _replace(target: Path, text: bytes) -> None:
    draft = target.with_name(f".polyattn-{secrets.token_hex(6)}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(draft, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(text)
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise

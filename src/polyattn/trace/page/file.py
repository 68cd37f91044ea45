"""The page's file: written whole or not at all, and never over anything but such a page."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from polyattn.errors import TraceError
from polyattn.trace.page.document import BEGINNING, page

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Verdict

__all__ = ["write_page"]


def write_page(verdict: Verdict, path: str | Path, *, rows: int = 20_000) -> Path:
    """Write the page of a verdict to a file, which a browser opens; return its path.

    The file is replaced if it is such a page, and refused if it is anything else, as one of the
    traces. `rows` as in :func:`page`. Raises TraceError if it is refused or cannot be written; what
    was there before is then as it was.

    >>> import tempfile
    >>> from polyattn.trace.compare import Verdict
    >>> path = write_page(Verdict(equal=True), Path(tempfile.mkdtemp()) / "diff.html")
    >>> "same" in path.read_text(encoding="utf-8")
    True
    """
    path = Path(path)
    text = page(verdict, rows=rows).encode()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            path.write_bytes(text)  # a pipe or a terminal
            return path
        target = Path(os.path.realpath(path))  # of a link, what it points at is replaced
        _refuse_others(path, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        _replace(target, text)
    except (OSError, ValueError) as error:
        raise TraceError(
            f"got the page {path}, which cannot be written ({error}); name a file in a folder that "
            "can."
        ) from error
    return path


def _refuse_others(path: Path, target: Path) -> None:
    if not target.is_file() or not target.stat().st_size:
        return
    with target.open("rb") as file:
        begins = file.read(len(BEGINNING) + 2).replace(b"\r\n", b"\n")
    if not begins.startswith(BEGINNING.encode()):
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

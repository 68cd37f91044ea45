"""Short forms for the tables of knobs: how a line of a table becomes an :class:`Access`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.flags.cells import Access, Cell, Single
from polyattn.flags.knob import Knob, Type
from polyattn.torch.internals.switches import has_xpu

__all__ = [
    "CUDA_BUILD", "ROCM_BUILD", "XPU_BUILD",
    "build", "enum_name", "first_line", "function", "knob", "query", "version",
]  # fmt: skip

CUDA_BUILD = "a CUDA or ROCm build"
ROCM_BUILD = "a ROCm build"
XPU_BUILD = "an XPU build"


def version() -> str:
    """Return torch's version and build in a few words.

    >>> version().startswith("torch 2.")
    True
    """
    return f"torch {torch.__version__} ({build()} build)"


def build() -> str:
    """Return the kind of build: ``CUDA 12.8``, ``ROCm 6.4``, ``XPU`` or ``CPU``."""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return "XPU" if has_xpu() else "CPU"


def enum_name(member: Any) -> str:
    """Return the lower-case name of a member of one of torch's enumerations."""
    return str(member.name).lower()


def absent(known: Knob) -> str:
    """Say why this build does not have a knob, and which have it."""
    needs = [f"torch {known.since} or newer"] if known.since else []
    needs += [known.builds] if known.builds else []
    return f"{version()} does not have it; it needs {' and '.join(needs) or 'another version'}"


def knob(
    name: str,
    get: Callable[[], Any] | str,
    put: Callable[[Any], object] | str | None,
    about: str,
    *,
    type: Type = "bool",
    where: str = "",
    touches: tuple[Cell, ...] | None = None,
    lacks: Callable[..., str] | None = None,
    convert: Callable[[Any], Any] = lambda value: value,
    verify: Callable[[Any], bool] | None = None,
    settle: Callable[[Any], object] | None = None,
    rank: int = 9,
    per_thread: bool = False,
    **facts: Any,
) -> Access:
    """Return a setting; `get` and `put` are ABSENT where this torch lacks them.

    `put` is None for what no one can set; without `touches` the getter and the setter are all
    there is to the state.
    """
    known = Knob(
        name=name,
        kind="knob",
        type=type,
        about=about,
        where=where or f"torch.backends.{name}",
        scope="thread" if per_thread else "process",
        **facts,
    )
    read = None if isinstance(get, str) else get
    write = None if isinstance(put, str) else put
    if read is None or (write is None and put is not None):
        return Access(
            knob=known, unreadable=lambda: absent(known), lacks=lambda value=None: absent(known)
        )
    reader = read
    if touches is None:
        touches = (
            () if write is None else (Single(read, write, per_thread=per_thread).cell("value"),)
        )
    return Access(
        knob=known,
        read=read,
        write=write,
        touches=touches,
        convert=convert,
        rank=rank,
        settle=settle,
        lacks=_frozen_or(known, lacks),
        verify=verify or (lambda value: bool(reader() == value)),
    )


def _frozen_or(known: Knob, lacks: Callable[..., str] | None) -> Callable[..., str]:
    def reason(value: Any = None) -> str:
        if known.freezes and torch.backends.flags_frozen():
            return (
                "torch.backends.disable_global_flags() froze it in this process; set it before "
                "that call"
            )
        return lacks(value) if lacks else ""

    return reason


def query(
    name: str,
    get: Callable[[], Any] | str,
    about: str,
    *,
    type: Type = "bool",
    where: str = "",
    unreadable: Callable[[], str] | None = None,
    why_fixed: str = "it is a fact of the build or the machine",
    per_thread: bool = False,
    **facts: Any,
) -> Access:
    """Return something that can be read and not set."""
    known = Knob(
        name=name,
        kind="query",
        type=type,
        about=about,
        where=where or f"torch.backends.{name}",
        scope="thread" if per_thread else "process",
        **facts,
    )
    read = None if isinstance(get, str) else get
    missing = (lambda: absent(known)) if read is None else (unreadable or (lambda: ""))
    return Access(knob=known, read=read, unreadable=missing, lacks=lambda value=None: why_fixed)


def function(name: str, about: str, instead: str, *, where: str = "", **facts: Any) -> Access:
    """Return a name of torch that has no value, with what answers for it here."""
    known = Knob(
        name=name,
        kind="function",
        type="none",
        about=about,
        replaced_by=instead,
        where=where or f"torch.backends.{name}",
        **facts,
    )
    why = "it is a function, without a value"
    return Access(knob=known, unreadable=lambda: why, lacks=lambda value=None: why)


def first_line(error: BaseException) -> str:
    r"""Return an error's first line, short enough for a table.

    >>> first_line(RuntimeError("no driver\nat 0x00"))
    'no driver'
    """
    text = str(error).strip() or error.__class__.__name__
    return text.splitlines()[0][:200]

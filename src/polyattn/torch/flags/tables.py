"""The one table: every knob and query of torch, and how each stands now."""

from __future__ import annotations

import functools

import torch

from polyattn.flags import snapshot as snapshots
from polyattn.flags.cells import Access
from polyattn.flags.knob import Directory, Row
from polyattn.torch.flags.declare import first_line
from polyattn.torch.flags.kernels import kernels
from polyattn.torch.flags.precision import precision
from polyattn.torch.flags.queries import queries
from polyattn.torch.flags.running import running

__all__ = ["access", "accesses", "snapshot", "table"]


def accesses() -> dict[str, Access]:
    """Return how every knob is reached, by name."""
    return _accesses(torch.cuda.is_initialized())[0]


def access(name: object) -> Access:
    """Return how one knob is reached; FlagsError with near matches for an unknown name."""
    found, directory = _accesses(torch.cuda.is_initialized())
    return found[directory.find(name).name]


@functools.cache
def _accesses(cuda: bool) -> tuple[dict[str, Access], Directory]:
    """The table, before and after CUDA is initialised, which brings the rows of the devices."""
    listed = [*precision(), *kernels(), *running(), *queries()]
    found = {one.knob.name: one for one in listed}
    directory = Directory((one.knob for one in listed), ("torch.backends.", "backends.", "torch."))
    return found, directory


def table() -> list[Row]:
    """Return every knob, query and function of torch's switches, with how it stands now.

    Each row has the facts (`row.knob`: type, allowed values, scope, since, deprecated,
    replaced_by, what it does, traps) and the state (`row.value`, or `row.unreadable`;
    `row.unsettable` where this build or this moment does not let it be set). Reading changes
    nothing and starts no device.

    >>> rows = {row.name: row for row in table()}
    >>> rows["cudnn.benchmark"].value, rows["cudnn.benchmark"].settable
    (False, True)
    >>> rows["cuda.is_built"].unsettable
    'it is a fact of the build or the machine'
    """
    return [_row(one) for one in accesses().values()]


def _row(one: Access) -> Row:
    value, unreadable = read(one)
    unsettable = one.lacks()
    return Row(one.knob, value, unreadable, unsettable)


def read(one: Access) -> tuple[object, str]:
    """Return a knob's value, or None and why it cannot be read."""
    if one.read is None:
        return None, one.unreadable()
    try:
        return one.read(), ""
    except Exception as error:
        return None, f"torch raises {type(error).__name__}: {first_line(error)}"


def snapshot() -> snapshots.Snapshot:
    """Return how everything stands, as a flat JSON-able dictionary from name to value.

    The entry ``"polyattn.flags"`` holds the schema, the framework, and what could not be read and
    why. Values of a thread are those of the calling thread. Nothing is changed, and no device is
    started.

    >>> snapshot()["cudnn.benchmark"]
    False
    """
    values, unreadable = {}, {}
    for name, one in accesses().items():
        if one.knob.kind == "function" or one.knob.volatile:
            continue
        value, why = read(one)
        if why:
            unreadable[name] = why
        else:
            values[name] = value
    return snapshots.make("torch", values, unreadable)

"""What the recorder and native code hand each other: the one place that names it.

Native code reads tuples by their places and objects by their attributes; `TUPLES` and `ATTRIBUTES`
say which, and ``scripts/statistics_schema.py`` makes the C++ names of both from them. `PROTOCOL` is
the same as text, which an extension that was built from others does not say.
"""

from __future__ import annotations

from typing import Any

from polyattn.torch.internals import VERSION_COUNTER

__all__ = ["ATTRIBUTES", "BLOCK", "EVENT", "PROTOCOL", "SEEN", "TUPLES", "Event"]

Event = tuple[
    int, str, int, int | None, str, str, tuple[int, ...] | None, Any, Any, int, int | None,
    dict[str, Any] | None, Any,
]  # fmt: skip
"""A tensor that was seen, as `EVENT` says. A plain tuple, for one is made for every tensor."""

EVENT = {
    "seq": "of its record",
    "head": "the text that all records of a module share, of `head_of`",
    "call": "which call of the module",
    "step": "or None",
    "phase": "in, out, ...",
    "path": "which tensor: args[0], out, ...",
    "shape": "a tuple; None where `same` is given",
    "dtype": "torch's, or a text; None where `same` is given",
    "rows": "the Rows that have its numbers, or None where it has none",
    "slot": "which row of them",
    "same": "the seq of the record whose numbers it has, or None",
    "extra": "further fields, or None; as text where native code makes the line",
    "saving": "a file to be written first, or None",
}
"""The places of an event, in order."""

SEEN = {
    "tensor": "a weak reference",
    "version": "of the tensor when it was read",
    "seq": "of its record",
    "file": "that has the whole tensor, or None",
}
"""What a lane's `seen` holds of a tensor, by the tensor's id: a tuple."""

BLOCK = {
    "rows": "the object that events name",
    "address": "of the first row",
    "used": "how many rows there are",
}
"""Where lines take numbers from: a tuple; what follows only keeps the memory."""

TUPLES = {"event": EVENT, "seen": SEEN, "block": BLOCK}
"""The tuples that both sides make or read by place."""

ATTRIBUTES = {
    "Lane": {
        "events": "the list that events are added to",
        "rows": "the Rows that are being filled, by device",
        "seen": "the tensors that were recorded, by id",
    },
    "Rows": {
        "first": "the address of the first row",
        "isa": "the index of the instruction set that fills them",
        "size": "how many rows there are",
        "used": "how many are filled; native code sets it",
    },
    "JsonlSink": {
        "direct_to": "the file descriptor to write whole lines to, or -1",
        "cut_off": "called after a write that failed",
    },
    "Tensor": {
        VERSION_COUNTER: "counts changes in place",
        "data_ptr": "called",
        "dtype": "a key of the elements that the kernel reads",
        "is_cpu": "",
        "is_inference": "called: such a tensor has no version",
        "is_neg": "called",
        "is_nested": "",
        "layout": "",
        "shape": "a tuple",
        "stride": "called",
    },
}
"""The attributes that native code reads, by the class that has them; no two have one name."""

PROTOCOL = "; ".join(
    f"{name}: {' '.join(parts)}" for name, parts in (*TUPLES.items(), *ATTRIBUTES.items())
)

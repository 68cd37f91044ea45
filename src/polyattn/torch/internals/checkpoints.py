"""Where torch.utils.checkpoint shows on the Python stack: its code, and the locals of its frames.

None of it is private by its name, yet no one promised it: the code objects of ``checkpoint`` and of
``CheckpointFunction``, and the locals ``ctx``, ``frame``, ``gen`` and ``new_frame``.
"""

from __future__ import annotations

from types import CodeType, FrameType
from typing import Any

from torch.utils import checkpoint as _checkpoint

from polyattn.torch.internals.rows import MISSING, noted

__all__ = ["checkpointed_region"]

_OTHERWISE = "a checkpointed region is not found: what it computes again is chosen anew"


def _code(name: str) -> CodeType | None:
    found = noted(f"torch.utils.checkpoint.{name}", _OTHERWISE).find()
    return None if found is MISSING else found.__code__


_FILE = _checkpoint.__file__
_FORWARD = _code("CheckpointFunction.forward")
_BACKWARD = _code("CheckpointFunction.backward")


def checkpointed_region(frame: FrameType) -> tuple[Any, bool] | None:
    """Return the checkpointed region that a frame is the beginning of, if it is that of one.

    The region is an object of torch's that lives as long as what is kept of the region does; the
    second value says whether the region is being computed again.
    """
    code = frame.f_code
    if code is _FORWARD:
        return _local(frame, "ctx", False)
    if code is _BACKWARD:
        return _local(frame, "ctx", True)
    if code.co_filename != _FILE:
        return None
    if code.co_name == "unpack_hook":
        return _local(frame, "frame", True)
    if code.co_name == "checkpoint":
        inner = getattr(frame.f_locals.get("gen"), "gi_frame", None)
        return None if inner is None else _local(inner, "new_frame", False)
    return None


def _local(frame: FrameType, name: str, recomputed: bool) -> tuple[Any, bool] | None:
    region = frame.f_locals.get(name)
    return None if region is None else (region, recomputed)

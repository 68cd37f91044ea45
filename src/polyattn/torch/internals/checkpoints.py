"""Where torch.utils.checkpoint shows on the Python stack: its code, and the locals of its frames.

None of it is private by its name, yet no one promised it: the code objects of ``checkpoint`` and of
``CheckpointFunction``, and the locals ``ctx``, ``frame``, ``gen`` and ``new_frame``.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch.utils import checkpoint as _checkpoint

from polyattn.torch.internals.private_names import MISSING, noted

__all__ = ["checkpointed_regions"]

_OTHERWISE = "a checkpointed region is not found: what it computes again is chosen anew"


def _code(name: str) -> CodeType | None:
    found = noted(f"torch.utils.checkpoint.{name}", _OTHERWISE).find()
    return None if found is MISSING else found.__code__


_FILE = _checkpoint.__file__
_FORWARD = _code("CheckpointFunction.forward")
_BACKWARD = _code("CheckpointFunction.backward")


def checkpointed_regions(frame: FrameType | None) -> Iterator[tuple[Any, bool]]:
    """Yield the checkpointed regions around a frame, innermost first.

    A region is an object of torch's that lives as long as what is kept of the region does; the
    second value says whether the region is being computed again.
    """
    while frame is not None:
        code, region, again = frame.f_code, None, False
        if code is _FORWARD:
            region = frame.f_locals.get("ctx")
        elif code is _BACKWARD:
            region, again = frame.f_locals.get("ctx"), True
        elif code.co_filename == _FILE:
            if code.co_name == "unpack_hook":
                region, again = frame.f_locals.get("frame"), True
            elif code.co_name in ("checkpoint", "_checkpoint_impl"):  # the latter since 2.15
                inner = getattr(frame.f_locals.get("gen"), "gi_frame", None)
                region = None if inner is None else inner.f_locals.get("new_frame")
        if region is not None:
            yield region, again
        frame = frame.f_back

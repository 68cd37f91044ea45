"""How calls with torch's signature are admitted and run: their masks stay arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.masks import Dense
from polyattn.masks.biases import DenseBias
from polyattn.selection.prepare import Plan
from polyattn.torch.admission import Call
from polyattn.torch.long_way import AttentionWay, runner

__all__ = ["SdpaWay"]


@dataclass(frozen=True)
class SdpaWay(AttentionWay):
    """Calls with torch's signature and four dims; runners take the mask as it came."""

    attn_mask: Any

    def runner(self, plan: Plan, call: Call) -> Callable[..., Any]:
        """Return ``run(q, k, v, attn_mask)``; a mask of a known shape need not be checked again."""
        inner, kernel = runner(plan, call), plan.kernel
        if self.attn_mask is None:
            return inner
        if call.cast is None and not call.problem.empty:
            on_arrays = getattr(kernel, "on_arrays", None)  # a kernel of the extension
            made = on_arrays and on_arrays(*_WRAPPED[call.mask is None])
            if made is not None:
                return made  # type: ignore[no-any-return]
            if call.mask is not None:
                return lambda q, k, v, mask: kernel(q, k, v, _held(Dense, "mask", mask), None, None)
        if self.attn_mask.dtype == torch.bool:
            return lambda q, k, v, mask: inner(q, k, v, Dense(mask), None, None)
        return lambda q, k, v, mask: inner(q, k, v, None, _held(DenseBias, "bias", mask), None)


_WRAPPED = (
    (lambda array: (_held(Dense, "mask", array), None), False),
    (lambda array: (None, _held(DenseBias, "bias", array)), True),
)
"""What a kernel of the extension is told of masks of booleans and of numbers."""


def _held(kind: Any, name: str, array: Tensor) -> Any:
    """Return the mask or bias of an array that its key has described; no need to check it again."""
    made = object.__new__(kind)
    made.__dict__[name] = array
    return made

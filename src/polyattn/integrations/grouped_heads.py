"""Key heads of transformers' models, grouped and not repeated, while calls are routed.

Where a mask is given (each step on a static cache has one, and so has each batch with padding),
transformers repeats keys and values for every query head before it calls torch's function: on CUDA
torch's fast kernels would refuse grouped heads there. On CPUs that copies the keys several times
over, in compiled code the whole cache at each step (`polyattn bench generate --only "*compiled*"`),
in eager code at each prefill and each training step; eager steps of one query are spared it by
transformers itself. Every backend of polyattn takes grouped heads, and so does torch's own
function on CPUs.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.integrations.routing import Seam, router
from polyattn.torch.internals import is_exported

__all__: list[str] = []

_MODULE = "transformers.integrations.sdpa_attention"
_held: list[Any] = []


def _original() -> Any:
    """Return what transformers asks whether torch's function is given grouped heads, if it does."""
    found = getattr(sys.modules.get(_MODULE), "use_gqa_in_sdpa", None)
    if found is not None and found is not _is_grouped:
        _held[:] = [found]
    return found


def _is_grouped(attention_mask: Any, key: Any, *others: Any) -> Any:
    """Stands in for it; `others`: the value, of versions that ask about it too."""
    gains = key.device.type == "cpu" and (is_dynamo_compiling() or _has_rows(attention_mask))
    if gains and router.entered and not is_exported():
        return True
    return _held[0](attention_mask, key, *others)


def _has_rows(mask: Any) -> bool:
    """Say whether it is the mask of several queries; of one transformers makes rows of a group."""
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] > 1


router.add(Seam(_original, _is_grouped, seen_through=False, module=_MODULE))

"""Key heads of transformers' models, grouped and not repeated in compiled code, while it is routed.

Where a mask is given (each step on a static cache has one), transformers repeats keys and values
for every query head before it calls torch's function: on CUDA torch's fast kernels would refuse
grouped heads there. Eager steps of one query are spared that, compiled ones are not. On CPUs every
step then copies the whole cache several times over (`polyattn bench generate --only "*compiled*"`).
Every backend of polyattn takes grouped heads, and so does torch's own
function on CPUs.
"""

from __future__ import annotations

import sys
from typing import Any

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
    if is_dynamo_compiling() and key.device.type == "cpu" and not is_exported():
        return True
    return _held[0](attention_mask, key, *others)


router.add(Seam(_original, _is_grouped, seen_through=False, module=_MODULE))

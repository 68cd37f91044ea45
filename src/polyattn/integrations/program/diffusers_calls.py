"""What diffusers' dispatcher hands to other kernels than torch's function: flex, flash, sage, ...

Its models call ``dispatch_attention_fn``, which runs the backend that is asked for or the active
one. Those named ``native`` are torch's function and routed with it; calls of the others are
counted. Compiled calls are not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Set
from typing import Any

from torch.compiler import is_dynamo_compiling

from polyattn.integrations.program.recorder import Recorder
from polyattn.integrations.sdpa_patch import SdpaCall

__all__ = ["note"]

# diffusers has no public name for the active backend
_REGISTRY = "_AttentionBackendRegistry"
_SEEN = {
    "native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math", "polyattn",
}  # fmt: skip


def note(recorder: Recorder, registered: bool, seen: Set[str]) -> None:
    """Count from now on, in a process that has just imported diffusers' dispatcher.

    `registered`: whether ours is; `seen`: further backends whose calls are heard of elsewhere.
    """
    module = sys.modules["diffusers.models.attention_dispatch"]
    backends = vars(module).get(_REGISTRY)
    dispatch = vars(module).get("dispatch_attention_fn")
    if backends is None or dispatch is None:
        why = "its dispatcher of attention is another one than polyattn knows"
        recorder.unseen("diffusers", why)
        return

    @functools.wraps(dispatch)
    def dispatch_attention_fn(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling():
            asked = kwargs.get("backend") or backends.get_active_backend()[0]
            name = str(getattr(asked, "value", asked))
            if name not in _SEEN and name not in seen:
                recorder.passed(_reason(name, registered), SdpaCall(query, key, value, None))
        return dispatch(query, key, value, *args, **kwargs)

    module.dispatch_attention_fn = dispatch_attention_fn  # type: ignore[attr-defined]


def _reason(name: str, registered: bool) -> str:
    routed = "polyattn" if registered else "native"
    return f"diffusers' attention backend {name!r}; set_attention_backend({routed!r}) routes it"

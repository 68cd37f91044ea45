"""What transformers' models compute without torch's function: eager, flex, kernels of the hub.

A model asks ``AttentionInterface.get_interface`` for its attention at each call, by the name in its
config; what it gets for another name than ``sdpa`` or ours is counted. Some models ask nobody,
their attention being written out in their own module: of those that know no other, it is noted
that they were made. Compiled calls are not counted.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Set
from typing import Any

from torch.compiler import is_dynamo_compiling

from polyattn.integrations.program.recorder import Recorder

__all__ = ["note"]

_SEEN = frozenset({"sdpa", "polyattn", "paged|sdpa", "paged|polyattn"})
_OTHERS = ("_supports_sdpa", "_supports_attention_backend")
_HINT = "; attn_implementation='polyattn' routes it"


def note(recorder: Recorder, registered: bool, seen: Set[str]) -> None:
    """Count from now on, in a process that has imported ``transformers.modeling_utils``.

    `registered`: whether ours is; `seen`: further names whose calls are heard of elsewhere.
    """
    modeling = sys.modules["transformers.modeling_utils"]
    hint = _HINT if registered else ""
    _count_calls(modeling.AttentionInterface, recorder, hint, _SEEN | seen)
    _note_models(modeling.PreTrainedModel, recorder)


def _count_calls(interface: Any, recorder: Recorder, hint: str, seen: Set[str]) -> None:
    ask = interface.get_interface

    @functools.wraps(ask)
    def get_interface(self: Any, attn_implementation: Any, default: Callable[..., Any]) -> Any:
        found = ask(self, attn_implementation, default)
        if not is_dynamo_compiling() and attn_implementation not in seen:
            recorder.passed(_reason(attn_implementation, default) + hint, None)
        return found

    interface.get_interface = get_interface


@functools.lru_cache(maxsize=1024)
def _reason(implementation: str | None, default: Callable[..., Any]) -> str:
    model = str(getattr(default, "__module__", "")).rpartition(".modeling_")[2]
    name = implementation or "eager"
    what = name if name.endswith("attention") else f"{name} attention"
    return f"transformers' {what} of {model or 'a model'}"


def _note_models(model: Any, recorder: Recorder) -> None:
    make = model.__init__

    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        own = _only_its_own(type(self))
        if own:
            why = f"{own} is attention written out in transformers, which asks for no other"
            recorder.unseen(type(self).__name__, why)

    model.__init__ = __init__


def _only_its_own(kind: Any) -> str:
    """Return a class of attention in a model's module, if that knows no other; "" otherwise."""
    module = sys.modules.get(kind.__module__)
    knows_others = any(getattr(kind, name, False) for name in _OTHERS)
    if knows_others or hasattr(module, "ALL_ATTENTION_FUNCTIONS"):
        return ""
    return next((n for n, each in vars(module).items() if _is_attention(n, each, kind)), "")


def _is_attention(name: str, value: Any, kind: Any) -> bool:
    return isinstance(value, type) and "Attention" in name and value.__module__ == kind.__module__

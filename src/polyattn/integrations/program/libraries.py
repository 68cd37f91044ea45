"""What is done when a program has imported torch, or a library with attention of its own.

Nothing is imported here that the program has not imported itself. Our implementations for the
libraries are registered there, so that a model may ask for ``"polyattn"`` by name; and what each
library computes by itself is noted.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec

from polyattn.errors import PolyattnError
from polyattn.integrations.program import diffusers_calls, this_process, transformers_calls
from polyattn.integrations.program.recorder import Recorder

__all__ = ["imported"]


def imported(name: str, folder: str) -> None:
    """See to a library, by the name of the module that was imported."""
    this_process.route(folder)
    here = this_process.routed_here()
    assert here is not None
    recorder = here.recorder
    if name == "transformers.modeling_utils":
        seen = {"flex_attention"} if is_flex_routed() else set()
        transformers_calls.note(recorder, register("transformers", recorder), seen)
    elif name == "diffusers.models.attention_dispatch":
        seen = {"flex"} if is_flex_routed() else set()
        diffusers_calls.note(recorder, register("diffusers", recorder), seen)


def is_flex_routed() -> bool:
    """Whether calls of ``flex_attention`` are routed, and so counted where they are made."""
    return find_spec("polyattn.integrations.flex_calls") is not None


def register(library: str, recorder: Recorder) -> bool:
    """Register our attention in a library; False if this polyattn has none for it.

    What refuses, as a version that was not tested, is said in the report: the program did not ask.
    """
    module = f"polyattn.integrations.{library}"
    if find_spec(module) is None:
        return False
    try:
        importlib.import_module(module).register()
    except PolyattnError as error:
        recorder.unseen(library, f'"polyattn" is not registered there: {error}')
        return False
    return True

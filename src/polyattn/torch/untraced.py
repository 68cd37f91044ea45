"""Calls inside a compiler whose numbers are NumPy's: there they are arrays that hold no value yet.

What scores are multiplied with is no array for any kernel, so that the graph ends at such a call,
which runs as an eager one.
"""

from __future__ import annotations

from typing import Any

from polyattn.torch import jagged
from polyattn.torch.internals import break_graph, keep_from_tracing
from polyattn.torch.keys import Key, key_for
from polyattn.torch.long_way import AttentionWay, dispatch

__all__ = ["untraced"]

_NUMBERS = ("scale", "softcap")


def untraced(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Call ``attention`` beside the graph; ``fullgraph=True`` is told what to pass instead."""
    break_graph(
        "got scale or softcap as a number of NumPy, whose value a compiler does not know, expected "
        "Python's: float(...) before the compiled function makes it one."
    )
    return _run(q, k, v, options)


def _run(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    options = {**options, **{name: _number(options[name]) for name in _NUMBERS}}
    if jagged.is_any_nested(q, k, v):
        return jagged.attention(_eager, q, k, v, options)
    return _eager(q, k, v, **options)


def _eager(q: Any, k: Any, v: Any, *, backend: Any, **options: Any) -> Any:
    held = key_for(q, k, v, Key.of, *options.values(), backend)
    arguments = options["mask"], options["bias"], options["sinks"]
    return dispatch(AttentionWay(options), held, q, k, v, arguments, backend)


keep_from_tracing(_run)


def _number(x: Any) -> Any:
    return x.item() if getattr(x, "shape", None) == () and type(x).__module__ == "numpy" else x

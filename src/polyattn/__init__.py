"""One attention call that runs on the best kernel of the machine and says why it chose it.

This module is framework-free: it imports neither torch nor jax. The calls themselves are in
``polyattn.torch``; ``numpy_attention`` imports NumPy when it is called.

>>> from polyattn import Causal, Window
>>> Causal() & Window(left=255)
Causal() & Window(left=255, right=None)

To pytest, which loads our plugin: PYTEST_DONT_REWRITE, no test is in here.
"""

from __future__ import annotations

import importlib as _importlib

from polyattn.errors import (
    InvalidProblem,
    MissingDependency,
    OffloadError,
    PolyattnError,
    SettingsError,
    TraceError,
    TuningError,
    UnknownBackend,
    Unsupported,
)
from polyattn.masks import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    Full,
    LeftPadding,
    Mask,
    Not,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.numpy import numpy_attention
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection import Selection
from polyattn.selection.module_policy import set_backend
from polyattn.selection.requests import record_selections, use_backend

__version__ = "0.1.0"

__all__ = [
    "Alibi",
    "BlockMap",
    "Causal",
    "Chunked",
    "Dense",
    "DenseBias",
    "Dilated",
    "Facts",
    "FirstKeys",
    "Full",
    "InvalidProblem",
    "LeftPadding",
    "Mask",
    "MissingDependency",
    "Not",
    "OffloadError",
    "Packed",
    "Padding",
    "PolyattnError",
    "PrefixLM",
    "Problem",
    "Segments",
    "Selection",
    "SettingsError",
    "TraceError",
    "TuningError",
    "UnknownBackend",
    "Unsupported",
    "Window",
    "__version__",
    "numpy_attention",
    "record_selections",
    "set_backend",
    "use_backend",
]


def __getattr__(name: str) -> object:
    """Find ``polyattn.offload``, which is ``polyattn.hooks.offload`` and needs torch."""
    if name == "offload":
        return _importlib.import_module("polyattn.hooks").offload
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""``tiled_torch``: attention over blocks of keys, registered with polyattn by entry point.

The declaration imports no framework: polyattn reads it in every process, used or not.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from polyattn.capabilities import Capabilities, Reason
from polyattn.problem import Problem
from polyattn.registry import Available, Backend, Missing

__all__ = ["backend"]


def _probe() -> Available | Missing:
    if importlib.util.find_spec("torch") is None:
        return Missing("torch is not installed", "pip install 'polyattn[torch]'")
    return Available(version("polyattn-example-backend"), "blocks of 64 keys", frozenset({"cpu"}))


def _load() -> Callable[..., Any]:
    from polyattn_example_backend.tiled import prepare

    return prepare


def _extra(problem: Problem) -> Iterator[Reason]:
    """What the table of capabilities cannot say: only a lone causal mask is known here."""
    if problem.mask is not None and problem.mask.kinds & {"And", "Or"}:
        yield Reason("mask", problem.mask.signature, "Causal() alone")


backend = Backend(
    name="tiled_torch",
    framework="torch",
    capabilities=Capabilities(
        devices={"cpu"},
        dtypes={"float32", "float64"},
        head_dims=(1, 1 << 16, 1),
        masks={"Causal"},
        scale=True,
        value_dim=True,
        lse=True,
        deterministic=True,
        strided=True,
    ),
    probe=_probe,
    load=_load,
    extra=_extra,
    package="polyattn-example-backend",
    summary="an example from outside: online softmax over blocks of keys, plain PyTorch",
)

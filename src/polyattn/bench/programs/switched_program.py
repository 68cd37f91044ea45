"""A program that is timed: how its sides are switched, and one run of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polyattn.bench.programs.program_rows import OURS

__all__ = ["Program", "of_diffusers", "of_torch", "of_transformers"]


@dataclass(frozen=True)
class Program:
    """`use`: gives the scope in which a side is switched on; `step`: runs once.

    A step returns what it computed, float32, for sides to be compared, of which `valid` (or None
    for all) says where it means anything.
    """

    use: Callable[[str], Any]
    step: Callable[[], Tensor]
    valid: Tensor | None = None


def of_transformers(model: Any, step: Callable[[], Tensor], valid: Tensor | None = None) -> Program:
    """Return a program whose sides are the names that ``set_attn_implementation`` takes."""
    from polyattn.integrations import transformers as integration

    integration.register()

    @contextmanager
    def use(side: str) -> Iterator[None]:
        model.set_attn_implementation(side)
        yield

    return Program(use, step, valid)


def of_diffusers(model: Any, step: Callable[[], Tensor]) -> Program:
    """Return a program whose sides are the names that ``set_attention_backend`` takes."""
    from polyattn.integrations import diffusers as integration

    integration.register()

    @contextmanager
    def use(side: str) -> Iterator[None]:
        model.set_attention_backend(side)
        yield

    return Program(use, step)


def of_torch(step: Callable[[], Tensor]) -> Program:
    """Return a program that calls torch's function, which is routed on our side."""
    from polyattn.integrations.sdpa_patch import route_sdpa

    @contextmanager
    def use(side: str) -> Iterator[None]:
        if side != OURS:
            yield
            return
        with route_sdpa():
            yield

    return Program(use, step)

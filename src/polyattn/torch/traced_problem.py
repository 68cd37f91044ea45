"""What is asked of a traced call, as constants, and the problem that a model of it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from polyattn.masks import Mask
from polyattn.problem import Problem
from polyattn.problem.admission import ArrayFacts, Other, Surroundings
from polyattn.problem.admission import admit as admit_call
from polyattn.selection.wishes import Wishes, wishes_of
from polyattn.torch.admission import arch_of
from polyattn.torch.call_model import facts_of, mask_of
from polyattn.torch.internals import are_higher, transforms
from polyattn.torch.long_way import switched_on

__all__ = [
    "IS_NUMPY",
    "as_text",
    "from_text",
    "problem_of",
    "wishes_of_traced",
    "with_numbers_as_text",
]


IS_NUMPY = ("ndarray",)
"""What :func:`as_text` makes of NumPy's numbers while tracing: arrays without a value yet."""


def as_text(x: Any) -> Any:
    """Return a number as text: the one form in which a compiler specialises a symbolic float."""
    if x is None or not isinstance(x, (int, float)) or isinstance(x, bool):
        return None if x is None else (type(x).__name__,)
    return (x * 1.0).hex()


def from_text(text: Any) -> Any:
    """Undo :func:`as_text`."""
    if isinstance(text, tuple):
        return Other(text[0], is_array=text[0] in ("Tensor", "Parameter", *IS_NUMPY))
    return None if text is None else float.fromhex(text)


def with_numbers_as_text(asked: Any) -> Any:
    """Return what was asked with its numbers in the one form that is compared."""
    return (*[as_text(x) if isinstance(x, (int, float)) else x for x in asked[:3]], *asked[3:])


class _Constants:
    """The arrays of a call's model, for :class:`polyattn.problem.admission.Front`."""

    framework = "torch"
    array_type = "torch.Tensor"
    facts = staticmethod(facts_of)

    def __init__(self, cast: torch.dtype | None) -> None:
        self._cast = cast

    def surroundings(self, query: ArrayFacts) -> Surroundings:
        """Read what holds around a call as it stands while tracing; compiled code guards it."""
        cast = None if self._cast is None else str(self._cast).rpartition(".")[2]
        return Surroundings(
            cast if query.device_type in ("cpu", "cuda") else None,
            arch_of(query.device),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            True,
            higher=are_higher(transforms()),
        )

    def bind(self, mask: Mask, device: str) -> Mask:
        return mask

    def known(self, payload: Any) -> None:
        return None

    def arange(self, size: int) -> Any:
        raise AssertionError("nothing is known of a compiled call's arrays")


def problem_of(model: Any, asked: Any) -> Problem:
    """Admit a model of numbers."""
    q, k, v, mask, bias, sinks = model
    scale, softcap, dropout_p, layout, return_lse, deterministic = asked[:6]
    return admit_call(
        facts_of(q), facts_of(k), facts_of(v), front=_Constants(asked[-1]), mask=mask_of(mask),
        bias=mask_of(bias), scale=from_text(scale), softcap=from_text(softcap),
        sinks=None if sinks is None else facts_of(sinks), dropout_p=from_text(dropout_p),
        layout=layout, return_lse=return_lse, deterministic=deterministic, is_simple=True,
    ).problem  # fmt: skip


def wishes_of_traced(asked: Any) -> Wishes:
    """Gather what is asked for around a traced call, by `asked` of :func:`attention`."""
    backend, scope, traced, module = asked[6:10]
    wanted = wishes_of(backend, None, traced if traced is not None else scope, module)
    # the switches are read while tracing, as torch's own function does
    return replace(wanted, left=switched_on())

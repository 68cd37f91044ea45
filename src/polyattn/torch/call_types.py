"""The types of the public calls, for type checkers; nothing here is used at run time.

One dict of options stands for the arguments that do not change what a call returns, so that an
argument of :func:`polyattn.torch.attention` is added here and in its signature.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol, TypedDict

from torch import Tensor

from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.selection import Selection

__all__ = ["Backends", "Options", "PagedOptions", "QuantizedOptions", "Step"]

Backends = str | Enum | Sequence[str | Enum]
"""A backend by name or by an enumeration's member, or several in order."""


class PagedOptions(TypedDict, total=False):
    """What :func:`polyattn.torch.paged_attention` takes beside `return_lse`."""

    mask: Mask | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    layout: str
    backend: Backends | None


class QuantizedOptions(PagedOptions, total=False):
    """What :func:`polyattn.torch.quantized_attention` takes beside `return_lse`, block size."""

    bias: Bias | None


class Options(PagedOptions, total=False):
    """What :func:`polyattn.torch.attention` takes beside `return_lse`."""

    bias: Bias | None
    dropout_p: float
    deterministic: bool | None


class Step(Protocol):
    """What :func:`polyattn.torch.plan` returns: the kernel's call, and what was chosen."""

    selection: Selection

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, /) -> Any: ...

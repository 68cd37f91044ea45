"""Attention for PyTorch: ``attention``, ``explain``, ``plan`` and torch's own signature.

>>> import torch
>>> from polyattn.torch import attention
>>> q = torch.randn(2, 16, 4, 32)
>>> attention(q, q, q).shape
torch.Size([2, 16, 4, 32])
"""

from __future__ import annotations

import importlib
import importlib.util
import typing

if importlib.util.find_spec("torch") is None:
    from polyattn.errors import MissingDependency

    raise MissingDependency(
        "got an import of polyattn.torch without PyTorch, expected torch >= 2.9: "
        "pip install 'polyattn[torch]'"
    )

import torch.compiler

from polyattn.selection import requests, scopes
from polyattn.torch.internals import call_code as _call_code
from polyattn.torch.internals import mark_constant as _mark_constant

if typing.TYPE_CHECKING:
    from polyattn.torch.api import attention, explain, plan
    from polyattn.torch.dropin import scaled_dot_product_attention
    from polyattn.torch.flex_masks import block_mask
    from polyattn.torch.paged import paged_attention
    from polyattn.torch.quantize import quantize_kv
    from polyattn.torch.quantized import quantized_attention
    from polyattn.torch.quantized_cache import QuantizedCache

scopes.is_tracing = torch.compiler.is_dynamo_compiling
scopes.call_code = _call_code
_mark_constant(requests.nested)

__all__ = [
    "QuantizedCache", "attention", "block_mask", "explain", "paged_attention", "plan",
    "quantize_kv", "quantized_attention", "scaled_dot_product_attention",
]  # fmt: skip

# Imported when first asked for: hooks, which attend to nothing, need polyattn.torch.internals only.
_LAZY = {
    "attention": "polyattn.torch.api",
    "block_mask": "polyattn.torch.flex_masks",
    "explain": "polyattn.torch.api",
    "paged_attention": "polyattn.torch.paged",
    "plan": "polyattn.torch.api",
    "quantize_kv": "polyattn.torch.quantize",
    "quantized_attention": "polyattn.torch.quantized",
    "QuantizedCache": "polyattn.torch.quantized_cache",
    "scaled_dot_product_attention": "polyattn.torch.dropin",
}


def __getattr__(name: str) -> typing.Any:
    """Import on demand."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

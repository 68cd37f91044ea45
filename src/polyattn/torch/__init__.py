"""Attention for PyTorch: ``attention``, ``explain``, ``plan`` and torch's own signature.

>>> import torch
>>> from polyattn.torch import attention
>>> q = torch.randn(2, 16, 4, 32)
>>> attention(q, q, q).shape
torch.Size([2, 16, 4, 32])
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("torch") is None:
    from polyattn.errors import MissingDependency

    raise MissingDependency(
        "got an import of polyattn.torch without PyTorch, expected torch >= 2.9: "
        "pip install 'polyattn[torch]'"
    )

import torch.compiler

from polyattn import platforms, scopes
from polyattn.torch import platform
from polyattn.torch.api import attention, explain, plan
from polyattn.torch.dropin import scaled_dot_product_attention
from polyattn.torch.paged import paged_attention

platforms.register_platform(
    platforms.Platform(
        framework="torch",
        versions=platform.library_versions,
        attention=attention,
        device_description=platform.device_description,
        described=platform.described,
        present_device=platform.present_device,
    )
)
scopes.is_tracing = torch.compiler.is_dynamo_compiling

__all__ = ["attention", "explain", "paged_attention", "plan", "scaled_dot_product_attention"]

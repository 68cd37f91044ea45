"""polyattn for JAX: ``attention`` and what is around it, under one selection with PyTorch's.

``polyattn.jax.flags`` says how JAX's configuration stands, ``polyattn.jax.trace`` records what
passes through a program. Importing this imports JAX, to which it makes masks and biases known;
no backend of JAX is started.

>>> import jax
>>> from polyattn.jax import attention, explain
>>> q = jax.random.normal(jax.random.key(0), (1, 16, 4, 64))
>>> attention(q, q, q).shape
(1, 16, 4, 64)
"""

from __future__ import annotations

import importlib
import importlib.util
import typing

if importlib.util.find_spec("jax") is None:
    from polyattn.errors import MissingDependency

    raise MissingDependency(
        "got an import of polyattn.jax without JAX, expected jax >= 0.8: "
        "pip install 'polyattn[jax]'"
    )

if typing.TYPE_CHECKING:
    from polyattn.jax.attend import attention, explain, plan
    from polyattn.jax.operator.impl import AttentionImpl
    from polyattn.jax.operator.metadata import AttentionMetadata
    from polyattn.jax.operator.output import AttentionOutput
    from polyattn.jax.paged_call import paged_attention
    from polyattn.jax.sequence_parallel.spreading import spread_sequence
    from polyattn.jax.sharding.axes import PartitionAxis

_HOMES = {
    "attention": "attend",
    "explain": "attend",
    "paged_attention": "paged_call",
    "plan": "attend",
    "spread_sequence": "sequence_parallel.spreading",
    "AttentionImpl": "operator.impl",
    "AttentionMetadata": "operator.metadata",
    "AttentionOutput": "operator.output",
    "AttentionRegistry": "operator.implementations",
    "PartitionAxis": "sharding.axes",
}
_NEWER = {  # what the newest version of the source calls the same
    "OperationImpl": "AttentionImpl",
    "OperationMetadata": "AttentionMetadata",
    "OperationOutput": "AttentionOutput",
    "OperationRegistry": "AttentionRegistry",
}

__all__ = [
    "AttentionImpl", "AttentionMetadata", "AttentionOutput", "AttentionRegistry", "OperationImpl",
    "OperationMetadata", "OperationOutput", "OperationRegistry", "PartitionAxis", "attention",
    "explain", "paged_attention", "plan", "spread_sequence",
]  # fmt: skip


def __getattr__(name: str) -> typing.Any:
    """Import what is asked for."""
    known = _NEWER.get(name, name)
    if known not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[known]}"), known)
    globals()[name] = found
    return found


# A program may hand masks to jit before it looks up any name here, and before it imports JAX.
importlib.import_module("polyattn.jax.kit.pytrees")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

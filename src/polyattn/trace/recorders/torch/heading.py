"""The header of a traced model's file: what ran, where, with which weights."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from polyattn import settings
from polyattn.errors import TraceError
from polyattn.trace.format.field_checks import LONGEST_TEXT
from polyattn.trace.format.header import Header
from polyattn.trace.recorders.torch.weights import weight_fingerprints

__all__ = ["header_of", "rank_and_world", "refuse_long_names"]

_LIBRARIES = ("torch", "transformers", "diffusers", "accelerate", "safetensors", "triton", "numpy")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and how many there are, of torch.distributed or a launcher.

    Without a process group the variables ``RANK`` and ``WORLD_SIZE`` tell, as torchrun sets them.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    rank, world = settings.variable("RANK"), settings.variable("WORLD_SIZE")
    if not rank or not world:
        return 0, 1
    if rank.isdigit() and world.isdigit() and int(rank) < int(world):
        return int(rank), int(world)
    raise TraceError(
        f"got RANK={rank!r} and WORLD_SIZE={world!r}, expected a number below another one, as a "
        "launcher sets them; unset both for a run of one process."
    )


def refuse_long_names(model: nn.Module) -> None:
    """Raise TraceError for a model whose trace nobody could read: some name of it is too long."""
    modules = dict(model.named_modules())
    classes = {type(one).__name__: None for one in modules.values()}
    parameters = dict(model.named_parameters())
    for what, names in (("module", modules), ("class", classes), ("parameter", parameters)):
        longest = max(names, key=len, default="")
        if len(longest) > LONGEST_TEXT:
            raise TraceError(
                f"got a {what} of this {type(model).__name__:.80} whose name has {len(longest)} "
                f"characters ({longest[:60]!r}...), expected at most {LONGEST_TEXT}: "
                "rename it, or trace a part of the model."
            )


def header_of(
    model: nn.Module, selection: Mapping[str, Any], rank: int, world: int, weights: bool
) -> Header:
    """Return the header for a model; `weights`: whether with fingerprints of its weights."""
    from polyattn.torch.flags import snapshot

    versions = {
        name: str(found.__version__)
        for name in _LIBRARIES
        if (found := sys.modules.get(name)) is not None and hasattr(found, "__version__")
    }
    dtypes = Counter(str(p.dtype).removeprefix("torch.") for p in model.parameters())
    return Header.new(
        framework="torch", rank=rank, world=world, versions=versions, flags=snapshot(),
        seed=torch.initial_seed(), dtypes=dict(dtypes), selection=dict(selection),
        modules={name: type(one).__name__ for name, one in model.named_modules()},
        weights=weight_fingerprints(model) if weights else {},
    )  # fmt: skip

"""DTensors: a call whose batch or heads lie on several devices is a call of its part on each.

Attention mixes neither batch entries nor heads, so that nothing is exchanged. Rows of queries or
keys that are spread need an exchange (`polyattn.integrations.diffusers` has ring and Ulysses), and
are refused here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from polyattn.masks import Mask
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.torch.kit.masking import bind_mask
from polyattn.torch.refusals import refuse

__all__ = ["attention", "local_call"]

_BATCH_AND_HEADS = {"BTNH": (0, 2), "BNTH": (0, 1), "packed": (None, 1)}
_PLACED = {
    "Padding": (1, 0, None), "LeftPadding": (1, 0, None), "PrefixLM": (1, 0, None),
    "Segments": (2, 0, None), "BlockMap": (3, 0, 1), "Packed": (1, None, None),
}  # fmt: skip
"""The dims of the arrays of masks with batch entries, and where these and heads are in them.

An array of fewer dims is the same for each entry.
"""


@dataclass(frozen=True)
class _Spread:
    """How the query lies: on which axes of the mesh its batch entries and its heads are spread."""

    mesh: Any
    placements: tuple[Any, ...]
    batch: int
    heads: int
    batch_axes: tuple[int, ...]
    head_axes: tuple[int, ...]


def attention(attend: Callable[..., Any], q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Call `attend` on this rank's part of three DTensors; the results lie as the query does.

    `options`: all of :func:`polyattn.torch.attention`, in its order. Whole arrays beside DTensors
    (of masks, biases, sinks) are the same on all ranks, and each takes its part of them.
    """
    layout = options["layout"]
    spread = _spread(q, k, v, layout)
    if spread.mesh.get_coordinate() is None:
        return _elsewhere(spread, q, k, v, options)
    found = attend(q.to_local(), k.to_local(), v.to_local(), **_local_options(spread, q, options))
    out, lse = found if options["return_lse"] else (found, None)
    out = DTensor.from_local(out, spread.mesh, spread.placements, run_check=False)
    if lse is None:
        return out
    places = _lse_placements(spread, layout)
    return out, DTensor.from_local(lse, spread.mesh, places, run_check=False)


def _lse_placements(spread: _Spread, layout: str) -> list[Any]:
    """Return how (B, N, T), or (N, total) when packed, lies."""
    alone = [spread.mesh.size(axis) == 1 for axis in range(spread.mesh.ndim)]
    places = [Replicate() if one else p for p, one in zip(spread.placements, alone, strict=True)]
    for axis in spread.head_axes:
        places[axis] = Shard(0 if layout == "packed" else 1)
    return places


class _Elsewhere(torch.autograd.Function):
    """Makes a result depend on a call's arrays, on a rank that holds nothing of any of them."""

    @staticmethod
    def forward(ctx: Any, result: Any, *arrays: Any) -> Any:
        ctx.save_for_backward(*arrays)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def _elsewhere(spread: _Spread, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Any:
    """Return the results on a rank that the mesh leaves out, which holds nothing of them.

    Every rank of a program runs its calls, and torch's own operators do as much.
    """
    layout = options["layout"]
    batch, heads = _BATCH_AND_HEADS[layout]
    rows = q.shape[2 if layout == "BNTH" else 0 if layout == "packed" else 1]
    sums = (q.shape[heads], rows) if batch is None else (q.shape[batch], q.shape[heads], rows)

    def described(places: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        strides = torch.empty(shape, device="meta").stride()
        nothing = torch.empty(0, dtype=dtype, device=q.device)
        made = DTensor.from_local(
            nothing, spread.mesh, places, run_check=False, shape=torch.Size(shape), stride=strides
        )
        return _Elsewhere.apply(made, q, k, v)

    out = described(spread.placements, (*q.shape[:-1], v.shape[-1]), q.dtype)
    if not options["return_lse"]:
        return out
    wide = torch.promote_types(q.dtype, torch.float32)
    return out, described(_lse_placements(spread, layout), sums, wide)


def local_call(
    q: Any, k: Any, v: Any, options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Return the call of this rank's part of three DTensors."""
    spread = _spread(q, k, v, options["layout"])
    return q.to_local(), k.to_local(), v.to_local(), _local_options(spread, q, options)


def _local_options(spread: _Spread, q: Any, options: dict[str, Any]) -> dict[str, Any]:
    _check_dropout(spread, options["dropout_p"])
    mask = options["mask"]
    if isinstance(mask, Mask):  # lists become tensors, of which there are parts
        mask = bind_mask(mask, q.device)
    return {
        **options,
        "mask": _local_mask(mask, spread),
        "bias": _local_bias(options["bias"], spread),
        "sinks": _local_part("sinks", options["sinks"], spread, None, 0),
    }


def _spread(q: Any, k: Any, v: Any, layout: Any) -> _Spread:
    if layout not in _BATCH_AND_HEADS:
        refuse(f"got layout={layout!r}, expected one of {', '.join(_BATCH_AND_HEADS)}.")
    batch, heads = _BATCH_AND_HEADS[layout]
    for name, x in (("query", q), ("key", k), ("value", v)):
        if not isinstance(x, DTensor):
            refuse(
                f"got {name} of type {type(x).__name__} beside DTensors, expected three DTensors; "
                "distribute_tensor(...) makes it one."
            )
        if x.device_mesh != q.device_mesh or tuple(x.placements) != tuple(q.placements):
            refuse(
                f"got {name} placed {tuple(x.placements)} and query placed {tuple(q.placements)}, "
                "expected one mesh and the same placements; redistribute(...) one of them."
            )
    found: dict[int, list[int]] = {}
    for axis, place in enumerate(q.placements):
        if place.is_replicate() or q.device_mesh.size(axis) == 1:
            continue
        dim = place.dim % q.dim() if place.is_shard() else None
        if dim is None or dim not in (batch, heads) or type(place) is not Shard:
            takes = f"Shard({heads}) of heads" + ("" if batch is None else ", Shard(0) of batch")
            refuse(
                f"got query placed {place} on axis {axis} of its mesh, expected Replicate(), "
                f"{takes}: rows and head dims need an exchange. redistribute(...) it first."
            )
        found.setdefault(dim, []).append(axis)
    _check_divides(q, k, v, found)
    return _Spread(
        q.device_mesh, tuple(q.placements), 1 if batch is None else q.shape[batch], q.shape[heads],
        () if batch is None else tuple(found.get(batch, ())), tuple(found.get(heads, ())),
    )  # fmt: skip


def _check_divides(q: Any, k: Any, v: Any, found: dict[int, list[int]]) -> None:
    for dim, axes in found.items():
        ranks = 1
        for axis in axes:
            ranks *= q.device_mesh.size(axis)
        for name, x in (("query", q), ("key", k), ("value", v)):
            if x.shape[dim] % ranks:
                refuse(
                    f"got {name} of shape {tuple(x.shape)} with dim {dim} on {ranks} ranks, "
                    f"expected a multiple of {ranks}: each rank has as much as the others, and "
                    "whole groups of heads."
                )


def _check_dropout(spread: _Spread, dropout_p: Any) -> None:
    alone = set(spread.batch_axes) | set(spread.head_axes)
    copied = [i for i in range(spread.mesh.ndim) if i not in alone and spread.mesh.size(i) > 1]
    if copied and isinstance(dropout_p, (int, float)) and dropout_p > 0:
        refuse(
            f"got dropout_p={dropout_p} on DTensors that are replicated on axis {copied[0]} of "
            "their mesh, expected 0 or none replicated: the copies would drop different entries."
        )


def _local_mask(mask: Any, spread: _Spread) -> Any:
    if not isinstance(mask, Mask) or mask.is_static:
        return mask
    if mask.parts:
        return mask.of_parts(tuple([_local_mask(part, spread) for part in mask.parts]))
    name = type(mask).__name__
    if name == "Dense":
        return mask.map(lambda _, x: _scores_part("mask", x, spread))
    if name not in _PLACED:
        refuse(f"got a mask {name} with arrays beside DTensors, expected one of polyattn's own.")
    dims, batch, heads = _PLACED[name]

    def part(_: str, x: Any) -> Any:
        alike = isinstance(x, Tensor) and x.dim() < dims
        free = name == "BlockMap"
        return _local_part(name, x, spread, None if alike else batch, heads, broadcasts=free)

    return mask.map(part)


def _local_bias(bias: Any, spread: _Spread) -> Any:
    if not isinstance(bias, (Alibi, DenseBias)):
        return bias  # none, or for admission to say
    array = bias.payload
    if isinstance(bias, DenseBias):
        return DenseBias(_scores_part("bias", array, spread))
    last = array.dim() - 1 if isinstance(array, Tensor) else 0
    batch = 0 if last and array.shape[0] != 1 else None
    return Alibi(_local_part("bias", array, spread, batch, last))


def _scores_part(name: str, x: Any, spread: _Spread) -> Any:
    """Return this rank's part of what broadcasts to (B, N, T, S)."""
    dims = x.dim() if isinstance(x, Tensor) else 0
    batch, heads = (dims - 4 if dims > 3 else None), (dims - 3 if dims > 2 else None)
    return _local_part(name, x, spread, batch, heads, broadcasts=True)


def _local_part(
    name: str,
    x: Any,
    spread: _Spread,
    batch: int | None,
    heads: int | None,
    *,
    broadcasts: bool = False,
) -> Any:
    """Return this rank's part of an array that has batch entries and heads in these dims."""
    if not isinstance(x, Tensor):
        return x
    axes: dict[int, int] = {}
    for dim, size, of, what in (
        (batch, spread.batch, spread.batch_axes, "batch entries"),
        (heads, spread.heads, spread.head_axes, "heads"),
    ):
        if dim is None or dim >= x.dim() or not of:
            continue
        if x.shape[dim] == size:
            axes |= dict.fromkeys(of, dim)
        elif not broadcasts or x.shape[dim] != 1:  # it may fit a part, and would be of each
            refuse(
                f"got {name} with an array of shape {tuple(x.shape)} beside DTensors, expected "
                f"{size} {what} in dim {dim}: of whole arrays, the same on every rank, each rank "
                "takes its part. DTensor.from_local(...) makes one of the ranks' own parts."
            )
    if isinstance(x, DTensor):
        return _redistributed(name, x, spread, axes)
    if x.requires_grad and (spread.batch_axes or spread.head_axes):
        refuse(
            f"got {name} that trains as a plain tensor beside DTensors, expected a DTensor of the "
            "same mesh, whose gradient is that of all ranks: distribute_tensor(...) makes it one."
        )
    for axis in sorted(axes):
        part = x.shape[axes[axis]] // spread.mesh.size(axis)
        x = x.narrow(axes[axis], spread.mesh.get_local_rank(axis) * part, part)
    return x


def _redistributed(name: str, x: Any, spread: _Spread, axes: dict[int, int]) -> Tensor:
    if x.device_mesh != spread.mesh:
        refuse(f"got {name} on another mesh than query, expected one mesh for all of a call.")
    places, grads = [], []
    for axis in range(spread.mesh.ndim):
        place = Shard(axes[axis]) if axis in axes else Replicate()
        parted = axis not in axes and axis in (*spread.batch_axes, *spread.head_axes)
        places.append(place)
        grads.append(Partial() if parted else place)
    return x.redistribute(placements=places).to_local(grad_placements=grads)  # type: ignore[no-any-return]

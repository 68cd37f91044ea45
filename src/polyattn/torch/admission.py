"""torch's side of the door: how admission sees tensors, and what is around a call."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.problem import Problem
from polyattn.problem.admission import ArrayFacts, Other, Surroundings
from polyattn.problem.admission import admit as admit_call
from polyattn.torch.dtensors import is_sharded
from polyattn.torch.internals import are_higher, transforms
from polyattn.torch.kit.masking import bind_mask, known

__all__ = [
    "FRONT", "Call", "admit", "autocast_to", "cast_alike", "facts_of", "refuse_sharded",
]  # fmt: skip


_WHOLE = "x.full_tensor() or, of a rank's part, x.to_local() is one"


@dataclass(frozen=True)
class Call:
    """A checked call: its problem, and its mask, bias and sinks as tensors on the device."""

    problem: Problem
    mask: Mask | None
    bias: Bias | None
    sinks: Tensor | None
    cast: torch.dtype | None  # what autocast turns the inputs into
    masked: bool  # a mask was given, though it may have been simplified away


def facts_of(x: Any) -> ArrayFacts | Other:
    """Return what admission is told of an argument."""
    if isinstance(x, (ArrayFacts, Other)):
        return x
    if not isinstance(x, Tensor):
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        return Other(type(x).__name__, is_array, "torch.as_tensor makes it one" if is_array else "")
    if is_sharded(x):  # a call of three DTensors is one of their parts, which come here
        return Other("DTensor", True, _WHOLE)
    dtype = str(x.dtype).rpartition(".")[2]
    if x.is_nested or x.layout != torch.strided:
        return ArrayFacts((), dtype, str(x.device), form="nested" if x.is_nested else "sparse")
    shape = tuple(x.shape)
    # negated views hold other values than their memory
    unit = not shape or ((x.stride(-1) == 1 or shape[-1] <= 1) and not x.is_neg())
    return ArrayFacts(shape, dtype, str(x.device), x.requires_grad, unit)


def _check_whole(name: str, payload: Any) -> Any:
    if is_sharded(payload):
        raise InvalidProblem(
            f"got a mask whose {name} is a DTensor beside tensors that are none, expected a "
            f"torch.Tensor; {_WHOLE}."
        )
    return payload


def refuse_sharded(mask: Mask) -> None:
    """Raise for a mask with a DTensor in it: its signature is that of one without."""
    for leaf in mask.leaves():
        if not leaf.static and any(type(x) is not Tensor and is_sharded(x) for x in leaf.arguments):
            mask.map(_check_whole)


class TorchFront:
    """Eager tensors, for :class:`polyattn.problem.admission.Front`."""

    framework = "torch"
    array_type = "torch.Tensor"
    facts = staticmethod(facts_of)
    known = staticmethod(known)

    def surroundings(self, query: ArrayFacts) -> Surroundings:
        cast = autocast_to(query.dtype, query.device_type)
        return Surroundings(
            None if cast is None else str(cast).rpartition(".")[2],
            arch_of(query.device),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.compiler.is_compiling(),
            higher=are_higher(transforms()),
        )

    def bind(self, mask: Mask, device: str) -> Mask:
        refuse_sharded(mask)
        return bind_mask(mask, torch.device(device))

    def arange(self, size: int) -> Tensor:
        return torch.arange(size, device="cpu")  # a default device may hold no values


FRONT = TorchFront()


def admit(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """Check a call of :func:`polyattn.torch.attention`; raise :class:`InvalidProblem`."""
    problem, mask, cast = admit_call(q, k, v, front=FRONT, **options)
    return Call(
        problem,
        mask,
        options.get("bias"),
        options.get("sinks"),
        None if cast is None else getattr(torch, cast),
        options.get("mask") is not None,
    )


def autocast_to(dtype: str, device: str) -> torch.dtype | None:
    """Return what autocast makes of a call's arrays here, or None if it leaves the query as is."""
    if dtype == "float64" or device not in ("cpu", "cuda"):
        return None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast_alike(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """Return the facts of arrays of several dtypes as autocast makes them one, if it does."""
    dtypes = {x.dtype for x in (q, k, v)}
    if len(dtypes) == 1 or not dtypes <= {"float32", "float16", "bfloat16"}:
        return q, k, v
    if (cast := autocast_to(q.dtype, q.device_type)) is None:
        return q, k, v
    name = str(cast).rpartition(".")[2]
    return replace(q, dtype=name), replace(k, dtype=name), replace(v, dtype=name)


def arch_of(device: str) -> str | None:
    """Return the compute capability of a CUDA device, as ``sm_90``."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return None
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))

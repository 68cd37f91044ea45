"""torch's FlexAttention; imports no framework."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil

from polyattn.backends.declaring import BIASES, FLOATS, LAYOUTS, loader, torch_probe
from polyattn.problem import Problem
from polyattn.selection.backend import Available, Backend, Missing, Probe
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare", "is_unfused"]

PLACE = 20


def declare(registry: Registry) -> None:
    """Register it."""
    registry.register(_flex())


def _flex() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True, higher=True,
    )  # fmt: skip
    cuda = dataclasses.replace(  # with atomic sums where compiled; no higher derivatives tried
        cpu, devices=frozenset({"cuda"}), archs=(75, 121), deterministic_backward=False,
        higher=False,
    )  # fmt: skip
    return Backend(
        "flex",
        "torch",
        (cpu, cuda),
        _flex_probe,
        loader("flex.torch"),
        None,
        "torch",
        "torch's FlexAttention; large problems are compiled for their class and skip masked "
        "blocks, small ones (and on CPUs lse, gradients and float64) run its unfused form, which "
        "materialises the scores",
        _flex_choices,
    )


def _flex_probe() -> Probe:
    found = torch_probe(needs=_has_flex)
    if isinstance(found, Missing):
        return found
    devices = found.devices or frozenset()
    if importlib.util.find_spec("triton") is None:
        devices = devices - {"cuda"}
    detail = ""
    if not any(map(shutil.which, ("g++", "clang++", "cl"))):
        detail = "no C++ compiler found, so on CPUs it runs its unfused form: exact, but slow"
    return Available(found.version, detail, devices)


def _flex_choices(p: Problem) -> list[dict[str, bool]]:
    return [] if is_unfused(p) else [{"compile": True}, {"compile": False}]


def is_unfused(p: Problem) -> bool:
    """Say whether torch's compiled kernels cannot run it, and its unfused form does."""
    if p.bias_grad or p.sinks_grad or p.dtype == "float64":
        return True
    if p.device == "cpu":
        return p.lse or p.grad
    return not all(16 <= dim <= 256 for dim in (p.head_dim, p.value_dim))


def _has_flex() -> str | None:
    found = importlib.util.find_spec("torch.nn.attention.flex_attention")
    return None if found else "torch has no torch.nn.attention.flex_attention"

"""Models that somebody else moves already: two that move one model's weights lose them."""

from __future__ import annotations

from typing import Any

from torch import nn

from polyattn.errors import OffloadError
from polyattn.hooks.layerwise_offload.hook import LayerwiseOffloadHook
from polyattn.hooks.manager import ModuleHookManager

__all__ = ["refuse_others"]


def refuse_others(model: nn.Module) -> None:
    """Raise if another library, or another offload of ours, moves a part of the model."""
    for name, module in model.named_modules():
        who = _mover_of(module)
        if who is not None:
            raise OffloadError(
                f"got {name or 'a model'} that {who} moves already, expected a model whose weights "
                "nobody else moves: take its hooks off first"
            )


def _mover_of(module: nn.Module) -> str | None:
    facts = vars(module)
    if _moves(facts.get("_hf_hook")):
        return "accelerate (remove_hook_from_module(model, recurse=True))"
    registry = facts.get("_diffusers_hook")
    if registry is not None and any("offload" in name for name in getattr(registry, "hooks", ())):
        return "diffusers' group offloading"
    if any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
        return "FSDP"
    if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)):
        return "DeepSpeed"
    for hook in _hooks_of(module):
        if isinstance(hook, LayerwiseOffloadHook):
            return "another offload of polyattn (handle.detach())"
    return None


def _moves(hook: Any) -> bool:
    """Whether a hook of accelerate moves weights: only those that offload, or place inputs, do."""
    if hook is None:
        return False
    each = getattr(hook, "hooks", (hook,))
    return any(
        getattr(one, "offload", False) or type(one).__name__ in ("CpuOffload", "UserCpuOffloadHook")
        for one in each
    )


def _hooks_of(module: nn.Module) -> list[Any]:
    manager = ModuleHookManager.of(module)
    return [manager.get(name) for name in manager]

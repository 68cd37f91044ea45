"""What torch keeps in modules: their hooks' tables, children, parameters, and what wraps them."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.torch.internals.private_names import MISSING, noted

__all__ = [
    "apply_to_module",
    "applying_method",
    "call_code",
    "children_of",
    "compiled_call",
    "hook_tables",
    "is_replica",
    "own_buffers",
    "own_parameters",
    "set_children",
    "set_compiled_call",
    "unwrapped",
]

_CALL = noted("torch.nn.Module._call_impl", "calls cannot be told apart; polyattn.hooks refuses")


def call_code() -> CodeType:
    """Return the code that calls a module and its hooks; frames of it tell calls apart."""
    found = _CALL.find()
    if found is MISSING:
        _CALL.refuse()
    code: CodeType = found.__code__
    return code


_PRE = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"
_POST = "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"
for _name in (*_PRE, *_POST):
    noted(
        f"torch.nn.Module.{_name}",
        "hooks that copying a module leaves behind stay in its tables, where they do nothing",
        sample=nn.Module,
    )


def hook_tables(module: nn.Module) -> list[list[dict[int, Any]]]:
    """Return the tables of a module's forward hooks: of each kind, the hooks and their options."""
    return [[getattr(module, name, {}) for name in names] for names in (_PRE, _POST)]


def _contents(name: str, public: Callable[[nn.Module], Any], otherwise: str) -> Any:
    row = noted(f"torch.nn.Module.{name}", otherwise, sample=nn.Module)
    return public if row.find() is MISSING else attrgetter(name)


own_parameters: Callable[[nn.Module], dict[str, Tensor | None]] = _contents(
    "_parameters",
    lambda module: dict(module.named_parameters(recurse=False, remove_duplicate=False)),
    "Module.named_parameters(recurse=False) is gone over instead",
)
"""The parameters of a module itself, by name."""

own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = _contents(
    "_buffers",
    lambda module: dict(module.named_buffers(recurse=False, remove_duplicate=False)),
    "Module.named_buffers(recurse=False) is gone over instead",
)
"""The buffers of a module itself, by name."""

children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _contents(
    "_modules",
    lambda module: dict(module.named_children()),
    "Module.named_children() is gone over instead; what rebuilds models for `bench trace` refuses",
)
"""The modules that a module holds, by name: torch's own table."""


def set_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Make these the modules that `module` holds, in this order."""
    table = children_of(module)
    table.clear()
    table.update(children)


noted(
    "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
    "a module made by torch.compile(module) is traced under the name of its wrapper",
    sample=lambda: torch.compile(nn.Identity()),
)
noted(
    "torch.nn.Module._is_replica",
    "the copies that DataParallel makes are traced as models of their own",
    sample=lambda: nn.Identity()._replicate_for_data_parallel(),
)


def unwrapped(model: Any) -> Any:
    """Return the module inside of what ``torch.compile(module)`` makes; others as they are."""
    return getattr(model, "_orig_mod", model)


_COMPILED = noted(
    "torch.nn.Module._compiled_call_impl",
    "offloaded blocks that were compiled in place with fullgraph=True refuse",
)


def compiled_call(module: nn.Module) -> Any:
    """Return what ``module.compile()`` made of a module's call; None if it was not compiled."""
    return getattr(module, _COMPILED.name, None)


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Let a module that was compiled in place call something else."""
    setattr(module, _COMPILED.name, call)


_APPLY = noted("torch.nn.Module._apply", "an offloaded model refuses to be attached")
applying_method = _APPLY.name
"""The name of the method by which ``Module.to`` and its like reach a module's tensors."""


def apply_to_module(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool) -> Any:
    """Do to a module's tensors what its class does when it is moved or cast."""
    found = getattr(type(module), applying_method, None)
    if found is None:
        _APPLY.refuse()
    return found(module, function, recurse)


def is_replica(module: nn.Module) -> bool:
    """Say whether a module is a copy that DataParallel made for a device."""
    return bool(getattr(module, "_is_replica", False))

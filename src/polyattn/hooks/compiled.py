"""Makes ``torch.compile`` notice that the hooks of a module have changed.

Torch does not guard on hooks (``skip_nnmodule_hook_guards``): a graph compiled before a hook came
would run without it for ever. What was compiled with a module of that class in it is therefore
forgotten, and compiled anew at its next call; everything else stays.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from polyattn.torch.internals import (
    DYNAMO_CONFIG,
    READS_OF_MODULES,
    cache_entries,
    dynamo_config,
    forget_frame,
    frame_conversion,
)

__all__ = ["forget_graphs_with"]

_TYPE_GUARD = re.compile(r"___check_(?:type|obj)_id\([^\n]*?, (\d+)\)")
# What a frame that calls a module shows even where the guards on modules were filtered out.
_CALLS_MODULES, _READS_MODULES = READS_OF_MODULES
_BUILT_IN = ("torch.nn.modules.", "torch.ao.")

# Reading the guards of a large graph takes a while, and a trace attaches hundreds of hooks.
_known: weakref.WeakKeyDictionary[Any, tuple[frozenset[int], bool]] = weakref.WeakKeyDictionary()


class _Watch(MetaPathFinder):
    """Sees to it that torch.compile, once it is loaded, guards on hooks."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != DYNAMO_CONFIG:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(_load, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def _load(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    module.skip_nnmodule_hook_guards = False  # type: ignore[attr-defined]


_watch = _Watch()


def guard_on_hooks() -> None:
    """From now on, a graph compiled without hooks is not used for a module that has some."""
    settings = sys.modules.get(DYNAMO_CONFIG)
    if settings is None:
        if _watch not in sys.meta_path:
            sys.meta_path.insert(0, _watch)
    elif settings.skip_nnmodule_hook_guards:
        settings.skip_nnmodule_hook_guards = False  # type: ignore[attr-defined]


def forget_graphs_with(module: nn.Module) -> None:
    """Forget every compiled frame that may have called `module`."""
    conversion = frame_conversion()
    if conversion is None:
        return
    # Without inlining, torch leaves out the guards that tell. (A copy, for newer versions warn.)
    config = dynamo_config().get_config_copy()
    inlined = config.get("inline_inbuilt_nn_modules", True)
    with conversion.compile_lock:
        codes = [code for seen in conversion.input_codes.seen if (code := seen()) is not None]
        for code in codes:
            if any(not inlined or _may_call(entry, module) for entry in cache_entries(code)):
                forget_frame(code)


def _may_call(entry: Any, module: nn.Module) -> bool:
    """Whether the compiled frame may have `module` in it: its guards name every module's class.

    Unless they were filtered out (``guard_filter_fn``): a frame that shows signs of modules but no
    guards of the kind in question may call any.
    """
    if entry is None:
        return True
    guards = entry.guard_manager
    if guards not in _known:
        text = str(guards)
        code = entry.code
        signs = _CALLS_MODULES in text or not _READS_MODULES.isdisjoint(
            (*code.co_names, *(constant for constant in code.co_consts if type(constant) is str))
        )
        _known[guards] = frozenset(map(int, _TYPE_GUARD.findall(text))), signs
    ids, signs = _known[guards]
    if id(type(module)) in ids:
        return True
    if not signs:
        return False
    guarded = [cls for cls in _module_classes(nn.Module) if id(cls) in ids]
    if type(module).__module__.startswith(_BUILT_IN):
        guarded = [cls for cls in guarded if _is_plain_built_in(cls)]
    return not guarded


def _is_plain_built_in(cls: type) -> bool:
    """Whether torch counts the class as built in, whose guards it can be told to leave out."""
    return cls.__module__.startswith(_BUILT_IN) and not cls.__module__.endswith(".container")


def _module_classes(cls: type[nn.Module]) -> Iterator[type[nn.Module]]:
    for child in cls.__subclasses__():
        yield child
        yield from _module_classes(child)

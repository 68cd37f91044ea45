"""What a forward hook is: :class:`ForwardHook`, and what one may ask while it runs.

A hook wraps the calls of a module: ``pre_forward`` sees and may change what goes in,
``post_forward`` what comes out, ``failed`` hears of calls that ended in an exception.
:class:`polyattn.hooks.ModuleHookManager` attaches it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from polyattn.torch.internals import current_graph_task

__all__ = ["ForwardHook", "recomputing"]


class ForwardHook:
    """The base of all hooks; each method is optional, and by default changes nothing.

    Hooks of one module nest like the layers of an onion: ``pre_forward`` in the order of
    attachment, ``post_forward`` in the reverse order. A hook whose ``pre_forward`` completed sees
    exactly one of ``post_forward`` and ``failed`` afterwards, in the same thread; only one whose
    ``post_forward`` itself raises sees both. So what belongs to a single call fits on a stack per
    thread (``threading.local``), also when the module calls itself.

    One hook may serve many modules: each method is told the module.

    >>> import torch
    >>> from polyattn.hooks import ForwardHook, ModuleHookManager
    >>> class Double(ForwardHook):
    ...     def post_forward(self, module, output):
    ...         return output * 2
    >>> module = torch.nn.Identity()
    >>> with ModuleHookManager.of(module) as manager:
    ...     handle = manager.attach("double", Double())
    ...     module(torch.ones(2))
    tensor([2., 2.])
    >>> module(torch.ones(2))
    tensor([1., 1.])
    """

    def on_attach(self, module: nn.Module) -> None:
        """Called once before the hook is attached; if it raises, the hook is not."""

    def on_detach(self, module: nn.Module) -> None:
        """Called once after the hook was detached; not when the module is deleted with its hooks.

        If that happens inside a call that the hook has started, its ``post_forward`` or ``failed``
        for that call still follows.
        """

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments that the module is to get, as ``(args, kwargs)``; None: these."""
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Return the output that the caller is to get; None: this one."""
        return output

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        """Hear that a call this hook has started ends in `exc`, which goes on to the caller.

        What is raised here becomes a note of `exc`. Compiled code never calls it.
        """


def recomputing() -> bool:
    """Whether a backward pass runs in this thread, so that a module call now is a recomputation.

    Activation checkpointing runs the forward a second time, inside the backward pass, and hooks see
    that too. (It may end that run early by an exception of its own: then hooks see ``failed``.)

    >>> from polyattn.hooks import recomputing
    >>> recomputing()
    False
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    return current_graph_task() != -1

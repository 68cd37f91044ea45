"""Policies of modules: which backends run what is called within a module's forward."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from types import FrameType
from typing import Any

from polyattn.errors import InvalidProblem, near_matches
from polyattn.selection import scopes
from polyattn.selection.requests import Request

__all__ = ["ModulePolicy", "set_backend"]


class ModulePolicy(AbstractContextManager["ModulePolicy"]):
    """Policies in force on modules; ``remove()`` or leaving the ``with`` block ends them."""

    def __init__(self, names: Mapping[str, Request | None]) -> None:
        self.policies = dict(names)
        self._handles: list[Any] = []

    def _attach(self, module: Any, encoded: str) -> None:
        # the end before the beginning: one that an interrupt leaves alone does nothing
        self._handles.append(module.register_forward_hook(_Leave(encoded), always_call=True))
        self._handles.append(module.register_forward_pre_hook(_Enter(encoded), prepend=True))

    def remove(self) -> None:
        """End the policies; the modules are as before."""
        while self._handles:
            self._handles.pop().remove()
        _forget_what_was_left()

    def __exit__(self, *exc: object) -> None:
        self.remove()


class _Enter:
    """The forward pre-hook of a policy: puts it in force and keeps what it replaced."""

    def __init__(self, encoded: str) -> None:
        self.encoded = encoded

    def __call__(self, module: Any, args: Any) -> None:
        traced = scopes.is_tracing()
        if not traced and _entered.in_force:
            _forget_what_was_left(module)
        outer = scopes.local.module
        scopes.local.module = f"{self.encoded}\n{outer or ''}"
        if not traced:
            _entered.in_force.append((scopes.local.module, id(module)))


class _Leave:
    """The forward hook of a policy; runs also when the forward raised an Exception.

    One that something raised before the policy was put in force has nothing to end.
    """

    def __init__(self, encoded: str) -> None:
        self.encoded = encoded

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        current, _, outer = (scopes.local.module or "").partition("\n")
        if current != self.encoded:
            return
        if not scopes.is_tracing() and _entered.in_force:
            _entered.in_force.pop()
        scopes.local.module = outer or None


class _Entered(threading.local):
    """The policies that this thread's eager calls put in force, the innermost last.

    Each with what it made of the local policy, and the id of its module.
    """

    def __init__(self) -> None:
        self.in_force: list[tuple[str, int]] = []


_entered = _Entered()


def _forget_what_was_left(entered: Any = None) -> None:
    """End the policies of calls that a KeyboardInterrupt ended, whose hooks torch did not run.

    `entered`: the module whose call begins now.
    """
    while _entered.in_force:
        made, module = _entered.in_force[-1]
        if made != scopes.local.module:
            return  # compiled code put it in force, whose modules have no frames
        if _is_running(module, but=entered):
            return
        _entered.in_force.pop()
        scopes.local.module = made.partition("\n")[2] or None


def _is_running(module: int, but: Any) -> bool:
    """Say whether a call of the module with this id is on the stack, the newest of `but` aside."""
    code = scopes.call_code()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and code is not None:
        if frame.f_code is code:
            called = frame.f_locals.get("self")
            if called is but:
                but = None
            elif id(called) == module:
                return True
        frame = frame.f_back
    return code is None


def set_backend(
    model: Any, policy: Mapping[str, object] | str | None, *, on_unsupported: str | None = None
) -> ModulePolicy:
    r"""Attach backends to modules by name pattern (source ``MODULE``).

    `policy` maps patterns to a name, an ordered list of names, or None (automatic again, within
    a module that has a policy). A pattern is a glob or a regular expression for the whole dotted
    name (``""`` is the model itself); the first that matches a module counts, and the innermost
    module that has a policy wins. A single name is the policy of the whole model.

    Raises :class:`~polyattn.errors.InvalidProblem` for a pattern that matches nothing.

    ::

        policy = set_backend(model, {r"blocks\.[0-3]\..*attn": "sdpa_math", "*": "sdpa_flash"})
    """
    if not isinstance(policy, Mapping):
        policy = {"": policy}
    modules = dict(model.named_modules())
    requests: dict[str, Request | None] = {}
    unused = set(policy)
    for name in modules:
        pattern = next((p for p in policy if _matches(p, name)), None)
        unused -= {p for p in policy if _matches(p, name)}
        if pattern is not None:
            wish = policy[pattern]
            names = () if wish is None else wish if isinstance(wish, (list, tuple)) else (wish,)
            requests[name] = Request.make(names, (), on_unsupported) if names else None
    if unused:
        names = sorted(filter(None, modules))
        raise InvalidProblem(
            f"got the pattern {sorted(unused)[0]!r}, which matches none of the {len(modules)} "
            f"modules.{near_matches(sorted(unused)[0], names)} Modules are called "
            f"{', '.join(names[:8])}{' ...' if len(names) > 8 else ''}."
        )
    handle = ModulePolicy(requests)
    if requests:
        scopes.ask()
    try:
        for name, request in requests.items():
            handle._attach(modules[name], request.encode() if request else "-")
    except BaseException:  # an interrupt: all of them or none
        handle.remove()
        raise
    return handle


def _matches(pattern: str, name: str) -> bool:
    if fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False

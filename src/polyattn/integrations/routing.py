"""What routing replaces in other modules' namespaces, and who is told what ran.

A :class:`Seam` is one function of torch's and what stands in for it while a routing is entered. All
are put in place together, in one pass over the modules, and taken out when the last routing ends.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from polyattn import settings
from polyattn.forks import kept_free
from polyattn.integrations.on_import import OnImport
from polyattn.selection import Selection, scopes
from polyattn.selection.wishes import current_wishes
from polyattn.torch.internals import (
    OPERATORS_MODULE,
    forget_jit_builtin,
    inline_as,
    register_jit_builtin,
    replace_operator,
    script_as,
    torch_sdpa,
)
from polyattn.torch.left_to_torch import hand_to_torch

__all__ = ["Compiled", "Listener", "QuickListener", "Router", "SdpaCall", "Seam", "router"]


class SdpaCall(NamedTuple):
    """The arrays of one call, as the program passed them."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any


class Listener(Protocol):
    """Hears what each call ran on."""

    def ran(self, selection: Selection, call: SdpaCall | None) -> None:
        """A call ran; `call` is None where its arrays cannot be seen (in compiled code)."""

    def passed(self, reason: str, call: SdpaCall | None) -> None:
        """A call went to torch itself, because polyattn does not model it."""


@runtime_checkable
class QuickListener(Listener, Protocol):
    """One that also hears of calls whose sizes are those of their arrays, not of the selection."""

    def ran_of_class(self, selection: Selection, call: SdpaCall) -> None:
        """A call ran, of (B, N, T, H), chosen with others of its class of sizes or by itself."""


@dataclass(frozen=True)
class Seam:
    """One function of torch's or of a library's, and its stand-in.

    `operator`: what torch.jit scripts calls of the stand-in as; otherwise it scripts the original.
    `seen_through`: compilers find the original where they look at the stand-in. `for_compilers`:
    what stands where they look operators up by name, instead of the stand-in. `module`: of a
    library's, the module that has it, which may be imported while calls are routed already. `home`:
    the module of torch's that programs know it from, if it is not the original's own.
    """

    original: Callable[[], Any]
    stand_in: Any
    operator: str = ""
    seen_through: bool = True
    for_compilers: Any = None
    module: str = ""
    home: str = ""


class Compiled:
    """A recorder (see `polyattn.selection.scopes`) of calls that come through no stand-in."""

    def append(self, selection: Selection) -> None:
        router.tell([selection], None)


class _Names(NamedTuple):
    """What a function is called."""

    module: str
    qualname: str
    name: str

    @classmethod
    def of(cls, function: Any) -> _Names:
        return cls(function.__module__, function.__qualname__, function.__name__)

    def give_to(self, function: Any) -> None:
        function.__module__, function.__qualname__, function.__name__ = self


class Router:
    """What is replaced at present, and who listens."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.entered = False  # until it is, what a program kept of the stand-ins goes to torch
        self.is_quick = False  # entered, and nobody listens or asks: calls need nothing of this
        self.quick: tuple[
            QuickListener, ...
        ] = ()  # who listens, if all do so quickly and none asks
        self.depth = 0
        self.listeners: tuple[Listener, ...] = ()
        self.scopes: tuple[str, ...] = ()  # for threads, which begin without any scope
        self._seams: list[Seam] = []
        self._replaced: list[tuple[Any, Any]] = []
        self._own_names: list[tuple[Any, _Names]] = []
        self._waiting: dict[str, OnImport] = {}

    def add(self, *seams: Seam) -> None:
        """Have further functions replaced while a routing is entered."""
        self._seams += seams

    def enter(self, listener: Listener | None, scope: str | None) -> None:
        """Put all stand-ins in place, unless they are; `scope` holds in threads without one."""
        with self.lock:
            before = self.depth, self.scopes, self.listeners
            self._unsettle()
            try:
                self.depth += 1
                self.scopes = (*self.scopes, scope or (self.scopes[-1] if self.scopes else ""))
                if listener is not None:
                    scopes.record(1)  # calls look for recorders
                    self.listeners = (*self.listeners, listener)
                if self.depth == 1:
                    self.entered = True
                    self._replaced, self._own_names = [], []
                    self._put_in_place(self._seams)
                    self._wait()
            except BaseException:  # an interrupt: all modules' names are gone through meanwhile
                if self.listeners is not before[2]:
                    scopes.record(-1)
                self.depth, self.scopes, self.listeners = before
                if self.depth == 0:
                    self._put_back()
                raise
            finally:
                self._settle()

    def leave(self, listener: Listener | None) -> None:
        """Undo :meth:`enter`."""
        with self.lock:
            self._unsettle()
            self.depth -= 1
            self.scopes = self.scopes[:-1]
            if listener is not None:
                scopes.record(-1)
                kept = list(self.listeners)
                kept.remove(listener)
                self.listeners = tuple(kept)
            if self.depth == 0:
                try:
                    self._put_back()
                except BaseException:  # an interrupt, at which nothing may stay replaced
                    self._put_back()
                    raise
            self._settle()

    def _unsettle(self) -> None:
        self.is_quick, self.quick = False, ()

    def _settle(self) -> None:
        if not self.entered or (self.scopes and self.scopes[-1]):
            return
        self.is_quick = not self.listeners
        quick = tuple([one for one in self.listeners if isinstance(one, QuickListener)])
        self.quick = quick if len(quick) == len(self.listeners) else ()

    def _put_back(self) -> None:
        """Put what was replaced back; to do so again does no harm."""
        self.entered = False
        for function, names in self._own_names:
            names.give_to(function)
        back = [(new, old) for old, new in self._replaced]
        back += [(s.for_compilers, torch_sdpa) for s in self._seams if s.for_compilers]
        _swap(back)
        for seam in self._seams:
            forget_jit_builtin(seam.stand_in)
        for waiting in self._waiting.values():
            waiting.cancel()
        self._waiting = {}

    def _wait(self) -> None:
        """See to libraries when they are imported."""
        names = {s.module for s in self._seams if s.module and s.module not in sys.modules}
        for name in names:
            self._waiting[name] = OnImport(name, functools.partial(self._imported, name))

    def _imported(self, name: str) -> None:
        with self.lock:
            if self._waiting.pop(name, None) is not None:
                self._put_in_place([seam for seam in self._seams if seam.module == name])

    def _put_in_place(self, seams: Sequence[Seam]) -> None:
        _list_overridable()
        added = []
        for seam in seams:
            original = seam.original()
            if original is None:  # this torch has none, or the library is not imported
                continue
            if seam.operator:
                register_jit_builtin(seam.stand_in, seam.operator)
            else:
                script_as(seam.stand_in, original)
            if seam.seen_through:
                inline_as(seam.stand_in, original)
            added.append((original, seam.stand_in))
        self._replaced += added
        if added:
            _swap(added)
        for seam in seams:
            if seam.for_compilers is not None:
                replace_operator(seam.stand_in, seam.for_compilers)
        self._take_names(seams)

    def _take_names(self, seams: Sequence[Seam]) -> None:
        """Name stand-ins as what they stand for: so they are pickled, and written in traces.

        pickle writes a function as its names, if it is found by them, and loads what it finds then.
        """
        stands_for = {id(new): old for old, new in self._replaced}
        for seam in seams:
            original = stands_for.get(id(seam.stand_in))
            if original is None:
                continue
            # what another library put there may be anything that can be called
            name, own = getattr(original, "__name__", ""), getattr(original, "__module__", None)
            named = [(seam.stand_in, seam.home or own)]
            if seam.for_compilers is not None:
                named.append((seam.for_compilers, own))
            for function, home in named:
                if getattr(sys.modules.get(str(home)), name, None) is function:
                    self._own_names.append((function, _Names.of(function)))
                    _Names(str(home), name, name).give_to(function)

    # --- what is told ---

    def tell(self, heard: Sequence[Selection], call: SdpaCall | None) -> None:
        """Tell the listeners what a call ran on."""
        for selection in heard:
            if selection.problem is None:
                self.tell_passed(selection.reason, call)
                continue
            for listener in self.listeners:
                listener.ran(selection, call)

    def tell_passed(self, reason: str, call: SdpaCall | None) -> None:
        """Tell the listeners that a call went to torch."""
        for listener in self.listeners:
            listener.passed(reason, call)

    def hand_over(
        self, reason: str, call: SdpaCall | None, function: str = "scaled_dot_product_attention"
    ) -> None:
        """Note and tell that torch runs a call, or raise Unsupported if a request forbids it.

        `function`: the one of torch's.
        """
        others = _others()
        if others or self.is_asked():
            token = scopes.recording.set(tuple(others))
            try:
                hand_to_torch(reason, function)
            finally:
                scopes.recording.reset(token)
        self.tell_passed(reason, call)

    def is_watched(self) -> bool:
        """Say whether anything may be asked for, or anybody listens; quick if nothing ever was."""
        return (
            bool(self.listeners) or scopes.state.armed or settings.raw(settings.BACKEND) is not None
        )

    def is_asked(self) -> bool:
        """Say whether anything is asked for here, which then holds whatever is gained by it."""
        if self.scopes and self.scopes[-1] and scopes.current_scope() is None:
            return True
        wanted = current_wishes()
        return bool(wanted.ordered() or wanted.scope.never)

    def run(self, call: SdpaCall | None, function: Callable[[], Any]) -> Any:
        """Run a call under the routing's request, and tell the listeners of this call only."""
        if self.scopes and self.scopes[-1] and scopes.current_scope() is None:
            owner = object()
            before = scopes.enter(self.scopes[-1], owner)  # in a thread that began without it
            try:
                return self.run(call, function)
            finally:
                scopes.leave(before, owner)
        if not self.listeners:
            return function()
        heard: list[Selection] = []
        token = scopes.recording.set((*_others(), heard))
        try:
            return function()
        finally:
            scopes.recording.reset(token)
            self.tell(heard, call)


def _others() -> Sequence[Any]:
    """Return the recorders in force but those of compiled code, which hear of a call otherwise."""
    return [r for r in scopes.recording.get(()) if not isinstance(r, Compiled)]


_KEPT = ("torch._", "torch.overrides", "torch.fx", "torch.jit", "polyattn")


def _list_overridable() -> None:
    """Have torch list, once in a process, what subclasses of tensors may answer.

    torch and its compiler keep the list for good: one that is made while calls are routed would
    lack torch's own functions, also when the routing has ended.
    """
    torch.overrides.get_overridable_functions()
    torch.overrides.get_testing_overrides()


def _swap(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Put the new where a module's namespace holds the old; torch's inner tables are left alone."""
    wanted = {id(old): (old, new) for old, new in pairs}
    for name, module in list(sys.modules.items()):
        if name.startswith(_KEPT) and name != OPERATORS_MODULE:
            continue
        held = getattr(module, "__dict__", None)
        if not isinstance(held, dict):
            continue
        # a few modules of thousands hold one: all names of the others are compared at once
        if wanted.keys().isdisjoint(map(id, list(held.values()))):
            continue
        for key, value in list(held.items()):
            found = wanted.get(id(value))
            if found is not None and found[0] is value:
                setattr(module, key, found[1])


router = Router()
"""The router of this process."""
kept_free(router.lock)

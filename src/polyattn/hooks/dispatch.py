"""What stands in torch's hook tables for all hooks of a module: one pre-hook, one post-hook.

Calls are told apart by the Python frame of ``Module._call_impl``: its id is unique among all calls
that run, in any thread and at any depth of recursion, and costs little to find. It also answers
what torch does not say: torch calls a hook with ``always_call`` in the end of every failed call,
also when an earlier pre-hook raised and ours never ran, and does not say that the call has failed.
"""

from __future__ import annotations

import sys
import threading
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from polyattn.errors import HookError
from polyattn.hooks.forward_hook import ForwardHook
from polyattn.torch.internals import call_code, run_uncompiled

__all__ = ["Dispatcher", "Inert", "Step"]

CALL_CODE: CodeType = call_code()
# Under which key we stand in torch's tables, the same in every module, for torch.compile guards on
# the keys: with one for each it would compile every block of a model anew. Torch's are positive.
KEY = -0x706F6C79
CUT_OFF = (
    "got a call of {} that was cut off by what torch shows to no hook, such as KeyboardInterrupt "
    "or SystemExit; this hook hears of it only now"
)


class Step(NamedTuple):
    """A hook, and which of its methods are not the base's and so must be called."""

    hook: ForwardHook
    pre: bool
    post: bool

    @classmethod
    def of(cls, hook: ForwardHook) -> Step:
        def own(name: str) -> bool:
            method = getattr(hook, name)
            return getattr(method, "__func__", method) is not getattr(ForwardHook, name)

        return cls(hook, own("pre_forward"), own("post_forward"))


# A call that runs now: its thread, the code of its frame, and the hooks not yet finished. A plain
# tuple, for one is made in each call.
Call = tuple[int, CodeType, list[Step]]


class Dispatcher:
    """Runs the hooks of one module. `_steps` is replaced as a whole, never changed."""

    def __init__(self) -> None:
        self._steps: tuple[Step, ...] = ()
        self._running: dict[int, Call] = {}
        self._handles: tuple[RemovableHandle, ...] = ()
        self._registering = threading.RLock()

    def __deepcopy__(self, memo: Any) -> Inert:
        return memo.setdefault(id(self), Inert())

    def __reduce__(self) -> tuple[type[Inert], tuple[()]]:
        return Inert, ()

    def _publish(self, module: nn.Module, steps: tuple[Step, ...]) -> None:
        """Let `steps` run from the module's next call on."""
        with self._registering:
            if steps and not self._is_registered():
                self._unregister()
                # The end before the beginning, and the steps last: no call may begin without end.
                after = _under_one_key(module.register_forward_hook(self._after, always_call=True))
                before = module.register_forward_pre_hook(self._before, with_kwargs=True)
                self._handles = (_under_one_key(before), after)
            self._steps = steps
        self._release()

    def _before(self, module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        # torch notes apart that a hook wants keywords: a call of another thread that met us amid
        # coming or going runs as one that had begun before.
        if kwargs is None:
            return None
        if is_dynamo_compiling():
            return _traced_before(self._steps, module, args, kwargs)
        frame = sys._getframe(1)
        back = frame.f_back
        if back is not None and back.f_code is CALL_CODE:
            frame = back
        running = self._running
        if running:
            self._end_cut_off(module, frame.f_back)
        key = id(frame)
        started: list[Step] = []
        # First the call, then the steps: whoever takes the last step away looks the other way
        # round, so that either it sees this call and waits, or this call sees no steps.
        running[key] = (get_ident(), frame.f_code, started)
        steps = self._steps
        if not steps:
            del running[key]
            self._release()
            return None
        try:
            for step in steps:
                if step[1]:
                    result = step[0].pre_forward(module, *args, **kwargs)
                    if result is not None:
                        args, kwargs = _arguments(step[0], result)
                started.append(step)
        except BaseException as exc:
            running.pop(key, None)
            _fail(module, started, exc)
            self._release()
            raise
        return args, kwargs

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if is_dynamo_compiling():
            return _traced_after(self._steps, module, output)
        caller = sys._getframe(1)
        back = caller.f_back
        inside = back is not None and back.f_code is CALL_CODE and caller.f_code is not CALL_CODE
        key = id(back) if inside else id(caller)
        call = self._running.pop(key, None)
        if call is None:  # ours never began it, or were attached meanwhile
            return None
        started = call[2]
        if caller.f_code is CALL_CODE and (error := sys.exception()) is not None:
            self._running[key] = call  # torch goes over its table: nobody may leave that meanwhile
            _fail(module, started, error)
            del self._running[key]
            self._release(in_loop=True)
            return None
        try:
            while started:
                step = started[-1]
                if step[2]:
                    result = step[0].post_forward(module, output)
                    if result is not None:
                        output = result
                del started[-1]
        except BaseException as exc:
            _fail(module, started, exc)
            self._release()
            raise
        if not self._steps:
            self._release()
        return output

    def _is_registered(self) -> bool:
        """Whether both our hooks are still there; others may have emptied torch's tables."""
        return bool(self._handles) and all(
            handle.id in (handle.hooks_dict_ref() or ()) for handle in self._handles
        )

    def _release(self, in_loop: bool = False) -> None:
        """Leave torch's tables if there are no steps and no call still needs us.

        `in_loop`: torch is going over its table itself, where taking out any but the last entry
        would be an error; what is left then goes at the next call or change of hooks.
        """
        if self._steps or not self._handles:
            return
        if self._running:
            self._end_cut_off()
        with self._registering:
            if self._steps or self._running:
                return
            if in_loop:
                table = self._handles[1].hooks_dict_ref() or {}
                if next(reversed(table), None) != self._handles[1].id:
                    return
            self._unregister()

    def _unregister(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = ()

    def _end_cut_off(
        self, module: nn.Module | None = None, caller: FrameType | None = None
    ) -> None:
        """Tell the hooks of calls that are no longer on any stack that these have failed.

        With a module it looks only at calls in this thread; `caller` is who calls the module now.
        """
        own = get_ident()
        calls = [
            (key, call)
            for key, call in self._running.copy().items()
            if module is None or call[0] == own
        ]
        if not calls:
            return
        stacks = sys._current_frames().values() if module is None else (caller,)
        live = {entry for stack in stacks for entry in _frames(stack)}
        target = module if module is not None else self._hooked()
        for key, call in calls:
            gone = (key, call[1]) not in live and self._running.pop(key, None) is call
            if gone and target is not None:
                _fail(target, call[2], HookError(CUT_OFF.format(type(target).__name__)))

    def _hooked(self) -> nn.Module | None:
        """The module whose dispatcher this is, if it still lives."""
        raise NotImplementedError


class Inert(Dispatcher):
    """What takes the dispatcher's place in a copied or unpickled module: it has no hooks."""

    def _hooked(self) -> None:
        return None


def _under_one_key(handle: RemovableHandle) -> RemovableHandle:
    """Move the entry to our key, unless a module that shares its tables with this one has it."""
    hooks = handle.hooks_dict_ref()
    there = None if hooks is None else getattr(hooks.get(KEY), "__self__", None)
    if not isinstance(there, Dispatcher) or isinstance(there, Inert):
        for reference in (handle.hooks_dict_ref, *handle.extra_dict_ref):
            table = reference()
            if table is not None and handle.id in table:
                table.pop(KEY, None)
                table[KEY] = table.pop(handle.id)
        handle.id = KEY
    return handle


def _frames(frame: FrameType | None) -> list[tuple[int, CodeType]]:
    found = []
    while frame is not None:
        found.append((id(frame), frame.f_code))
        frame = frame.f_back
    return found


def _traced_before(steps: tuple[Step, ...], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What torch.compile makes part of its graph: no frames, no clean-up."""
    for step in steps:
        if step[1]:
            result = step[0].pre_forward(module, *args, **kwargs)
            if result is not None:
                args, kwargs = _arguments(step[0], result)
    return args, kwargs


def _traced_after(steps: tuple[Step, ...], module: nn.Module, output: Any) -> Any:
    for step in reversed(steps):
        if step[2]:
            result = step[0].post_forward(module, output)
            if result is not None:
                output = result
    return output


def _arguments(hook: ForwardHook, result: Any) -> Any:
    """Check what a pre_forward returned, here where its author can still be named."""
    if (
        isinstance(result, tuple)
        and len(result) == 2
        and isinstance(result[0], tuple)
        and isinstance(result[1], dict)
    ):
        return result
    raise HookError(
        f"got {_kind(result)} from {type(hook).__name__}.pre_forward, expected (args, kwargs), a "
        "tuple and a dict: write `return args, kwargs`, or return None to change nothing"
    )


def _kind(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of ({', '.join(type(part).__name__ for part in result)})"
    return f"{type(result).__name__}"


def _fail(module: nn.Module, started: list[Step], exc: BaseException) -> None:
    """Call `failed` of the started hooks, last first; an error there becomes a note of `exc`."""
    while started:
        hook = started.pop().hook
        try:
            hook.failed(module, exc)
        except Exception as error:
            exc.add_note(f"{type(hook).__name__}.failed raised {error!r} on hearing of this")


def _never_compile_alone() -> None:
    """Keep the two entry points whole: inlined into a graph, or run by Python, nothing between.

    Compiled as frames of their own, one of the two could run as a traced piece that leaves no trace
    of the call and the other not, and the call's end would be missed.
    """
    for method in (Dispatcher._before, Dispatcher._after):
        run_uncompiled(method, and_what_it_calls=False)


_never_compile_alone()

"""Each module's own code as a list of operations, and running a model with one of them changed.

What a module's ``forward`` does itself are torch's functions that it calls, and the calls of its
children; what children do inside is theirs, and hooks are nobody's. Changing one of these
operations is the bug that someone porting this very code would write, at a known place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["Call", "changed", "observed", "rewritten", "tensors_of"]


@dataclass(eq=False)
class Call:
    """One operation of a module's own code. `name`: the function's, or ``call`` for a child.

    `index`: which of the operations of this name in this call of the module it is. `out`: what it
    returned; of an operation that is to be changed not yet known. `made`: for each tensor of the
    module, by id, what it is: ``in``, or the name of the operation that returned it, and when.
    """

    module: str
    owner: nn.Module
    name: str
    index: int
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: Mapping[int, tuple[str, int]]
    child: str = ""
    out: Any = None

    @property
    def tensors(self) -> list[Tensor]:
        """Its arguments that are tensors, in order."""
        return [one for one in (*self.args, *self.kwargs.values()) if isinstance(one, Tensor)]

    def origin(self, value: Any) -> tuple[str, int]:
        """What made a tensor, and how late in this call; ("", -1) for one from elsewhere."""
        return self.made.get(id(value), ("", -1))

    def again(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the operation gives: of these arguments in the place of its own."""
        given = (*args, *self.args[len(args) :])
        return self.func(*given, **(self.kwargs | kwargs))


@dataclass(eq=False)
class _Frame:
    module: str
    owner: nn.Module
    counts: dict[str, int] = field(default_factory=dict)
    made: dict[int, tuple[str, int]] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)  # ids stay unique while these live

    def note(self, value: Any, what: str) -> None:
        for one in tensors_of(value):
            self.kept.append(one)
            self.made[id(one)] = (what, len(self.kept))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: of tuples, lists, mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for one in value:
            yield from tensors_of(one)
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from tensors_of(one)


Visit = Callable[[Call], Any]

_QKV = ("query", "key", "value")


class _Code(TorchFunctionMode):
    """Has `visit` run each operation of the model's modules and return its result."""

    def __init__(self, model: nn.Module, visit: Visit) -> None:
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.visit = visit
        self.stack: list[_Frame | None] = []  # None: not in a module's own code, as in hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside:  # first: a trace's own work is many calls
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in ("get", "set", ""):
            return func(*args, **(kwargs or {}))
        return self.run(name, func, args, kwargs or {})

    @property
    def inside(self) -> bool:
        """Whether a module's own code is running."""
        return bool(self.stack) and self.stack[-1] is not None

    def run(self, name: str, func: Any, args: Any, kwargs: Any, child: str = "") -> Any:
        frame = self.stack[-1]
        assert frame is not None
        if not args and set(_QKV) <= kwargs.keys():
            args = [kwargs[one] for one in _QKV]
            kwargs = {one: value for one, value in kwargs.items() if one not in _QKV}
        index = frame.counts[name] = frame.counts.get(name, -1) + 1
        call = Call(
            frame.module,
            frame.owner,
            name,
            index,
            func,
            tuple(args),
            dict(kwargs),
            frame.made,
            child,
        )
        found = self.visit(call)
        frame.note(found, f"call:{child}" if child else name)
        return found

    def called(self, original: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What takes the place of a module's ``__call__``."""

        def with_hooks(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(None)
            try:
                return original(module, *args, **kwargs)
            finally:
                self.stack.pop()

        if module not in self.names or not self.inside:
            return with_hooks(*args, **kwargs)
        return self.run("call", with_hooks, args, kwargs, self.names[module])

    def entered(self, module: nn.Module, forward: Any) -> Any:
        """Return what takes the place of a module's ``forward``."""

        @functools.wraps(forward)
        def own(*args: Any, **kwargs: Any) -> Any:
            frame = _Frame(self.names[module], module)
            frame.note((args, kwargs), "in")
            self.stack.append(frame)
            try:
                return forward(*args, **kwargs)
            finally:
                self.stack.pop()

        return own


@contextmanager
def _visiting(model: nn.Module, visit: Visit) -> Iterator[None]:
    code, original = _Code(model, visit), nn.Module.__call__

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return code.called(original, self, args, kwargs)

    had = {module: vars(module).get("forward") for module in code.names}
    for module in code.names:
        module.__dict__["forward"] = code.entered(module, module.forward)
    nn.Module.__call__ = called  # type: ignore[method-assign,assignment]
    try:
        with code:
            yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        for module, forward in had.items():
            if forward is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = forward


@contextmanager
def observed(model: nn.Module, see: Callable[[Call], None]) -> Iterator[None]:
    """Show every operation, when it has run, to `see`."""

    def visit(call: Call) -> Any:
        call.out = call.func(*call.args, **call.kwargs)
        see(call)
        return call.out

    with _visiting(model, visit):
        yield


@contextmanager
def changed(model: nn.Module, module: str, name: str, index: int, change: Visit) -> Iterator[None]:
    """Have `change` compute one operation of one module, in each of its calls."""

    def visit(call: Call) -> Any:
        if call.name == name and call.module == module and call.index == index:
            return change(call)
        return call.func(*call.args, **call.kwargs)

    with _visiting(model, visit):
        yield


@contextmanager
def rewritten(model: nn.Module, changes: Mapping[str, Visit]) -> Iterator[None]:
    """Have operations of all modules computed by others, by their names."""

    def visit(call: Call) -> Any:
        change = changes.get(call.name)
        return call.func(*call.args, **call.kwargs) if change is None else change(call)

    with _visiting(model, visit):
        yield

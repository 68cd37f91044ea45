"""``tapped``: the taps of a whole model of flax or equinox, without a change of its code.

Modules are named by their paths, as torch names them: ``blocks.0.attn``, and "" is the model.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import jax

from polyattn.errors import TraceError
from polyattn.trace.recorders.jax.device_statistics import supported
from polyattn.trace.recorders.jax.tap import path_text, tap

__all__ = ["tapped"]

_NAME = "polyattn_path"


@contextmanager
def tapped(model: Any) -> Iterator[Any]:
    """Tap what goes into each module of a model and what comes out; yields the model to call.

    `model`: a ``flax.linen.Module``, whose `apply` is called within; a ``flax.nnx.Module``, called
    within; or an ``equinox.Module``: then what it yields is called, whose modules are of subclasses
    of their classes. Arrays that are no numbers, such as keys of random generators, are passed
    over. Without a trace nothing is recorded, see
    :func:`~polyattn.trace.recorders.jax.tap.tap`; the with block is to be inside of the trace's, or
    around it.

    Raises :class:`~polyattn.errors.TraceError` for other models.

    >>> with tapped(lambda x: x):
    ...     pass
    Traceback (most recent call last):
    polyattn.errors.TraceError: got a model of type function, expected a module of flax.linen, \
flax.nnx or equinox; tap other models by polyattn.jax.trace.tap.
    """
    with ExitStack() as stack:
        for library, way in _WAYS.items():
            base = getattr(sys.modules.get(library), "Module", None)
            if base is not None and isinstance(model, base):
                yield stack.enter_context(way(model))
                return
        raise TraceError(
            f"got a model of type {type(model).__name__}, expected a module of flax.linen, "
            "flax.nnx or equinox; tap other models by polyattn.jax.trace.tap."
        )


def _through(module: str, cls: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a module, its arguments and what it returns tapped."""
    args = tuple(_each(x, module, "in", f"args[{i}]", cls) for i, x in enumerate(args))
    kwargs = {name: _each(x, module, "in", f"kwargs.{name}", cls) for name, x in kwargs.items()}
    return _each(call(*args, **kwargs), module, "out", "out", cls)


def _each(x: Any, module: str, phase: str, tensor: str, cls: str) -> Any:
    """Tap the leaves of a value that are numbers."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(x)
    found = [
        tap(leaf, module, phase, tensor=tensor + path_text(path), cls=cls)
        if isinstance(leaf, jax.Array) and supported(leaf.dtype)
        else leaf
        for path, leaf in leaves
    ]
    return jax.tree_util.tree_unflatten(tree, found)


@contextmanager
def _linen(model: Any) -> Iterator[Any]:
    def intercept(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        module = context.module
        return _through(".".join(module.path), type(module).__name__, call, args, kwargs)

    with sys.modules["flax.linen"].intercept_methods(intercept):
        yield model


@contextmanager
def _nnx(model: Any) -> Iterator[Any]:
    """Name each module by an attribute, which passes through nnx's transforms, and tap by class."""
    modules = dict(sys.modules["flax.nnx"].iter_modules(model))
    with ExitStack() as stack:
        for path, module in modules.items():
            setattr(module, _NAME, ".".join(map(str, path)))
            stack.callback(delattr, module, _NAME)
        for kind in {type(module) for module in modules.values() if callable(module)}:
            stack.enter_context(_patched(kind))
        yield model


@contextmanager
def _patched(kind: type) -> Iterator[None]:
    own: Any = vars(kind).get("__call__")
    call: Any = kind.__call__

    @functools.wraps(call)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = getattr(self, _NAME, None)
        if name is None or type(self) is not kind:  # a base's call from within, or no part
            return call(self, *args, **kwargs)
        return _through(name, kind.__name__, functools.partial(call, self), args, kwargs)

    type.__setattr__(kind, "__call__", run)
    try:
        yield
    finally:
        if own is None:
            type.__delattr__(kind, "__call__")
        else:
            type.__setattr__(kind, "__call__", own)


@contextmanager
def _equinox(model: Any) -> Iterator[Any]:
    yield _wrapped(model, ())


def _wrapped(value: Any, path: tuple[str, ...]) -> Any:
    """Return a value with every module in it that can be called wrapped."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_wrapped(one, (*path, str(i))) for i, one in enumerate(value))
    if type(value) is dict:
        return {name: _wrapped(one, (*path, str(name))) for name, one in value.items()}
    if not isinstance(value, sys.modules["equinox"].Module) or not is_dataclass(value):
        return value
    if _NAME in vars(value):
        value = _untapped(value)
    own = {field.name for field in fields(value)}
    held = {
        name: _wrapped(one, (*path, name)) if name in own else one
        for name, one in vars(value).items()
    }
    kind: Any = type(value)
    if not callable(value):
        return _made(kind, held)
    return _made(_tapped_kind(kind), held | {_NAME: ".".join(path)})


def _made(kind: type, held: dict[str, Any]) -> Any:
    """An equinox module of a class, with these attributes: they cannot be set later."""
    made: Any = object.__new__(kind)
    for name, one in held.items():
        object.__setattr__(made, name, one)
    return made


def _untapped(module: Any) -> Any:
    """The module of the class that a tapped one's is derived from."""
    held = {name: one for name, one in vars(module).items() if name != _NAME}
    return _made(type(module).__bases__[0], held)


@functools.cache  # JAX keeps every class of modules for good, too
def _tapped_kind(kind: Any) -> type:
    """A class of modules whose calls are tapped: one of its own, so that others may ask for it."""

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _through(getattr(self, _NAME), kind.__name__, _untapped(self), args, kwargs)

    def body(namespace: dict[str, Any]) -> None:
        path = sys.modules["equinox"].field(static=True, default="", kw_only=True, repr=False)
        namespace.update({"__annotations__": {_NAME: str}, _NAME: path, "__call__": run})
        for name in ("__doc__", "__module__", "__qualname__"):
            namespace[name] = getattr(kind, name)

    return types.new_class(kind.__name__, (kind,), {}, body)


_WAYS: dict[str, Callable[[Any], Any]] = {
    "flax.linen": _linen, "flax.nnx": _nnx, "equinox": _equinox,
}  # fmt: skip

"""Decorating functions, coroutines and generators so that each runs within a scope of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

__all__ = ["iterate", "run_within"]

F = TypeVar("F", bound=Callable[..., Any])
Scope = Callable[[], AbstractContextManager[Any]]


def run_within(scope: Scope, function: F) -> F:
    """Return the function with each of its calls in a fresh scope.

    Between the items of a generator its caller is outside of the scope.
    """
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with scope():
                return await function(*args, **kwargs)

        return awaited  # type: ignore[return-value]
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            return stream(function(*args, **kwargs), scope)

        return streamed  # type: ignore[return-value]
    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def iterated(*args: Any, **kwargs: Any) -> Any:
            return iterate(function(*args, **kwargs), scope)

        return iterated  # type: ignore[return-value]

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with scope():
            return function(*args, **kwargs)

    return called  # type: ignore[return-value]


def iterate(inner: Generator[Any, Any, Any], scope: Scope) -> Generator[Any, Any, Any]:
    """Run a generator in the scope, and its caller, between the items, outside of it."""
    resume: Any = inner.send
    value: Any = None
    try:
        while True:
            with scope():
                item = resume(value)
            try:
                resume, value = inner.send, (yield item)
            except GeneratorExit:
                with scope():
                    inner.close()
                raise
            except BaseException as error:
                resume, value = inner.throw, error
    except StopIteration as end:
        return end.value


async def stream(inner: AsyncGenerator[Any, Any], scope: Scope) -> AsyncGenerator[Any, Any]:
    """Do the same as :func:`iterate` for an asynchronous generator."""
    resume: Any = inner.asend
    value: Any = None
    try:
        while True:
            with scope():
                item = await resume(value)
            try:
                resume, value = inner.asend, (yield item)
            except GeneratorExit:
                with scope():
                    await inner.aclose()
                raise
            except BaseException as error:
                resume, value = inner.athrow, error
    except StopAsyncIteration:
        return

"""Errors of wrong calls, raised as they are inside a compiler, too."""

from __future__ import annotations

from typing import NoReturn

from torch.compiler import is_dynamo_compiling

from polyattn.errors import InvalidProblem, PolyattnError
from polyattn.torch.internals import mark_constant, passed_on

__all__ = ["refuse", "through_compiler"]


def refuse(text: str) -> NoReturn:
    """Raise InvalidProblem, while tracing as well."""
    if is_dynamo_compiling():
        _refuse_traced(text)
    raise InvalidProblem(text)


def _refuse_traced(text: str) -> None:
    raise through_compiler(InvalidProblem(text))


mark_constant(_refuse_traced)


def through_compiler(error: PolyattnError) -> PolyattnError:
    """Return the error as one that the compiler hands on as it is, of the same class."""
    kind = type(error)
    name = kind.__qualname__
    passed = type(name, (kind, passed_on()), {"__module__": kind.__module__})
    made = passed.__new__(passed, *error.args)
    made.__dict__.update(vars(error), first_useful_frame=None)
    return made

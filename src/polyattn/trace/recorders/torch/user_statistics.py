"""Statistics of the user's: what they return is made data of a record, and so is what they raise.

Nothing of it reaches the model that is traced: an error is an entry under ``errors``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polyattn.trace.format.record import line_of
from polyattn.trace.statistics.schema import MOMENTS

__all__ = ["Custom", "own_statistics", "plain_fields", "said"]

Custom = tuple[str, Callable[[Any], Any]]

_NUMBERS = frozenset(MOMENTS)
_LONGEST, _LONGEST_ERROR = 1 << 16, 160


def own_statistics(custom: Iterable[Custom], t: Tensor, why: str = "") -> dict[str, Any]:
    """Return what the functions make of a tensor, by name, for :func:`plain_fields`.

    `why`: the reason why the tensor cannot be read, which is then what each of them says.

    >>> own_statistics([("size", Tensor.numel), ("f", lambda t: 1 / 0)], torch.ones(3))
    {'size': 3, 'errors': {'f': 'ZeroDivisionError: division by zero'}}
    """
    found: dict[str, Any] = {}
    errors: dict[str, str] = {}
    for name, of in custom:
        try:
            if why:
                errors[name] = why
                continue
            with torch.no_grad():
                value = of(t)
            if name in ("shape", "dtype"):
                _check_description(name, value, t)
            else:
                found[name] = value
        except Exception as error:  # the model goes on, whatever is wrong with its trace
            errors[name] = said(error)
    return found | {"errors": errors} if errors else found


def _check_description(name: str, value: Any, t: Tensor) -> None:
    """A record has these by itself, for its numbers are read by them."""
    expected: Any
    if name == "shape":
        value, expected = tuple(value), tuple(t.shape)
    else:
        value, expected = str(value).removeprefix("torch."), str(t.dtype).removeprefix("torch.")
    if value != expected:
        raise ValueError(f"got {value!r:.80} as the {name}, and the tensor's is {expected!r:.80}")


def plain_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return further fields of a record as data that a line can have; waits for the device.

    >>> plain_fields({"median": torch.tensor(2.0), "max": "high"})
    {'median': 2.0, 'errors': {'max': "TypeError: got 'high', expected a number"}}
    """
    found: dict[str, Any] = {}
    errors: dict[str, str] = dict(fields.get("errors", ()))
    for name, value in fields.items():
        if name == "errors":
            continue
        try:
            found[name] = _plain(name, value)
        except Exception as error:
            errors[name] = said(error)
    return found | {"errors": errors} if errors else found


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if name in _NUMBERS and value is not None:
        if isinstance(value, str | bytes | list):
            raise TypeError(f"got {value!r:.80}, expected a number")
        value = float(value)
    size = len(line_of({name: value}))
    if size > _LONGEST:
        raise ValueError(f"got {size} characters, expected at most {_LONGEST} in a record")
    return value


def said(error: BaseException) -> str:
    """Return what a record says of an error.

    >>> said(KeyError("a"))
    "KeyError: 'a'"
    """
    return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]

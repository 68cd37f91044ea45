"""Bugs in what a module hands to a child, or makes of what the child returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyattn_faults.kinds.kind import Kind, floats
from polyattn_faults.operations import Call, tensors_of

__all__ = ["KINDS"]

_CALL = ("call",)


def _given(call: Call) -> Tensor | None:
    given = call.args[0] if call.args else call.kwargs.get("hidden_states")
    return given if floats(given, 3) else None


def _returned(call: Call) -> Tensor | None:
    out = call.out
    out = out[0] if isinstance(out, tuple | list) and len(out) else out
    return out if floats(out, 3) else None


def _sequence(call: Call) -> bool:
    given = _given(call)
    return given is not None and given.shape[1] > 1


def _with_given(call: Call, value: Tensor) -> Any:
    if call.args:
        return call.func(value, *call.args[1:], **call.kwargs)
    return call.func(**(call.kwargs | {"hidden_states": value}))


def _rolled(call: Call) -> Any:
    given = _given(call)
    assert given is not None
    return _with_given(call, given.roll(1, 1))


def _batch(call: Call) -> bool:
    given = _given(call)
    return given is not None and len(given) > 1 and len(list(tensors_of(call.kwargs))) == 0


def _batch_swapped(call: Call) -> Any:
    given = _given(call)
    assert given is not None
    return _with_given(call, given.flip(0))


def _same_shape(call: Call) -> bool:
    given, out = _given(call), _returned(call)
    return given is not None and out is not None and given.shape == out.shape


def _alone(call: Call) -> bool:
    """Whether the child returns one tensor of the shape it is given."""
    return isinstance(call.out, Tensor) and _same_shape(call)


def _skipped(call: Call) -> Any:
    return _given(call)


def _repeated(call: Call) -> Any:
    once = call.func(*call.args, **call.kwargs)
    return _with_given(call, once[0] if isinstance(once, tuple) else once)


def _cross(call: Call) -> bool:
    other = call.kwargs.get("encoder_hidden_states")
    given = _given(call)
    return given is not None and floats(other, 3) and len(list(call.owner.children())) > 1


def _reversed_source(call: Call) -> Any:
    other = call.kwargs["encoder_hidden_states"]
    return call.func(*call.args, **(call.kwargs | {"encoder_hidden_states": other.flip(1)}))


_MASKS = ("attention_mask", "encoder_attention_mask")


def _masked(call: Call) -> bool:
    return any(isinstance(call.kwargs.get(name), Tensor) for name in _MASKS)


def _unmasked(call: Call) -> Any:
    return call.func(*call.args, **(call.kwargs | {n: None for n in _MASKS if n in call.kwargs}))


def _larger(call: Call) -> Any:
    given = _given(call)
    assert given is not None
    return _with_given(call, given * 1.01)


KINDS = [
    Kind("tokens rolled", _CALL, _sequence, _rolled),
    Kind("batch swapped", _CALL, _batch, _batch_swapped),
    Kind("child left out", _CALL, _alone, _skipped),
    Kind("child run twice", _CALL, _same_shape, _repeated),
    Kind("cross source reversed", _CALL, _cross, _reversed_source),
    Kind("mask not handed on", _CALL, _masked, _unmasked),
    Kind("one percent more", _CALL, _sequence, _larger),
]

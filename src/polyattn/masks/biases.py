"""Biases: what is added to the scores after the soft cap and before the mask.

Soft cap and sinks are arguments of the call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks.payload import describe, dtype_name, same, shape_of

__all__ = ["Alibi", "Bias", "DenseBias"]


class Bias:
    """The base of all biases."""

    @property
    def signature(self) -> str:
        """The bias without the contents of its array."""
        raise NotImplementedError

    @property
    def payload(self) -> Any:
        """The array of the bias."""
        raise NotImplementedError

    def map(self, change: Callable[[str, Any], Any]) -> Bias:
        """Return this bias with its array `a` of field `f` replaced by ``change(f, a)``."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, Bias):
            return NotImplemented
        return same(self.payload, other.payload)

    def __hash__(self) -> int:
        return hash(self.signature)

    def __repr__(self) -> str:
        return self.signature


@dataclass(frozen=True, repr=False, eq=False)
class DenseBias(Bias):
    """Any floating-point array that broadcasts to (B, N, T, S), added to the scores.

    Its gradient is exact, or the backend refuses the problem. Entries of ``-inf`` mask.
    """

    bias: Any

    def __post_init__(self) -> None:
        _check("DenseBias(bias)", self.bias, (0, 1, 2, 3, 4), "broadcastable to (B, N, T, S)")

    @property
    def signature(self) -> str:
        return f"DenseBias({_described(self.bias)})"

    @property
    def payload(self) -> Any:
        return self.bias

    def map(self, change: Callable[[str, Any], Any]) -> Bias:
        return DenseBias(change("bias", self.bias))


@dataclass(frozen=True, repr=False, eq=False)
class Alibi(Bias):
    """Attention with linear biases: adds ``-slopes[n] * abs(t + S - T - j)``.

    `slopes`: (N,) or (B, N) floating point. Source: Press, Smith and Lewis, *Train Short, Test
    Long* (arXiv 2108.12409).
    """

    slopes: Any

    def __post_init__(self) -> None:
        _check("Alibi(slopes)", self.slopes, (1, 2), "(N,) or (B, N)")

    @property
    def signature(self) -> str:
        return f"Alibi({_described(self.slopes)})"

    @property
    def payload(self) -> Any:
        return self.slopes

    def map(self, change: Callable[[str, Any], Any]) -> Bias:
        return Alibi(change("slopes", self.slopes))


def _described(array: Any) -> str:
    """Return shape and dtype; programs of JAX put other things in the place of arrays."""
    kind = dtype_name(array) if hasattr(array, "dtype") else type(array).__name__
    return f"{describe(array)}, {kind}"


def _check(what: str, array: Any, ranks: tuple[int, ...], shape: str) -> None:
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        raise InvalidProblem(
            f"got {what} of type {type(array).__name__}, expected an array {shape}."
        )
    if "float" not in dtype_name(array):
        raise InvalidProblem(
            f"got {what} of dtype {dtype_name(array)}, expected floating point {shape}; "
            "pass boolean masks as mask=Dense(...)."
        )
    if len(shape_of(array)) not in ranks:
        raise InvalidProblem(f"got {what} of shape {shape_of(array)}, expected {shape}.")

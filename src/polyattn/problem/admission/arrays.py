"""What admission is told of arrays, and of the front-end that hands them over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from polyattn.errors import InvalidProblem
from polyattn.masks import Mask

__all__ = ["ArrayFacts", "Front", "Other", "Surroundings", "described", "kind_of", "no_array"]


@dataclass(frozen=True, slots=True)
class ArrayFacts:
    """An array without its contents; stands in for one in masks and biases, too.

    `dtype`: bare, as ``float32``. `device`: with its index, as ``cuda:0``. `form`: ``strided``,
    ``nested`` or ``sparse``. `unit_stride`: the entries of the last dim lie side by side.
    """

    shape: tuple[int, ...]
    dtype: str
    device: str = "cpu"
    grad: bool = False
    unit_stride: bool = True
    form: str = "strided"

    @property
    def device_type(self) -> str:
        """The device without its index."""
        return self.device.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.shape} {self.dtype} on {self.device}"


@dataclass(frozen=True, slots=True)
class Other:
    """Something that is no array of the front-end's framework."""

    type_name: str
    is_array: bool = False  # of another library, or an array where none is expected
    hint: str = ""


class Surroundings(NamedTuple):
    """What a call takes from around it.

    `cast`: the dtype that autocast turns float inputs into, which may be the query's, or None.
    `trains`: gradients are recorded. `deterministic`: what holds where the call does not say.
    `spread`: the mesh axes over which the sequence lies, whose rows the arrays are. `higher`:
    function transforms ask for forward mode, or for derivatives of derivatives.
    """

    cast: str | None = None
    arch: str | None = None
    trains: bool = False
    deterministic: bool = False
    compiled: bool = False
    spread: str | None = None
    higher: bool = False


class Front(Protocol):
    """A front-end: what it calls an array, and how its arrays are seen."""

    framework: str
    array_type: str  # as errors name it: "torch.Tensor"

    def facts(self, x: Any) -> ArrayFacts | Other:
        """Return what is to be known of an argument."""

    def surroundings(self, query: ArrayFacts) -> Surroundings:
        """Return what a call with this query takes from around it."""

    def bind(self, mask: Mask, device: str) -> Mask:
        """Return `mask` with its arrays as the front-end's own, on the query's device."""

    def known(self, payload: Any) -> Any:
        """Return an array of a bound mask where reading its entries costs nothing, else None."""

    def arange(self, size: int) -> Any:
        """Count from 0 in the front-end's arrays."""


def kind_of(x: Any, front: Front) -> Other:
    """Say of what type an argument is that is not of the type asked for."""
    if isinstance(x, Other):
        return x
    if isinstance(x, ArrayFacts):
        return Other(front.array_type.rpartition(".")[2], True)
    found = front.facts(x)
    is_array = isinstance(found, ArrayFacts) or found.is_array
    return Other(type(x).__name__, is_array)


def described(x: Any, front: Front) -> str:
    """Describe an argument for an error: shape, dtype and device, or its type."""
    found = x if isinstance(x, (ArrayFacts, Other)) else front.facts(x)
    return str(found) if isinstance(found, ArrayFacts) else f"of type {found.type_name}"


def no_array(what: str, found: Other, front: Front) -> InvalidProblem:
    """Return the error about an argument that is no array of the front-end's."""
    hint = f"; {found.hint}" if found.hint else ""
    return InvalidProblem(
        f"got {what} of type {found.type_name}, expected a {front.array_type}{hint}."
    )

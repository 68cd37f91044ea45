"""Whether the arrays of masks and biases fit the call: shapes, devices, known entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from polyattn.errors import InvalidProblem
from polyattn.masks import Mask, Or, Packed
from polyattn.masks.biases import Alibi, Bias
from polyattn.masks.fits import broadcasts, misfit
from polyattn.masks.needs import Call
from polyattn.masks.payload import shape_of
from polyattn.problem.admission.arrays import ArrayFacts, Front

__all__ = ["Lengths", "check_bias_shape", "check_devices", "check_mask", "packed_sequences"]


class Lengths(Protocol):
    """What masks and biases are checked against: a Problem, or symbolic sizes."""

    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def q_len(self) -> int: ...
    @property
    def kv_len(self) -> int: ...
    @property
    def layout(self) -> str: ...


def packed_sequences(mask: Mask | None) -> int:
    """Return how many sequences the mask of a packed call names.

    >>> from polyattn.masks import Padding
    >>> packed_sequences(Packed([0, 2, 5]) & Padding(kv_lengths=[1, 3]))
    2
    """
    packed = (
        [leaf for leaf in mask.leaves() if isinstance(leaf, Packed)] if mask is not None else []
    )
    if mask is None or len(packed) != 1 or _is_under_or(mask):
        raise InvalidProblem(
            f'got layout="packed" with mask={mask!r}, expected one Packed(cu_q, cu_kv), '
            "joined with other masks by &."
        )
    return shape_of(packed[0].cu_q)[0] - 1


def _is_under_or(mask: Mask) -> bool:
    return any("Packed" in part.kinds and part.parts for part in mask.parts) or isinstance(mask, Or)


def check_devices(mask: Mask, device: str, front: Front) -> None:
    """Raise :class:`InvalidProblem` where an array of the mask is on another accelerator."""

    def check(name: str, payload: Any) -> Any:
        found = None if payload is None else front.facts(payload)
        if not isinstance(found, ArrayFacts) or found.device == device:
            return payload  # lists, and arrays of other libraries, are copied
        if found.device_type not in ("cpu", "meta"):
            raise InvalidProblem(
                f"got a mask whose {name} is on {found.device}, expected {device}, where the "
                "query is; move it there."
            )
        return payload

    if not mask.is_static:
        mask.map(check)


def check_mask(
    mask: Mask, lengths: Lengths, known: Callable[[Any], Any], arange: Callable[[int], Any]
) -> None:
    """Raise :class:`InvalidProblem` where an array of the mask does not fit the call.

    `known` returns a payload as an array, or None where reading its entries is not possible or
    not worth its price; `arange` counts from 0 in the same library.
    """
    packed = lengths.layout == "packed"
    leaves = mask.leaves()
    if packed != any(isinstance(leaf, Packed) for leaf in leaves):
        raise InvalidProblem(
            f'got layout={lengths.layout!r} with mask={mask!r}, expected layout="packed" and '
            "Packed(cu_q, cu_kv) joined with & together, or neither."
        )
    call = Call(lengths.batch, lengths.heads, lengths.q_len, lengths.kv_len, packed, known, arange)
    for leaf in leaves:
        if packed and not leaf.packs:
            raise InvalidProblem(
                f"got {leaf!r} in a packed problem, expected masks that have a meaning within each "
                "sequence; use Segments, or unpack."
            )
        leaf.check(call)


def _no_sequences(bias: Bias) -> NoReturn:
    raise InvalidProblem(
        f"got bias={bias!r} in a packed problem, expected none; pass one row in the layout BTNH, "
        "with mask=Segments(...) in place of Packed, or unpack."
    )


def check_bias_shape(bias: Bias, lengths: Lengths) -> None:
    """Raise :class:`InvalidProblem` where the bias does not broadcast to the scores."""
    full = (lengths.batch, lengths.heads, lengths.q_len, lengths.kv_len)
    packed, got = lengths.layout == "packed", shape_of(bias.payload)
    if not isinstance(bias, Alibi):
        if packed:
            _no_sequences(bias)
        broadcasts(bias, got, full)
        return
    if got not in (full[1:2], full[:2], (1, full[1])):
        misfit(bias, got, f"({full[1]},) or {full[:2]} slopes")
    if packed:
        _no_sequences(bias)

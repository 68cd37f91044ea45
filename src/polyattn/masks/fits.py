"""What the checks of masks and biases share: whether one array fits the call, and the errors."""

from __future__ import annotations

from typing import Any, NoReturn

from polyattn.errors import InvalidProblem
from polyattn.masks.needs import Call
from polyattn.masks.payload import shape_of

__all__ = ["broadcasts", "ends", "fits", "misfit"]

_FEW = 256


def fits(owner: Any, lengths: Any, call: Call, most: int, what: str = "length") -> None:
    """Check lengths, one for each batch entry or sequence, of 0 to `most`; None is no lengths.

    `what` one of them is called in an error.
    """
    if lengths is None:
        return
    shape = (call.batch,)
    if shape_of(lengths) != shape:
        misfit(owner, shape_of(lengths), f"{shape}, one {what} for each batch entry or sequence")
    read = call.known(lengths)
    if read is not None and not call.packed and read.shape[0]:
        low, high = ends(read)
        if low < 0 or high > most:
            raise InvalidProblem(
                f"got {owner!r} with {what}s from {low} to {high}, expected 0 to {most}."
            )


def ends(read: Any) -> tuple[int, int]:
    """Return the smallest and the largest entry; a few are compared sooner than two kernels run."""
    if read.shape[0] <= _FEW:
        try:
            entries = read.tolist()
        except RuntimeError:  # torch 2.9 lists nothing inside transforms of torch.func
            pass
        else:
            return min(entries), max(entries)
    return int(read.min()), int(read.max())


def broadcasts(owner: Any, got: tuple[int, ...], full: tuple[int, ...]) -> None:
    """Check that a shape broadcasts to `full`, which is (B, N, T, S)."""
    padded = (1,) * (4 - len(got)) + got
    if len(got) > 4 or any(g not in (1, f) for g, f in zip(padded, full, strict=True)):
        misfit(owner, got, f"broadcastable to (B, N, T, S) = {full}")


def misfit(owner: Any, got: Any, expected: str) -> NoReturn:
    """Raise the error of an array that does not fit the call."""
    raise InvalidProblem(f"got {owner!r} with an array of shape {got}, expected {expected}.")

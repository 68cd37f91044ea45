"""The arrays that masks and biases carry, of any framework, without importing one.

A payload is an array (anything with ``shape`` and ``dtype``) or nested tuples of numbers.
"""

from __future__ import annotations

from typing import Any

from polyattn.errors import InvalidProblem

__all__ = ["at", "describe", "dtype_name", "integers", "same", "shape_of", "store"]


def shape_of(payload: Any) -> tuple[int, ...]:
    """Return the shape of an array or of nested tuples.

    >>> shape_of(((1, 2, 3), (4, 5, 6)))
    (2, 3)
    """
    if isinstance(payload, tuple):
        return (len(payload), *(shape_of(payload[0]) if payload else ()))
    if isinstance(payload, int):  # a compiler that keeps it symbolic cannot look further
        return ()
    shape = getattr(payload, "shape", None)
    return () if shape is None else tuple(shape)


def dtype_name(payload: Any) -> str:
    """Return the bare dtype name of an array, e.g. ``int32`` (also of ``torch.int32``)."""
    name = str(payload.dtype)
    # NumPy writes int32 of another byte order as ">i4"
    return str(payload.dtype.name) if name[0] in "<>" else name.rpartition(".")[2]


def at(payload: Any, *index: Any) -> Any:
    """Return the entries of `payload` at integer (array) coordinates."""
    if isinstance(payload, tuple):
        for i in index:
            payload = payload[i]
        return payload
    return payload[index]


def describe(payload: Any) -> str:
    """Return the shape as ``4x128``, or ``None``: what a signature shows of an array."""
    if payload is None:
        return "None"
    shape = shape_of(payload)
    return str(shape[0]) if len(shape) == 1 else "x".join(map(str, shape))


def same(a: Any, b: Any) -> bool:
    """Compare two field values; arrays by shape, dtype and contents."""
    if a is b:
        return True
    if isinstance(a, tuple) or isinstance(b, tuple) or a is None or b is None:
        return type(a) is type(b) and bool(a == b)
    if hasattr(a, "shape") and hasattr(b, "shape"):
        alike = tuple(a.shape) == tuple(b.shape) and str(a.dtype) == str(b.dtype)
        return alike and bool((a == b).all())
    return type(a) is type(b) and bool(a == b)


def integers(
    what: str, payload: Any, ranks: tuple[int, ...], shape: str, boolean: bool = False
) -> Any:
    """Check that `payload` holds integers (or booleans) of an allowed rank; lists become tuples.

    NumPy's of another byte order become the machine's, which is the one that every front reads.
    """
    if payload is None:
        return None
    if _is_masked(payload):
        raise InvalidProblem(
            f"got {what} of type MaskedArray, whose own mask nothing reads, expected a plain array "
            f"{shape}; fill it with filled(...)."
        )
    if not (hasattr(payload, "shape") and hasattr(payload, "dtype")):
        payload = _tuples(what, payload, boolean, shape)
    elif boolean != (dtype_name(payload) in ("bool", "bool_")) or (
        not boolean and not dtype_name(payload).startswith(("int", "uint"))
    ):
        expected = "booleans (True = attend)" if boolean else "integers"
        hint = " Pass additive float masks as bias=DenseBias(...)." if boolean else ""
        raise InvalidProblem(
            f"got {what} of dtype {dtype_name(payload)}, expected {expected} {shape}.{hint}"
        )
    elif str(payload.dtype)[0] in "<>":
        payload = payload.astype(payload.dtype.newbyteorder("="))
    if len(shape_of(payload)) not in ranks:
        raise InvalidProblem(f"got {what} of shape {shape_of(payload)}, expected {shape}.")
    return payload


def _is_masked(payload: Any) -> bool:
    """Whether it is an array of ``numpy.ma``; NumPy is not imported for that."""
    return any(cls.__name__ == "MaskedArray" for cls in type(payload).__mro__)


def store(value: Any, name: str, field: Any) -> None:
    """Set a field of a frozen value while it is being made."""
    object.__setattr__(value, name, field)


def _tuples(what: str, value: Any, boolean: bool, shape: str) -> Any:
    if isinstance(value, (list, tuple)):
        rows = tuple(_tuples(what, entry, boolean, shape) for entry in value)
        if len({shape_of(row) for row in rows}) > 1:
            raise InvalidProblem(f"got {what} with rows of different lengths, expected {shape}.")
        return rows
    if type(value) is not (bool if boolean else int):
        kind = "booleans" if boolean else "integers"
        raise InvalidProblem(
            f"got {what} holding {value!r} ({type(value).__name__}), expected {kind} {shape}."
        )
    return value

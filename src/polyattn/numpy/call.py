"""One call on NumPy arrays: checked, turned into pointers, run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from polyattn import fit
from polyattn.biases import Alibi, Bias
from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.native import module
from polyattn.native.program import Program, arrays_of, terms
from polyattn.numpy.arrays import (
    DTYPES,
    Array,
    bias_argument,
    described,
    memory,
    readable,
    rows,
    slopes_argument,
    with_dense_rows,
)
from polyattn.numpy.masks import Library, bind_mask, check_mask, program_of
from polyattn.problem import LAYOUTS, MaskFacts, Problem
from polyattn.processor import processors_usable
from polyattn.simplify import simplify

__all__ = ["attend"]

_MOST_THREADS = 1024  # the kernels' own limit


class _Call(NamedTuple):
    """A checked call. Its arrays are readable; `slopes` and `sinks` are float32."""

    problem: Problem
    q: Array
    k: Array
    v: Array
    mask: Mask | None
    bias: Array | None
    slopes: Array | None
    sinks: Array | None
    threads: int


def attend(
    q: Any, k: Any, v: Any, *, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any,
    layout: Any, return_lse: bool, threads: Any,
) -> Any:  # fmt: skip
    """Compute what :func:`polyattn.numpy_attention` says, with its arguments."""
    module.load()
    problem, mask = _problem(q, k, v, mask, bias, scale, softcap, sinks, layout)
    slopes = _float32(bias.payload) if isinstance(bias, Alibi) else None
    dense = bias.payload if bias is not None and slopes is None else None
    if dense is not None:
        dense = readable(dense) if dense.dtype.name in DTYPES else _float32(dense)
    call = _Call(
        problem, with_dense_rows(q), with_dense_rows(k), with_dense_rows(v), mask, dense, slopes,
        None if sinks is None else _float32(sinks), _checked_threads(threads),
    )  # fmt: skip
    out, lse = _run(call, bool(return_lse))
    return (out, lse) if return_lse else out


def _run(call: _Call, wants_lse: bool) -> tuple[Array, Array | None]:
    """Run the kernel; `call` and `arrays` hold whatever a pointer is taken of."""
    p, layout = call.problem, call.problem.layout
    out = np.empty((*call.q.shape[:-1], p.value_dim), dtype=call.q.dtype)
    shape = (p.heads, p.q_len) if layout == "packed" else (p.batch, p.heads, p.q_len)
    lse = np.empty(shape, dtype=np.float32) if wants_lse else None
    program = Program((), ()) if call.mask is None else program_of(call.mask, p)
    library = Library(p.kv_len)
    arrays = arrays_of(program, library)
    found, packed = terms(program.codes, arrays, library)
    # a packed call whose mask became dense is one sequence, of all tokens
    batch = 1 if layout == "packed" and packed is None else p.batch
    sinks, isa = call.sinks, module.isa_index()
    try:
        module.load().forward(
            isa, call.threads, DTYPES[p.dtype],
            (batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.value_dim),
            p.head_dim**-0.5 if p.scale is None else p.scale, p.softcap or 0.0,
            *(described(x, layout) for x in (call.q, call.k, call.v, out)),
            None if lse is None else rows(lse), found, packed,
            None if call.bias is None else bias_argument(call.bias),
            None if call.slopes is None else slopes_argument(call.slopes),
            None if sinks is None else (*memory(sinks), math.prod(sinks.shape[1:])), None,
        )  # fmt: skip
    except ValueError as error:
        raise InvalidProblem(f"got {p}, which the kernels refuse: {error}.") from error
    return out, lse


def _problem(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, layout: Any
) -> tuple[Problem, Mask | None]:
    """Check all but the threads; return the call's facts, and its mask with NumPy arrays."""
    _check_inputs(q, k, v, layout)
    b, t, n, s, kv_heads, h, value_dim = fit.lengths_of(q.shape, k.shape, v.shape, layout)
    _check_holders(mask, bias)
    if layout == "packed":
        b = fit.packed_sequences(mask)
    else:
        mask = simplify(mask, t, s)
    if mask is not None:
        mask = bind_mask(mask)
    if sinks is not None:
        _check_array("sinks", sinks)
        _check_float("sinks", sinks)
        fit.check_sinks_shape(sinks.shape, n)
    problem = Problem(
        batch=b, q_len=t, kv_len=s, heads=n, kv_heads=kv_heads, head_dim=h, value_dim=value_dim,
        dtype=q.dtype.name, framework="numpy", layout=layout, mask=MaskFacts.of(mask),
        bias=None if bias is None else bias.signature, scale=_number("scale", scale),
        softcap=_number("softcap", softcap),
        sinks=0 if sinks is None else math.prod(sinks.shape[1:]),
    )  # fmt: skip
    if mask is not None:
        check_mask(mask, problem)
    if bias is not None:
        fit.check_bias_shape(bias, problem)
    return problem, mask


def _check_inputs(q: Any, k: Any, v: Any, layout: Any) -> None:
    if layout not in LAYOUTS:
        raise InvalidProblem(f"got layout={layout!r}, expected one of {', '.join(LAYOUTS)}.")
    rank = 3 if layout == "packed" else 4
    letters = "(total, N, H)" if layout == "packed" else f"({', '.join(layout)})"
    for name, x in (("query", q), ("key", k), ("value", v)):
        _check_array(name, x)
        if x.ndim != rank:
            raise InvalidProblem(
                f"got {name} of shape {x.shape}, expected {rank} dims {letters} for "
                f"layout={layout!r}."
            )
    dtype = q.dtype.name
    if dtype not in DTYPES:
        hint = (
            "cast with astype(numpy.float32), or compute in float64 with polyattn.torch.attention"
            if dtype == "float64"
            else "cast it"
        )
        raise InvalidProblem(
            f"got query of dtype {dtype}, expected one of {', '.join(DTYPES)}; {hint}."
        )
    for name, x in (("key", k), ("value", v)):
        if x.dtype.name != dtype:
            raise InvalidProblem(
                f"got {name} {x.dtype.name} with query {dtype}, expected one dtype; cast it."
            )


def _check_array(name: str, x: Any) -> None:
    if isinstance(x, np.ma.MaskedArray):
        raise InvalidProblem(
            f"got {name} as a masked array, whose mask means nothing here, expected a plain one; "
            "say what may be seen by mask=polyattn.Dense(...)."
        )
    if not isinstance(x, np.ndarray):
        library = type(x).__module__.partition(".")[0]
        hint = (
            "call polyattn.torch.attention with tensors"
            if library == "torch"
            else "make it one with numpy.asarray, on the CPU"
        )
        raise InvalidProblem(
            f"got {name} of type {library}.{type(x).__name__}, expected a numpy.ndarray; {hint}."
        )


def _check_float(name: str, x: Array) -> None:
    if "float" not in x.dtype.name:
        raise InvalidProblem(f"got {name} of dtype {x.dtype.name}, expected floating point.")


def _check_holders(mask: Any, bias: Any) -> None:
    """Check that masks and biases are those of this package, and that biases hold arrays."""
    kinds: Sequence[tuple[str, Any, type, str]] = (
        ("mask", mask, Mask, "Dense"), ("bias", bias, Bias, "DenseBias"),
    )  # fmt: skip
    for name, x, kind, wrapper in kinds:
        if x is not None and not isinstance(x, kind):
            hint = f"wrap it as polyattn.{wrapper}({name})"
            if not isinstance(x, np.ndarray):
                hint = f"see polyattn.{kind.__module__.split('.')[1]}"
            raise InvalidProblem(
                f"got {name} of type {type(x).__name__}, expected a {kind.__name__}; {hint}."
            )
    if bias is not None:
        _check_array(repr(bias), bias.payload)


def _float32(x: Array) -> Array:
    return np.ascontiguousarray(x, dtype=np.float32)


def _checked_threads(threads: Any) -> int:
    if threads is None:
        return min(processors_usable(), _MOST_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)):
        raise InvalidProblem(f"got threads={threads!r}, expected an integer, or None for all.")
    if not 1 <= threads <= _MOST_THREADS:
        raise InvalidProblem(f"got threads={threads}, expected 1 to {_MOST_THREADS}.")
    return int(threads)


def _number(name: str, number: Any) -> float | None:
    if number is None:
        return None
    if isinstance(number, np.number) and not isinstance(number, np.complexfloating):
        number = number.item()
    fit.check_number(name, number)
    return float(number)

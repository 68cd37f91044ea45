"""One call on NumPy arrays: checked, turned into pointers, run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.masks.biases import Alibi
from polyattn.native import module
from polyattn.native.forms import isa_for
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
from polyattn.numpy.masks import Library, bind_mask, program_of
from polyattn.problem import Problem
from polyattn.problem.admission import ArrayFacts, Other, Surroundings, admit, truth
from polyattn.problem.processor import processors_usable

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
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any,
    bias: Any,
    scale: Any,
    softcap: Any,
    sinks: Any,
    layout: Any,
    return_lse: bool,
    threads: Any,
) -> Any:
    """Compute what :func:`polyattn.numpy_attention` says, with its arguments."""
    module.load()
    problem, mask = _problem(q, k, v, mask, bias, scale, softcap, sinks, layout)
    return_lse = return_lse is not None and truth("return_lse", return_lse)
    slopes = _float32(bias.payload) if isinstance(bias, Alibi) else None
    dense = bias.payload if bias is not None and slopes is None else None
    if dense is not None:
        dense = readable(dense) if dense.dtype.name in DTYPES else _float32(dense)
    call = _Call(
        problem,
        with_dense_rows(q),
        with_dense_rows(k),
        with_dense_rows(v),
        mask,
        dense,
        slopes,
        None if sinks is None else _float32(sinks),
        _checked_threads(threads),
    )
    out, lse = _run(call, return_lse)
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
    sequences = batch if layout == "packed" else 1
    sinks = call.sinks
    isa = isa_for(DTYPES[p.dtype], p.q_len, p.heads, p.kv_heads, sequences)
    try:
        module.load().forward(
            isa, call.threads, DTYPES[p.dtype],
            (batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.value_dim),
            p.head_dim**-0.5 if p.scale is None else p.scale, _softcap(p.softcap),
            *(described(x, layout) for x in (call.q, call.k, call.v, out)),
            None if lse is None else rows(lse), found, packed,
            None if call.bias is None else bias_argument(call.bias),
            None if call.slopes is None else slopes_argument(call.slopes),
            None if sinks is None else (*memory(sinks), math.prod(sinks.shape[1:])), None, None,
        )  # fmt: skip
    except ValueError as error:
        raise InvalidProblem(f"got {p}, which the kernels refuse: {error}.") from error
    return out, lse


def _problem(
    q: Any, k: Any, v: Any, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, layout: Any
) -> tuple[Problem, Mask | None]:
    """Check all but the threads; return the call's facts, and its mask with NumPy arrays."""
    problem, bound, _ = admit(
        q, k, v, front=FRONT, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks,
        layout=layout,
    )  # fmt: skip
    if problem.dtype not in DTYPES:
        raise InvalidProblem(
            f"got query of dtype {problem.dtype}, expected one of {', '.join(DTYPES)}; cast with "
            "astype(numpy.float32), or compute in float64 with polyattn.torch.attention."
        )
    return problem, bound


class NumpyFront:
    """NumPy arrays, for :class:`polyattn.problem.admission.Front`."""

    framework = "numpy"
    array_type = "numpy.ndarray"

    def facts(self, x: Any) -> ArrayFacts | Other:
        if isinstance(x, np.ma.MaskedArray):
            hint = (
                "the mask of a masked array means nothing here: make it a plain array, and say "
                "what may be seen by mask=polyattn.Dense(...)"
            )
            return Other("MaskedArray", True, hint)
        if isinstance(x, np.ndarray):
            return ArrayFacts(x.shape, x.dtype.name)
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        hint = "make it one with numpy.asarray, on the CPU" if is_array else ""
        if type(x).__module__.partition(".")[0] == "torch":
            hint = "call polyattn.torch.attention with tensors"
        return Other(type(x).__name__, is_array, hint)

    def surroundings(self, query: ArrayFacts) -> Surroundings:
        return Surroundings()

    def bind(self, mask: Mask, device: str) -> Mask:
        return bind_mask(mask)

    def known(self, payload: Any) -> Any:
        return payload

    def arange(self, size: int) -> Any:
        return np.arange(size)


FRONT = NumpyFront()


def _softcap(softcap: float | None) -> float:
    """Return what the kernels take: a cap that float32 rounds to 0 would be none to them."""
    return 0.0 if softcap is None else max(softcap, float(np.finfo(np.float32).tiny))


def _float32(x: Array) -> Array:
    """Return `x` as float32; a finite number stays finite, for an infinite one masks."""
    if x.dtype.itemsize > 4:
        most = np.finfo(np.float32).max
        x = np.where(np.isinf(x), x, np.clip(x, -most, most))
    return np.ascontiguousarray(x, dtype=np.float32)


def _checked_threads(threads: Any) -> int:
    if threads is None:
        return min(processors_usable(), _MOST_THREADS)
    if isinstance(threads, bool) or not isinstance(threads, (int, np.integer)):
        raise InvalidProblem(f"got threads={threads!r}, expected an integer, or None for all.")
    if not 1 <= threads <= _MOST_THREADS:
        raise InvalidProblem(f"got threads={threads}, expected 1 to {_MOST_THREADS}.")
    return int(threads)

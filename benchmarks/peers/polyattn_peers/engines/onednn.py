"""oneDNN: its pattern of attention in the Graph API, as Intel ships it on PyPI (a CPU of SYCL).

Called in C, by numbers of ``dnnl_graph_types.h``: the package has no Python of its own.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from polyattn_peers.call import Call, Prepared

_CPU = 1
_TYPES = {"float16": 1, "bfloat16": 2, "float32": 3}
_ADD, _MATMUL, _MULTIPLY, _SOFTMAX = 2, 39, 46, 64
_AXIS, _TRANSPOSE_B, _MODE = 0x30, 0x66, 0x84
_ANY_LAYOUT, _STRIDED, _VARIABLE, _FUSION, _IN_ORDER = 1, 2, 1, 1, 1

# of the environment, in the order in which they ask for each other
_LIBRARIES = (
    "libtbb.so.12", "libintlc.so.5", "libirng.so", "libimf.so", "libsvml.so", "libhwloc.so.15",
    "libumf.so.1", "libur_loader.so.0", "libsycl.so.9", "libdnnl.so.3",
)  # fmt: skip


class _Logical(ctypes.Structure):
    """``dnnl_graph_logical_tensor_t``."""

    _fields_ = (
        ("id", ctypes.c_size_t), ("ndims", ctypes.c_int), ("dims", ctypes.c_int64 * 12),
        ("data_type", ctypes.c_int), ("property", ctypes.c_int), ("layout_type", ctypes.c_int),
        ("strides", ctypes.c_int64 * 12),
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"onednn": version("onednn")}


@functools.lru_cache(maxsize=1)
def _library() -> ctypes.CDLL:
    folder = Path(sys.prefix) / "lib"
    os.environ.setdefault("OCL_ICD_FILENAMES", str(folder / "libintelocl.so"))
    os.environ.setdefault("ONEAPI_DEVICE_SELECTOR", "opencl:cpu")
    for name in _LIBRARIES:
        found = ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    return found


def _do(name: str, *given: Any) -> None:
    """Call a function of the library; an answer other than 0 is an error."""
    answer = getattr(_library(), f"dnnl_{name}")(*given)
    if answer:
        raise RuntimeError(f"dnnl_{name} answers with {answer}")


def _new(name: str, *given: Any) -> ctypes.c_void_p:
    """Return what a function makes, a handle."""
    handle = ctypes.c_void_p()
    _do(name, ctypes.byref(handle), *given)
    return handle


def _tensor(number: int, kind: int, shape: Sequence[int], strides: Sequence[int] = ()) -> _Logical:
    """Return a logical tensor; without `strides`, one whose layout the library chooses."""
    logical = _Logical(number, len(shape), tuple(shape), kind, _VARIABLE, _ANY_LAYOUT)
    if strides:
        logical.layout_type, logical.strides = _STRIDED, tuple(strides)
    return logical


class _Pattern:
    """A graph, op by op, and the tensors between."""

    def __init__(self) -> None:
        self.graph = _new("graph_graph_create", _CPU)
        self.count = 0

    def op(self, kind: int, inputs: Sequence[_Logical], out: _Logical) -> ctypes.c_void_p:
        made = _new("graph_op_create", ctypes.c_size_t(self.count), kind, b"%d" % self.count)
        for one in inputs:
            _do("graph_op_add_input", made, ctypes.byref(one))
        _do("graph_op_add_output", made, ctypes.byref(out))
        self.count += 1
        return made

    def compiled(
        self, inputs: Sequence[_Logical], out: _Logical, engine: Any
    ) -> tuple[ctypes.c_void_p, list[int]]:
        """Return the one partition, compiled, and the numbers of its inputs in their order."""
        _do("graph_graph_finalize", self.graph)
        _do("graph_graph_filter", self.graph, _FUSION)
        count = ctypes.c_size_t()
        _do("graph_graph_get_partition_num", self.graph, ctypes.byref(count))
        if count.value != 1:
            raise RuntimeError(f"it cuts attention into {count.value} partitions")
        parts = (ctypes.c_void_p * 1)()
        _do("graph_graph_get_partitions", self.graph, ctypes.c_size_t(1), parts)
        part = ctypes.c_void_p(parts[0])
        known = ctypes.c_uint8()
        _do("graph_partition_is_supported", part, ctypes.byref(known))
        if not known.value:
            raise RuntimeError("it has no kernel for this pattern")
        ports = (_Logical * len(inputs))()
        _do("graph_partition_get_input_ports", part, ctypes.c_size_t(len(inputs)), ports)
        by_number = {one.id: one for one in inputs}
        order = [port.id for port in ports]
        asked = (ctypes.POINTER(_Logical) * len(order))(
            *(ctypes.pointer(by_number[number]) for number in order)
        )
        given = (ctypes.POINTER(_Logical) * 1)(ctypes.pointer(out))
        made = _new("graph_compiled_partition_create", part)
        _do(
            "graph_partition_compile", part, made, ctypes.c_size_t(len(order)), asked,
            ctypes.c_size_t(1), given, engine,
        )  # fmt: skip
        return made, order


def _rows(call: Call, array: np.ndarray) -> np.ndarray:
    """Return what is shaped as q with heads before rows, those of a group in a dim of their own."""
    if call.folds:
        return array.reshape(call.folded)
    view = array if call.layout == "BNTH" else array.swapaxes(1, 2)
    if call.group == 1:
        return view
    batch, heads, *rest = view.shape
    steps = (view.strides[0], view.strides[1] * call.group, *view.strides[1:])
    shape = (batch, heads // call.group, call.group, *rest)
    return np.lib.stride_tricks.as_strided(view, shape, steps)


def _keys(call: Call, array: np.ndarray) -> np.ndarray:
    """Return what is shaped as k likewise."""
    view = array if call.layout == "BNTH" else array.swapaxes(1, 2)
    return view if call.folds or call.group == 1 else view[:, :, None]


def _describe(number: int, kind: str, array: np.ndarray) -> _Logical:
    steps = tuple(step // array.itemsize for step in array.strides)
    return _tensor(number, _TYPES[kind], array.shape, steps)


def _joined(call: Call, given: Sequence[_Logical], last: _Logical) -> _Pattern:
    """Return MatMul, Multiply, Add where there is a mask, SoftMax and MatMul; scores in float32."""
    q, k = given[:2]
    shape = (*q.dims[: q.ndims - 1], k.dims[k.ndims - 2])
    between = [_tensor(10 + i, _TYPES["float32"], shape) for i in range(3)]
    weights = _tensor(20, _TYPES[call.dtype], shape)
    pattern = _Pattern()
    first = pattern.op(_MATMUL, [q, k], between[0])
    yes, one = ctypes.c_uint8(1), ctypes.c_size_t(1)
    _do("graph_op_set_attr_bool", first, _TRANSPOSE_B, ctypes.byref(yes), one)
    ops = [first, pattern.op(_MULTIPLY, [between[0], given[3]], between[1])]
    if len(given) > 4:
        ops.append(pattern.op(_ADD, [between[1], given[4]], between[2]))
    soft = pattern.op(_SOFTMAX, [between[2 if len(given) > 4 else 1]], weights)
    axis, mode = ctypes.c_int64(-1), b"inf_as_zero"
    _do("graph_op_set_attr_s64", soft, _AXIS, ctypes.byref(axis), one)
    _do("graph_op_set_attr_str", soft, _MODE, mode, ctypes.c_size_t(len(mode)))
    ops += [soft, pattern.op(_MATMUL, [weights, given[2]], last)]
    for op in ops:
        _do("graph_add_op", pattern.graph, op)
    return pattern


def _inputs(call: Call) -> list[tuple[str, np.ndarray]]:
    """Return q, k, v, the scale, and the mask as numbers to add, each with its type."""
    q, k, v = _rows(call, call.q), _keys(call, call.k), _keys(call, call.v)
    scale = np.full([1] * q.ndim, call.scale, np.float32)
    found = [(call.dtype, q), (call.dtype, k), (call.dtype, v), ("float32", scale)]
    if (added := call.added()) is not None:
        found.append(("float32", added if q.ndim == 4 else added[:, :, None]))
    return found


def prepare(call: Call) -> Prepared:
    """Compile attention as one partition, and bind the arrays."""
    # its threads cannot be counted otherwise; seen when the library is loaded
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: call.threads])
    engine = _new("engine_create", _CPU, ctypes.c_size_t(0))
    stream = _new("stream_create", engine, _IN_ORDER)
    found = np.empty_like(call.q)
    held, out = _inputs(call), _rows(call, found)
    given = [_describe(number, kind, array) for number, (kind, array) in enumerate(held)]
    last = _describe(9, call.dtype, out)
    compiled, order = _joined(call, given, last).compiled(given, last, engine)

    def handle(logical: _Logical, array: np.ndarray) -> int | None:
        place = ctypes.c_void_p(array.ctypes.data)
        return _new("graph_tensor_create", ctypes.byref(logical), engine, place).value

    ins = (ctypes.c_void_p * len(order))(*(handle(given[i], held[i][1]) for i in order))
    outs = (ctypes.c_void_p * 1)(handle(last, out))
    library, sizes = _library(), (ctypes.c_size_t(len(order)), ctypes.c_size_t(1))

    def run() -> np.ndarray:
        _ = held  # the arrays live as long as what reads them
        failed = library.dnnl_graph_compiled_partition_execute(
            compiled, stream, sizes[0], ins, sizes[1], outs
        )
        if failed or library.dnnl_stream_wait(stream):
            raise RuntimeError(f"dnnl_graph_compiled_partition_execute answers with {failed}")
        return found

    return Prepared(run, lambda found: found)

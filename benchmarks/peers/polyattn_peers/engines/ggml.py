"""ggml: its operator ``ggml_flash_attn_ext``, which llama.cpp runs; queries and result in float32.

Keys and values are in the type of the call, as a cache of llama.cpp holds them. Built from source
when it is installed, for the processor that it is built on.
"""

from __future__ import annotations

import ctypes
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np

from polyattn_peers.call import Call, Prepared

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its bindings have escapes that newer Pythons warn of
    import ggml

_TYPES = {
    "float32": ggml.GGML_TYPE_F32, "float16": ggml.GGML_TYPE_F16, "bfloat16": ggml.GGML_TYPE_BF16,
}  # fmt: skip
_MEMORY = 1 << 20  # for what describes tensors: their numbers lie in NumPy's memory


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"ggml": ggml.ggml_version().decode(), "ggml-python": version("ggml-python")}


def _floats(array: np.ndarray) -> np.ndarray:
    """Return float32 numbers; bfloat16 comes as its bits."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array, np.float32)


def _tensor(context: Any, kind: int, array: np.ndarray) -> Any:
    """Return a tensor on the memory of a contiguous array, its dims the other way round."""
    made = ggml.ggml_new_tensor_4d(context, kind, *reversed(array.shape))
    made.contents.data = array.ctypes.data
    return made


def prepare(call: Call) -> Prepared:
    """Make a graph of the one operator, with threads that wait for it."""
    memory = (ctypes.c_uint8 * _MEMORY)()
    context = ggml.ggml_init(
        ggml.ggml_init_params(mem_size=_MEMORY, mem_buffer=ctypes.addressof(memory), no_alloc=True)
    )
    q = _floats(call.q)
    held = [memory, q, call.k, call.v]
    kinds = (ggml.GGML_TYPE_F32, _TYPES[call.dtype], _TYPES[call.dtype])
    tensors = [_tensor(context, kind, x) for kind, x in zip(kinds, held[1:], strict=True)]
    if call.layout == "BTNH":
        tensors = [ggml.ggml_permute(context, one, 0, 2, 1, 3) for one in tensors]
    mask = None
    if (added := call.added()) is not None:
        t, s = q.shape[2 if call.layout == "BNTH" else 1], added.shape[-1]
        shape = (*added.shape[:2], t, s)
        held.append(np.ascontiguousarray(np.broadcast_to(added, shape), np.float16))
        mask = _tensor(context, ggml.GGML_TYPE_F16, held[-1])
    node = ggml.ggml_flash_attn_ext(context, *tensors, mask, call.scale, 0.0, 0.0)
    batch, rows = q.shape[0], q.shape[2 if call.layout == "BNTH" else 1]
    out = np.empty((batch, rows, q.size // (batch * rows * q.shape[-1]), q.shape[-1]), np.float32)
    node.contents.data = out.ctypes.data

    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, node)
    asked = ggml.ggml_threadpool_params_default(call.threads)
    pool = ggml.ggml_threadpool_new(ctypes.byref(asked))
    plan = ggml.ggml_graph_plan(graph, call.threads, pool)
    work = np.empty(max(plan.work_size, 1), np.uint8)
    plan.work_data = ctypes.cast(work.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
    held += [work, plan]

    def run() -> np.ndarray:
        _ = held  # the memory lives as long as what reads it
        if failed := ggml.ggml_graph_compute(graph, ctypes.byref(plan)):
            raise RuntimeError(f"ggml_graph_compute answers with {failed}")
        return out

    def answer(found: np.ndarray) -> np.ndarray:
        return found if call.layout == "BTNH" else found.swapaxes(1, 2)

    return Prepared(run, answer)

"""ONNX Runtime: the operator Attention of ONNX (opset 23 and later) on its CPU provider."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from polyattn_peers.call import Call, Prepared

_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"onnxruntime": ort.__version__, "onnx": onnx.__version__}


def prepare(call: Call) -> Prepared:
    """Build a model of the one operator, and bind the arrays."""
    call.need(call.dtype in _TYPES, "its CPU provider has no bfloat16 Attention")
    arrays = {"q": call.q, "k": call.k, "v": call.v}
    if call.layout == "BTNH":  # three-dimensional inputs have the heads in the last dim
        arrays = {name: x.reshape(*x.shape[:2], -1) for name, x in arrays.items()}
    options: dict[str, Any] = {"scale": call.scale, "is_causal": int(call.mask == "causal")}
    if call.layout == "BTNH":
        options |= {"q_num_heads": call.q.shape[2], "kv_num_heads": call.k.shape[2]}
    kinds = dict.fromkeys(arrays, _TYPES[call.dtype])
    if call.allowed is not None and call.mask != "causal":
        batch, heads = call.allowed.shape[:2]
        t, s = call.q.shape[2], call.k.shape[2]
        arrays["mask"] = np.ascontiguousarray(np.broadcast_to(call.allowed, (batch, heads, t, s)))
        kinds["mask"] = TensorProto.BOOL
    inputs = [
        helper.make_tensor_value_info(name, kinds[name], x.shape) for name, x in arrays.items()
    ]
    out = helper.make_tensor_value_info("out", _TYPES[call.dtype], arrays["q"].shape)
    node = helper.make_node("Attention", list(arrays), ["out"], **options)
    graph = helper.make_graph([node], "attention", inputs, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = call.threads
    settings.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])
    values = {name: ort.OrtValue.ortvalue_from_numpy(x) for name, x in arrays.items()}

    def run() -> Any:
        return session.run_with_ort_values(["out"], values)[0]

    return Prepared(run, lambda out: out.numpy().astype(np.float32).reshape(call.q.shape))

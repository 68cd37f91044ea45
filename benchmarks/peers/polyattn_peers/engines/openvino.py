"""OpenVINO: ScaledDotProductAttention of opset 13 in its CPU plugin."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from polyattn_peers.call import Call, Prepared

_TYPES = {"float32": ov.Type.f32, "bfloat16": ov.Type.bf16, "float16": ov.Type.f16}
_HINTS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"openvino": ov.__version__}


def _heads_second(x: Any, call: Call) -> Any:
    return x if call.layout == "BNTH" else ops.transpose(x, [0, 2, 1, 3])


def _for_each_query_head(x: Any, call: Call) -> Any:
    """Repeat key heads, in the form that the plugin knows as grouped heads and does not copy."""
    if call.group == 1 or call.folds:
        return x
    b, n, s, h = (int(size) for size in x.get_output_shape(0))
    wide = ops.broadcast(ops.unsqueeze(x, 2), [b, n, call.group, s, h])
    return ops.reshape(wide, [b, n * call.group, s, h], special_zero=False)


def prepare(call: Call) -> Prepared:
    """Compile a model of the one operator."""
    kind = _TYPES[call.dtype]
    parameters = [ops.parameter(list(x.shape), kind) for x in (call.q, call.k, call.v)]
    q, k, v = (_heads_second(x, call) for x in parameters)
    if call.folds:
        q = ops.reshape(parameters[0], list(call.folded), special_zero=False)
    k, v = _for_each_query_head(k, call), _for_each_query_head(v, call)
    arrays = [ov.Tensor(x, x.shape, kind) for x in (call.q, call.k, call.v)]
    inputs, causal = [q, k, v], call.mask == "causal"
    if call.allowed is not None and not causal:
        parameters.append(ops.parameter(list(call.allowed.shape), ov.Type.boolean))
        inputs.append(parameters[-1])
        arrays.append(ov.Tensor(np.ascontiguousarray(call.allowed)))
    out = ops.scaled_dot_product_attention(*inputs, causal=causal)
    if call.folds:
        out = ops.reshape(out, list(call.q.shape), special_zero=False)
    else:
        out = _heads_second(out, call)
    model = ov.Model([out], parameters)
    settings = {
        "INFERENCE_NUM_THREADS": call.threads, "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _HINTS[call.dtype],
    }  # fmt: skip
    request = ov.Core().compile_model(model, "CPU", settings).create_infer_request()
    for place, array in enumerate(arrays):
        request.set_input_tensor(place, array)

    def answer(_: Any) -> np.ndarray:
        found = request.get_output_tensor(0)
        if call.dtype == "bfloat16":
            return np.array(found.data).view(np.uint16).reshape(call.q.shape)
        return np.array(found.data).astype(np.float32)

    return Prepared(request.infer, answer)

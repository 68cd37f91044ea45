"""ncnn: its layer SDPA, float32, one batch entry a call."""

from __future__ import annotations

from typing import Any

import ncnn
import numpy as np

from polyattn_peers.call import Call, Prepared

_MODEL = """7767517
{count} {blobs}
{inputs}
SDPA attention {bottoms} 1 {names} out 5={masked} 6={scale}
"""


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"ncnn": ncnn.__version__}


def _net(call: Call, names: list[str]) -> Any:
    inputs = "\n".join(f"Input {name} 0 1 {name}" for name in names)
    text = _MODEL.format(
        count=len(names) + 1, blobs=len(names) + 1, inputs=inputs, bottoms=len(names),
        names=" ".join(names), masked=int("mask" in names), scale=call.scale,
    )  # fmt: skip
    net = ncnn.Net()
    net.opt.num_threads = call.threads
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.use_bf16_storage = False
    if net.load_param_mem(text) != 0:
        raise RuntimeError("it does not load a model of one layer SDPA")
    net.load_model_mem(b"")
    return net


def prepare(call: Call) -> Prepared:
    """Make a net of the one layer."""
    call.need(call.dtype == "float32", "its layer SDPA is run in float32 here")
    call.need(call.layout == "BNTH", "it takes heads before rows only")
    arrays: dict[str, np.ndarray] = {"q": call.q, "k": call.k, "v": call.v}
    if (added := call.added()) is not None:
        t, s = call.q.shape[2], call.k.shape[2]
        arrays["mask"] = np.ascontiguousarray(np.broadcast_to(added[:, 0], (added.shape[0], t, s)))
    net = _net(call, list(arrays))
    batch = call.q.shape[0]
    given = [
        {
            name: ncnn.Mat(np.ascontiguousarray(x[min(b, len(x) - 1)])).clone()
            for name, x in arrays.items()
        }
        for b in range(batch)
    ]

    def run() -> list[Any]:
        found = []
        for one in given:
            extractor = net.create_extractor()
            for name, mat in one.items():
                extractor.input(name, mat)
            failed, out = extractor.extract("out")
            if failed:
                raise RuntimeError(f"its extractor answers with {failed}")
            found.append(out)
        return found

    return Prepared(run, lambda outs: np.stack([np.array(out) for out in outs]))

"""zentorch, AMD's plugin of PyTorch: its operator ``zentorch_sdpa``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import zentorch

from polyattn_peers.call import Call, Prepared


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"zentorch": zentorch.__version__, "torch": torch.__version__}


def prepare(call: Call) -> Prepared:
    """Make tensors of the arrays."""
    call.need(call.group == 1 or call.folds, "its operator takes as many key heads as query heads")
    torch.set_num_threads(call.threads)
    kind = getattr(torch, call.dtype)
    second = call.layout == "BNTH"

    def tensor(x: np.ndarray) -> torch.Tensor:
        bits = torch.from_numpy(x.view(np.int16)) if x.dtype == np.uint16 else torch.from_numpy(x)
        return bits.view(kind) if second else bits.view(kind).transpose(1, 2)

    q, k, v = (tensor(x) for x in (call.q, call.k, call.v))
    if call.folds:
        q = q.reshape(call.folded)
    options: dict[str, Any] = {"scale": call.scale, "is_causal": call.mask == "causal"}
    if call.mask != "causal" and (added := call.added()) is not None:
        options["attn_mask"] = torch.from_numpy(added).to(kind).expand(-1, -1, q.shape[2], -1)
    run = torch.ops.zentorch.zentorch_sdpa

    def answer(found: Any) -> np.ndarray:
        out = found[0] if second or call.folds else found[0].transpose(1, 2)
        return out.float().numpy().reshape(call.q.shape)

    return Prepared(lambda: run(q, k, v, **options), answer)

"""One recorded call in two ways: as polyattn ran it, and as torch's own function would.

torch takes one array for masks and biases, so a mask that was a value is written out for it, once
and beforehand, as a program without polyattn has it; a mask that torch knows by name goes by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import TuningError
from polyattn.masks import Causal, Dense
from polyattn.masks.biases import DenseBias
from polyattn.measure.inputs import Inputs
from polyattn.torch.api import attention
from polyattn.torch.dropin import scaled_dot_product_attention, stock
from polyattn.torch.kit.layouts import from_bnth, to_bnth
from polyattn.torch.kit.masking import Dims, dense_bias, materialise

__all__ = ["Call", "as_recorded", "as_stock"]

Call = Callable[[float], Tensor]
"""Runs the forward pass with a probability of dropout; returns the output in the call's layout."""


def as_recorded(inputs: Inputs) -> Call:
    """Return the call through polyattn, on whatever is asked for around it."""
    problem = inputs.problem
    if problem.layout == "BNTH" and _torch_has(inputs):
        mask, causal = _torchs_mask(inputs)
        options: Any = {"scale": problem.scale, "enable_gqa": problem.gqa}
        q, k, v = inputs.q, inputs.k, inputs.v
        return lambda p: scaled_dot_product_attention(q, k, v, mask, p, causal, **options)

    def call(dropout_p: float) -> Tensor:
        out: Any = attention(
            inputs.q, inputs.k, inputs.v, mask=inputs.mask, bias=inputs.bias, scale=problem.scale,
            softcap=problem.softcap, sinks=inputs.sinks, dropout_p=dropout_p,
            layout=problem.layout, return_lse=problem.lse, deterministic=problem.deterministic,
        )  # fmt: skip
        return out[0] if isinstance(out, tuple) else out

    return call


def as_stock(inputs: Inputs) -> Call:
    """Return the call of torch's own function; TuningError where that has no such call."""
    problem = inputs.problem
    lacking = {
        "packed sequences": problem.layout == "packed",
        "soft caps": problem.softcap is not None,
        "sinks": problem.sinks > 0,
        "log-sum-exp": problem.lse,
    }
    if any(lacking.values()):
        raise TuningError(f"torch's own function has no {next(x for x in lacking if lacking[x])}")
    q, k, v = (to_bnth(x, problem.layout) for x in (inputs.q, inputs.k, inputs.v))
    mask, causal = (
        _torchs_mask(inputs) if _torch_has(inputs) else (_written_out(inputs, q, k), False)
    )
    scale, gqa = problem.scale, problem.gqa
    return lambda p: from_bnth(stock(q, k, v, mask, p, causal, scale, gqa), problem.layout)


def _torch_has(inputs: Inputs) -> bool:
    """Whether mask and bias are what torch's function takes, one at most."""
    mask, bias = inputs.mask, inputs.bias
    if bias is not None:
        return mask is None and isinstance(bias, DenseBias)
    if isinstance(mask, Causal):
        square = inputs.problem.q_len == inputs.problem.kv_len
        return mask.align == "top_left" or square
    return mask is None or isinstance(mask, Dense)


def _torchs_mask(inputs: Inputs) -> tuple[Tensor | None, bool]:
    """Return torch's `attn_mask` and `is_causal`."""
    if inputs.bias is not None:
        return inputs.bias.payload, False
    if isinstance(inputs.mask, Dense):
        return inputs.mask.mask, False
    return None, inputs.mask is not None


def _written_out(inputs: Inputs, q: Tensor, k: Tensor) -> Tensor:
    dims = Dims.of(q, k)
    allowed = None if inputs.mask is None else materialise(inputs.mask, dims, q.device)
    if inputs.bias is None:
        assert allowed is not None
        return allowed.contiguous()
    bias = dense_bias(inputs.bias, dims, q.dtype)
    return bias if allowed is None else torch.where(allowed, bias, -math.inf).to(q.dtype)

"""Keys as codes: the kernels read them as they are and multiply by the scales of their blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from polyattn.backends.native_cpu.torch.arguments import program_of, quantised_argument
from polyattn.backends.native_cpu.torch.calls import Constants, Extras, dense_rows, forward
from polyattn.backends.native_cpu.torch.levels import differentiates
from polyattn.errors import Unsupported
from polyattn.masks.biases import Alibi
from polyattn.problem import Problem

__all__ = ["quantized_kernel"]


def quantized_kernel(problem: Problem, constants: Constants) -> Callable[..., Any]:
    """Return ``kernel(q, key_codes, value_codes, mask, bias, sinks, quantised)``.

    `quantised` is ``(key_scales, value_scales, block_size)``.
    """
    layout, lse_too = constants.layout, problem.lse
    row = 1 if layout == "BTNH" else 2

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        bias: Any,
        sinks: Any,
        quantised: tuple[Tensor, Tensor, int],
    ) -> Any:
        payload = None if bias is None else bias.payload
        if differentiates((q, k, v, payload, sinks, *quantised)):
            raise Unsupported(
                "got quantised keys on native_cpu under forward-mode differentiation or a function "
                "transform (torch.func), expected a plain call; ask for backend='reference', which "
                "decodes the keys."
            )
        # these hold what pointers are taken of until the call has ended
        key_scales, value_scales, block_size = quantised
        key_scales, value_scales = dense_rows(key_scales), dense_rows(value_scales)
        codes, arrays = program_of(mask, q, k, layout)
        dense, slopes = (None, payload) if isinstance(bias, Alibi) else (payload, None)
        extras = Extras(dense, slopes, sinks, codes, arrays)
        # one that is longer than all keys may be longer than what the extension counts with
        block_size = min(block_size, k.shape[row])
        argument = quantised_argument(k, key_scales, value_scales, block_size)
        out, lse = forward(q, k, v, extras, constants, lse_too, argument)
        return (out, lse) if lse_too else out

    return kernel

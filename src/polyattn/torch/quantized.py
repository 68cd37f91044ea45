"""``quantized_attention``: keys and values as codes of 8 bits, with a scale for each block of keys.

Nothing here is chosen by itself: ``attention`` quantises nothing, and whoever calls this has
codes. The call is exact for the keys and values that the codes stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.masks import Causal, Mask
from polyattn.masks.biases import Bias
from polyattn.problem.admission import admit_quantized, check_scales
from polyattn.selection.prepare import Plan
from polyattn.torch import short_way
from polyattn.torch.admission import FRONT, Call
from polyattn.torch.call_types import Backends, QuantizedOptions
from polyattn.torch.keys import Key, key_for
from polyattn.torch.kit.empty import answer_empty
from polyattn.torch.long_way import dispatch
from polyattn.torch.refusals import refuse
from polyattn.torch.repeated_masks import rebinder

__all__ = ["QuantizedWay", "quantized_attention"]

_MISSED = short_way.MISSED
_CAUSAL = Causal()


@overload
def quantized_attention(
    query: Tensor,
    key_codes: Tensor,
    value_codes: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    *,
    block_size: int,
    return_lse: Literal[False] = False,
    **options: Unpack[QuantizedOptions],
) -> Tensor: ...
@overload
def quantized_attention(
    query: Tensor,
    key_codes: Tensor,
    value_codes: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    *,
    block_size: int,
    return_lse: Literal[True],
    **options: Unpack[QuantizedOptions],
) -> tuple[Tensor, Tensor]: ...
@overload
def quantized_attention(
    query: Tensor,
    key_codes: Tensor,
    value_codes: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    *,
    block_size: int,
    return_lse: bool,
    **options: Unpack[QuantizedOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...
def quantized_attention(
    query: Tensor,
    key_codes: Tensor,
    value_codes: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    *,
    block_size: int,
    mask: Mask | None = _CAUSAL,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    backend: Backends | None = None,
) -> Any:
    """Attend to quantised keys: key ``j`` of batch entry ``b`` and head ``n`` is
    ``key_codes[b, j, n] * key_scales[b, n, j // block_size]``, values likewise.

    `B` batch, `T` queries, `S` keys, `N` query and `K` key/value heads:

    - `query` (B, T, N, H); (B, N, T, H) with ``layout="BNTH"``.
    - `key_codes` (B, S, K, H), `value_codes` (B, S, K, V), or (B, K, S, H) and so on: both int8
      or both float8_e4m3fn.
    - `key_scales`, `value_scales` (B, K, ceil(S / block_size)) float32.
    - `mask`: causal unless told otherwise; None, or any that :func:`polyattn.torch.attention`
      takes for such a layout.

    `bias`, `scale`, `softcap`, `sinks`, `return_lse`, `backend`: see
    :func:`polyattn.torch.attention`. Codes and scales are constants; a gradient of the query comes
    from `reference` alone. Returns out (B, T, N, V) in layout and dtype of `query`, with
    `return_lse` also lse (B, N, T). :func:`polyattn.torch.quantize_kv` makes codes of keys,
    :class:`polyattn.torch.QuantizedCache` while they come.

    Raises :class:`~polyattn.errors.InvalidProblem` for a wrong call and
    :class:`~polyattn.errors.Unsupported` when the request cannot be met.

    >>> import torch
    >>> from polyattn.torch import quantize_kv
    >>> codes, scales = quantize_kv(torch.randn(2, 100, 2, 32), block_size=64)
    >>> query = torch.randn(2, 1, 4, 32)
    >>> quantized_attention(query, codes, codes, scales, scales, block_size=64).shape
    torch.Size([2, 1, 4, 32])
    """
    if is_dynamo_compiling():
        refuse(
            "got quantized_attention inside torch.compile, expected an eager call; call it outside "
            "of the compiled function."
        )
    quantised = key_scales, value_scales, block_size
    found = short_way.quantized(query, key_codes, value_codes, *quantised, mask, bias, scale,
                                softcap, sinks, layout, return_lse, backend)  # fmt: skip
    if found is not _MISSED:
        return found
    options = {
        "mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks,
        "layout": layout, "return_lse": return_lse,
    }  # fmt: skip
    way = QuantizedWay(*quantised, options)
    asked = *quantised, *options.values(), backend
    held = key_for(query, key_codes, value_codes, Key.of_quantized, *asked)
    arguments = mask, bias, sinks, *quantised
    return dispatch(way, held, query, key_codes, value_codes, arguments, backend)


@dataclass(frozen=True)
class QuantizedWay:
    """Calls on quantised keys; runners take both scales and the size of the blocks last."""

    key_scales: Any
    value_scales: Any
    block_size: Any
    options: dict[str, Any]

    @property
    def mask(self) -> Any:
        return self.options["mask"]

    def admit(self, q: Any, k: Any, v: Any) -> Call:
        quantised = self.key_scales, self.value_scales, self.block_size
        problem, mask, cast = admit_quantized(q, k, v, *quantised, front=FRONT, **self.options)
        return Call(
            problem,
            mask,
            self.options["bias"],
            self.options["sinks"],
            None if cast is None else getattr(torch, cast),
            self.mask is not None,
        )

    def runner(self, plan: Plan, call: Call) -> Callable[..., Any]:
        problem, kernel, bound, cast = call.problem, plan.kernel, call.mask, call.cast
        row, static = 1 if problem.layout == "BTNH" else 2, bound is None or bound.is_static
        empty, bind = problem.empty, rebinder(problem)

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            mask: Any,
            bias: Any,
            sinks: Any,
            key_scales: Tensor,
            value_scales: Tensor,
            block_size: int,
        ) -> Any:
            # lengths differ between the calls of a class, and with them how many scales there are
            shape = k.shape
            sizes = shape[0], shape[3 - row], shape[row], block_size
            check_scales("key_scales", key_scales.shape, *sizes)
            check_scales("value_scales", value_scales.shape, *sizes)
            q = q if cast is None else q.to(cast)
            if empty:
                return answer_empty(
                    problem.layout, problem.lse, q, q, v[:0].to(q.dtype), sinks, bias
                )
            here = bound if static else bind(mask, q, k)
            quantised = key_scales, value_scales, block_size
            if cast is None:
                return kernel(q, k, v, here, bias, sinks, quantised)
            with torch.autocast(q.device.type, enabled=False):
                return kernel(q, k, v, here, bias, sinks, quantised)

        return run

"""Decoding from caches of other forms: keys in pages, and keys as codes of 8 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import PAGE
from polyattn.bench.cpu.ways import Way
from polyattn.torch import paged_attention, quantize_kv, quantized_attention
from polyattn.torch.quantize import Codes

__all__ = ["CODES", "cache_ways"]

CODES: dict[Codes, str] = {"int8": "int8", "float8_e4m3fn": "fp8"}
"""The dtypes of codes, and what their ways are called."""
_BLOCK = 64


def cache_ways(inputs: Inputs, backend: str) -> Iterator[Way]:
    """Yield the public calls on the same keys in pages and as codes; decoding only."""
    if not inputs.case.is_decode:
        return
    if inputs.case.size.kv_len % PAGE == 0:
        yield _paged(inputs, backend)
    for dtype in CODES:
        yield _quantised(inputs, backend, dtype)


def _paged(inputs: Inputs, backend: str) -> Way:
    """Return the call on pages that lie in any order."""
    case, size = inputs.case, inputs.case.size
    count = size.kv_len // PAGE
    order = torch.randperm(size.batch * count, generator=torch.Generator().manual_seed(0))
    table = order.argsort().view(size.batch, count)
    lengths = torch.full((size.batch,), size.kv_len)

    def in_pages(x: Tensor) -> Tensor:
        pages = x.unflatten(2 if case.layout == "BNTH" else 1, (count, PAGE))
        if case.layout == "BNTH":
            pages = pages.transpose(1, 2)  # (B, pages, K, keys of a page, H)
        return pages.flatten(0, 1)[order]

    k_pages, v_pages = in_pages(inputs.k), in_pages(inputs.v)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = paged_attention(
            q, k_pages, v_pages, table, lengths, mask=None, layout=case.layout, backend=backend
        )
        return out

    return Way("paged", call)


def _quantised(inputs: Inputs, backend: str, dtype: Codes) -> Way:
    """Return the call on codes, which is right for the keys and values that they stand for."""
    layout = inputs.case.layout
    found = [quantize_kv(x, dtype=dtype, block_size=_BLOCK, layout=layout) for x in
             (inputs.k, inputs.v)]  # fmt: skip
    (k_codes, k_scales), (v_codes, v_scales) = found

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = quantized_attention(
            q, k_codes, v_codes, k_scales, v_scales, block_size=_BLOCK, mask=None, layout=layout,
            backend=backend,
        )  # fmt: skip
        return out

    def decoded() -> Inputs:
        keys, values = (_decoded(codes, scales, layout) for codes, scales in found)
        return dataclasses.replace(inputs, k=keys, v=values)

    return Way(CODES[dtype], call, stands_for=decoded)


def _decoded(codes: Tensor, scales: Tensor, layout: str) -> Tensor:
    row = 1 if layout == "BTNH" else 2
    each = scales.repeat_interleave(_BLOCK, -1)[..., : codes.shape[row]]
    return codes.float().mul_((each.transpose(1, 2) if row == 1 else each).unsqueeze(-1))

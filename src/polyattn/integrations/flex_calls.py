"""``flex_attention`` while routed: calls whose mask can be told exactly, on the best backend.

Outside of compilers torch's ``flex_attention`` asks the ``mask_mod`` at every pair of query and key
and materialises the scores. So the stand-in asks it at every pair, too, unless it was made of a
mask (:func:`polyattn.torch.block_mask`), and hands over what it said. A ``score_mod`` may be
anything; it stays torch's. In compiled code the mask has to be one of polyattn's, with its own
blocks: there torch's kernel computes no others, which outside of compilers nothing looks at.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyattn.integrations.routing import SdpaCall, Seam, router
from polyattn.integrations.seen_pairs import mask_allowing, narrowed
from polyattn.masks import Mask
from polyattn.problem import DTYPES
from polyattn.torch.api import attention
from polyattn.torch.flex_masks import has_own_blocks, mask_behind
from polyattn.torch.internals import are_transforms_active, is_fake, tracing_state
from polyattn.torch.left_to_torch import leave_traced

__all__: list[str] = []

_MODULE = "torch.nn.attention.flex_attention"


class _Torch:
    """torch's own, once it was looked up: importing it takes a while."""

    flex: Any = None
    aux_output: Any = None


def _original() -> Callable[..., Any] | None:
    if _Torch.flex is None:
        module = importlib.import_module(_MODULE)
        _Torch.flex, _Torch.aux_output = module.flex_attention, getattr(module, "AuxOutput", None)
    return _Torch.flex  # type: ignore[no-any-return]


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    **more: Any,
) -> Any:
    """What stands in for torch's ``flex_attention``."""
    found: Any = "a program kept it"
    if router.entered:
        found = _unmodelled(score_mod, return_lse, kernel_options, more)
        found = found or _unfit(query, key, value, scale, enable_gqa)
        found = found or _mask(block_mask, query, key)
        if isinstance(found, str):
            _leave(f"flex_attention with {found}", query, key, value)
    if isinstance(found, str):
        return _Torch.flex(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse,
            kernel_options, **more,
        )  # fmt: skip
    aux = more.get("return_aux")
    lse = return_lse or (aux is not None and aux.lse)

    def run() -> Any:
        return attention(query, key, value, mask=found, scale=scale, layout="BNTH", return_lse=lse)

    out = run() if is_dynamo_compiling() else router.run(None, run)
    if aux is None:
        return out
    out, sums = out if lse else (out, None)
    return out, _Torch.aux_output(lse=sums, max_scores=None)


_TORCHS = ("BACKEND", "FORCE_USE_FLEX_ATTENTION", "OUTPUT_LOGSUMEXP", "OUTPUT_MAX")
"""Kernel options that ask for a kernel of torch's, or that torch refuses; others are of speed."""


def _unmodelled(
    score_mod: Any, return_lse: Any, kernel_options: Any, more: dict[str, Any]
) -> str | None:
    """Say what of a call's options only torch computes, or refuses."""
    if score_mod is not None:
        return "a score_mod, which may be anything"
    if kernel_options is not None and not isinstance(kernel_options, dict):
        return f"kernel_options of type {type(kernel_options).__name__}"
    if kernel_options and any(name in kernel_options for name in _TORCHS):
        return "kernel_options that are torch's alone"
    aux = more.get("return_aux")
    if aux is not None and getattr(aux, "max_scores", True):
        return "max_scores, which polyattn does not give"
    if (aux is not None and return_lse) or type(return_lse) is not bool:
        return "two ways of asking for lse"
    return None if not set(more) - {"return_aux"} else "an argument that polyattn does not know"


def _unfit(q: Any, k: Any, v: Any, scale: Any, gqa: Any) -> str | None:
    """Say why three arrays are no call that polyattn models; torch says what is wrong with one."""
    for x in (q, k, v):
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return f"a tensor of type {type(x).__name__}"
    if is_dynamo_compiling():
        if q.device.type != "cpu":
            return f"compiled code on {q.device.type}: it is measured on CPUs only"
    elif tracing_state() is not None or are_transforms_active():
        return "torch.jit or a function transform (torch.func) around it"
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype):
        return "inputs of several dtypes, or of other than 4 dims"
    if f"{q.dtype}".rpartition(".")[2] not in DTYPES or not (q.device == k.device == v.device):
        return f"inputs of {q.dtype}, or on several devices"
    if q.device.type == "meta" or q.shape[1] == 0 or k.shape[2] == 0:
        return "no numbers to compute with: on the meta device, of no heads or no keys"
    n, kv = q.shape[1], k.shape[1]
    heads = n == kv or (gqa and kv > 0 and n % kv == 0)
    alike = q.shape[0] == k.shape[0] == v.shape[0] and k.shape[2] == v.shape[2] and kv == v.shape[1]
    if not (heads and alike and q.shape[3] == k.shape[3] and q.shape[3] > 0 and v.shape[3] > 0):
        return "inputs of these shapes"
    if scale is not None and type(scale) is not float:
        return "a scale that is no float"
    finite = scale is None or is_dynamo_compiling() or isfinite(scale)
    return None if finite else "a scale that is not finite"


def _mask(block_mask: Any, q: Tensor, k: Tensor) -> Mask | str | None:
    """Return the mask of a block mask for these arrays, or why it is left to torch."""
    if block_mask is None:
        return None
    b, n, t, s = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    sizes: Any = getattr(block_mask, "shape", ())
    if len(sizes) != 4:
        return f"a block mask of type {type(block_mask).__name__}"
    fits = (sizes[0] == 1 or sizes[0] == b) and (sizes[1] == 1 or sizes[1] == n)
    if not fits or sizes[2] != t or sizes[3] != s or block_mask.kv_indices.device != q.device:
        return "a block mask of other sizes, or on another device"
    ours = mask_behind(block_mask.mask_mod, t, s)
    if ours is not None and is_dynamo_compiling() and not has_own_blocks(block_mask):
        return "blocks that are not those of its mask, in compiled code: torch passes over others"
    if ours is not None:
        return ours
    if is_dynamo_compiling():
        return "a mask_mod that is none of polyattn's, in compiled code: torch writes a kernel"
    try:
        pairs = _create_mask(block_mask.mask_mod, b, n, t, s, q.device)
    except Exception:  # it is the program's, and torch will raise it again
        return "a mask_mod that fails"
    if pairs.dtype != torch.bool or tuple(pairs.shape) != (b, n, t, s):
        return "a mask_mod that gives no booleans"
    return mask_allowing(narrowed(pairs))


@torch.no_grad()
def _create_mask(mask_mod: Any, *where: Any) -> Tensor:
    made: Tensor = importlib.import_module(_MODULE).create_mask(mask_mod, *where)
    return made


def _leave(reason: str, q: Any, k: Any, v: Any) -> None:
    if is_dynamo_compiling():
        leave_traced(reason, "flex_attention")
    elif not is_fake(q):  # those only look
        router.hand_over(reason, SdpaCall(q, k, v, None), "flex_attention")


router.add(Seam(_original, _flex_attention, seen_through=False))

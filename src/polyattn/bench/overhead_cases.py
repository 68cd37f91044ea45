"""The rows of ``bench overhead``: what is timed, over what, and the goals.

Every row is compared with the kernel call that it ends in, in the layout of its tensors. The
statements are the table's own text: what is printed is what was timed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

__all__ = ["LEGEND", "SHAPE", "Case", "Missing", "namespace", "our_cases", "peer_cases"]

SHAPE = (1, 1, 8, 8)

LEGEND = {
    "kernel": "torch's flash kernel for CPUs, the shortest call of it",
    "step": "plan(q, k, v, ...)",
    "compiled": 'torch.compile(fullgraph=True, backend="eager") of a function with this one call',
    "qT": "q.transpose(1, 2): the kernel takes heads second, so a direct call with BTNH tensors "
    "transposes too",
}

BNTH = "kernel(q, k, v)[0]"
BTNH = "kernel(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))[0].transpose(1, 2)"
CAUSAL = "kernel(q, k, v, 0.0, True)[0]"
SHORT = {BNTH: "kernel(q, k, v)", BTNH: "kernel(qT, kT, vT).T", CAUSAL: "kernel(causal)"}
SHORT["compiled_kernel(q, k, v)"] = "compiled kernel(q, k, v)"
OF_PAGES = 'attention(one, keys, keys, backend="native_cpu")'
OF_CODES = 'attention(one, decoded, decoded, backend="native_cpu")'
SHORT |= {OF_PAGES: "attention(one, keys, ...)", OF_CODES: "attention(one, decoded, ...)"}


@dataclass(frozen=True)
class Case:
    """One row: a statement, the kernel call it ends in, and the goal for the difference."""

    name: str
    statement: str
    over: str = BNTH
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    goal_us: float | None = None
    ours: bool = True


@dataclass(frozen=True)
class Missing:
    """A peer that is not installed, and how to get it."""

    name: str
    how_to_get_it: str


def namespace() -> dict[str, Any]:
    """Return what the statements may name."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from polyattn import Causal
    from polyattn.torch import attention, plan, scaled_dot_product_attention
    from polyattn.torch.internals import flash_attention_for_cpu

    torch.compiler.reset()  # it compiles one function for at most eight kinds of calls
    torch.manual_seed(0)
    q, k, v = (torch.randn(SHAPE) for _ in range(3))

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, layout="BNTH")

    def direct(q: Any, k: Any, v: Any) -> Any:
        return flash_attention_for_cpu(q, k, v)[0]

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, backend="eager", dynamic=False)

    return {
        "q": q, "k": k, "v": v, "torch": torch, "F": torch.nn.functional,
        "kernel": flash_attention_for_cpu,
        "attention": attention, "sdpa": scaled_dot_product_attention, "Causal": Causal,
        "causal": Causal(), "step": plan(q, k, v, layout="BNTH"), "step_BTNH": plan(q, k, v),
        "sdpa_kernel": sdpa_kernel, "FLASH": SDPBackend.FLASH_ATTENTION,
        "compiled_attention": compiled(call), "compiled_kernel": compiled(direct),
        **_cache_names(),
    }  # fmt: skip


def _cache_names() -> dict[str, Any]:
    """Return a query, and keys in a row, in pages, as codes and decoded again."""
    import torch

    from polyattn.torch import paged_attention, quantize_kv, quantized_attention

    keys = torch.randn(1, 64, 2, 16)
    codes, scales = quantize_kv(keys, block_size=16)
    blocks = codes.unflatten(1, (4, 16)) * scales.transpose(1, 2)[:, :, None, :, None]
    return {
        "one": torch.randn(1, 1, 4, 16), "keys": keys, "pages": keys.unflatten(1, (4, 16))[0],
        "table": torch.arange(4)[None], "lengths": torch.tensor([64]),
        "codes": codes, "scales": scales, "decoded": blocks.flatten(1, 2),
        "paged_attention": paged_attention, "quantized_attention": quantized_attention,
    }  # fmt: skip


@contextmanager
def _no_scope_yet() -> Iterator[None]:
    """Be like a process that has never entered a scope; other rows here have."""
    from polyattn.selection import scopes

    before = scopes.state.armed
    scopes.arm(False)
    try:
        yield
    finally:
        scopes.arm(before)


def our_cases() -> list[Case]:
    """Return the rows of polyattn itself."""
    from polyattn import record_selections, use_backend

    call = 'attention(q, k, v, layout="BNTH")'
    return [
        Case("attention, BNTH", call, scope=_no_scope_yet, goal_us=1.0),
        Case("attention, BTNH", "attention(q, k, v)", BTNH, _no_scope_yet, goal_us=1.0),
        Case("plan step, BNTH", "step(q, k, v)", goal_us=0.2),
        Case("plan step, BTNH", "step_BTNH(q, k, v)", BTNH, goal_us=0.2),
        Case("attention, compiled", "compiled_attention(q, k, v)", "compiled_kernel(q, k, v)",
             goal_us=1.0),
        Case("after use_backend(...)", call),
        Case("in use_backend(...)", call, scope=lambda: use_backend("sdpa_flash"), goal_us=1.2),
        Case("in record_selections()", call, scope=record_selections),
        Case("one tensor thrice", 'attention(q, q, q, layout="BNTH")', "kernel(q, q, q)[0]"),
        Case("mask=causal", 'attention(q, k, v, layout="BNTH", mask=causal)', CAUSAL),
        Case("mask=Causal()", 'attention(q, k, v, layout="BNTH", mask=Causal())', CAUSAL),
        Case("polyattn's drop-in F.sdpa", "sdpa(q, k, v)"),
        *_cached(),
    ]  # fmt: skip


def _cached() -> Iterator[Case]:
    """Yield the calls on keys in pages and as codes, over ``attention`` of what these stand for."""
    from polyattn.native import module
    from polyattn.selection.registry import Available

    if isinstance(module.status(), Available):
        pages = "paged_attention(one, pages, pages, table, lengths, mask=None)"
        codes = "quantized_attention(one, codes, codes, scales, scales, block_size=16, mask=None)"
        yield Case("keys in pages", pages, OF_PAGES)
        yield Case("keys as codes", codes, OF_CODES)


def peer_cases(names: dict[str, Any]) -> Iterator[Case | Missing]:
    """Yield the rows of other libraries; puts what they name into `names`."""
    yield Case("torch F.sdpa", "F.scaled_dot_product_attention(q, k, v)", ours=False)
    yield Case(
        "with sdpa_kernel(FLASH): F.sdpa",
        "with sdpa_kernel(FLASH): F.scaled_dot_product_attention(q, k, v)",
        ours=False,
    )
    if importlib.util.find_spec("diffusers") is None:
        yield Missing("diffusers dispatch_attention_fn", "pip install 'polyattn[bench]'")
    else:
        from diffusers.models.attention_dispatch import dispatch_attention_fn

        names["dispatch_attention_fn"] = dispatch_attention_fn
        yield Case(
            "diffusers dispatch_attention_fn", "dispatch_attention_fn(q, k, v)", BTNH, ours=False
        )
    if importlib.util.find_spec("transformers") is None:
        yield Missing("transformers sdpa_attention_forward", "pip install 'polyattn[bench]'")
    else:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        module = names["torch"].nn.Module()
        module.is_causal = False
        names.update(sdpa_attention_forward=sdpa_attention_forward, module=module)
        yield Case(
            "transformers sdpa_attention_forward",
            "sdpa_attention_forward(module, q, k, v, None)[0]",
            "kernel(q, k, v)[0].transpose(1, 2).contiguous()",
            ours=False,
        )

"""The ways to run a case: ours, torch's own, and those of others.

Every way takes q, k and v in the layout of the case, allocates its output, and gives it in that
layout. Masks, compiled code and block masks are made before the timer; what they cost is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import BLOCK, WINDOW
from polyattn.bench.cpu.repeats import Step, once
from polyattn.bench.cpu.room import is_large
from polyattn.errors import PolyattnError
from polyattn.torch import attention, explain

__all__ = ["Unable", "Way", "flex", "folded", "ours", "step", "torch_ways"]

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
_FLEX_BLOCK = 128  # torch's own choice


@dataclass(frozen=True)
class Way:
    """A way to run a case; `prepare_s`: what was made before the timer, in seconds by name.

    `timed`: takes a number of calls and returns their seconds and processor time, where another
    process runs them; `call` then returns the result that it gave. `stands_for`: makes the arrays
    that those of the way are right for, where they are not the case's.
    """

    name: str
    call: Call
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    prepare_s: tuple[tuple[str, float], ...] = ()
    timed: Callable[[int], tuple[float, float]] | None = None
    stands_for: Callable[[], Inputs] | None = None


@dataclass(frozen=True)
class Unable:
    """A way that this case cannot take, and why."""

    name: str
    why: str


def step(way: Way, inputs: Inputs) -> Step:
    """Return what is timed: the forward pass, or forward and backward."""
    call, q, k, v, g = way.call, inputs.q, inputs.k, inputs.v, inputs.grad_out
    if not inputs.case.train:
        return Step(lambda: call(q, k, v), way.scope, way.timed, warm=is_large(inputs.case))
    return Step(lambda: torch.autograd.grad(call(q, k, v), (q, k, v), g), way.scope)


def ours(inputs: Inputs, backend: str) -> Way:
    """Return the public call, with the backend asked for."""
    mask, layout = inputs.mask, inputs.case.layout
    runs = explain(inputs.q, inputs.k, inputs.v, mask=mask, layout=layout, backend=backend)
    if runs.backend != backend:  # POLYATTN_ON_UNSUPPORTED=fallback
        raise PolyattnError(
            f"got {runs.backend} for {inputs.case.name}, expected {backend}, which is measured: "
            f"{runs.reason}"
        )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(q, k, v, mask=mask, layout=layout, backend=backend)
        return out

    return Way(backend, call)


def torch_ways(inputs: Inputs) -> Iterator[Way]:
    """Yield torch's routes: flash and math, a boolean mask and the same mask as numbers."""
    case = inputs.case
    options: dict[str, Any] = {"enable_gqa": True} if case.size.heads != case.size.kv_heads else {}
    masks: dict[str, dict[str, Any]] = {"": {}}
    if case.mask == "causal":
        masks = {"": {"is_causal": True}}
    elif inputs.allowed is not None:
        zero = torch.zeros((), dtype=inputs.q.dtype)
        added = torch.where(inputs.allowed, zero, -torch.inf).to(inputs.q.dtype)
        masks = {"": {"attn_mask": inputs.allowed}, ", float mask": {"attn_mask": added}}
    for kind, how in masks.items():
        run = _sdpa(inputs, {**options, **how})
        yield Way(f"flash{kind}", run, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))
        if not kind:
            yield Way("math", run, lambda: sdpa_kernel(SDPBackend.MATH))


def _sdpa(inputs: Inputs, options: dict[str, Any]) -> Call:
    if inputs.case.layout == "BNTH":
        return lambda q, k, v: sdpa(q, k, v, **options)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return sdpa(q, k, v, **options).transpose(1, 2)

    return call


def folded(inputs: Inputs) -> Way | None:
    """Return torch's flash kernel with the heads of a group as query rows, as sdpa_flash does.

    None where there is nothing to fold: more than one query, or one query head to each key head.
    """
    size = inputs.case.size
    if not inputs.case.is_decode or size.heads == size.kv_heads:
        return None
    shape = (size.batch, size.kv_heads, size.heads // size.kv_heads, size.head_dim)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = inputs.heads_second(k), inputs.heads_second(v)
        return sdpa(q.reshape(shape), k, v).view(q.shape)

    return Way("folded", call, lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION))


def flex(inputs: Inputs) -> Way | Unable:
    """Compile torch's FlexAttention for the case; forward only, it has no backward on CPUs."""
    if inputs.case.train:
        return Unable("flex", "has no backward on CPUs")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, size = inputs.case, inputs.case.size
    begin = time.perf_counter()
    blocks: Any = None
    if (allows := _mask_mod(inputs)) is not None:
        block = BLOCK if case.mask == "blocks" else _FLEX_BLOCK
        batch = size.batch if case.mask == "padding" else None
        blocks = create_block_mask(
            allows, batch, None, size.q_len, size.kv_len, device="cpu", BLOCK_SIZE=block
        )
    build_s = time.perf_counter() - begin
    torch.compiler.reset()  # it compiles one function for at most eight kinds of calls
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    grouped = size.heads != size.kv_heads

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (inputs.heads_second(x) for x in (q, k, v))
        out: Tensor = compiled(q, k, v, block_mask=blocks, enable_gqa=grouped)
        return inputs.heads_second(out)

    try:
        compile_s = once(Step(lambda: call(inputs.q, inputs.k, inputs.v)))
    except Exception as error:  # what it cannot do is a finding, not a failure of the run
        lines = str(error).strip().splitlines()
        return Unable("flex", f"{type(error).__name__}: {lines[0] if lines else ''}"[:160])
    return Way("flex", call, prepare_s=(("block mask", build_s), ("compile", compile_s)))


def _mask_mod(inputs: Inputs) -> Callable[..., Any] | None:
    match inputs.case.mask:
        case "causal":
            return lambda b, h, t, j: j <= t
        case "window":
            return lambda b, h, t, j: (j <= t) & (j > t - WINDOW)
        case "padding":
            lengths = torch.tensor(inputs.lengths)
            return lambda b, h, t, j: j < lengths[b]
        case "blocks":
            bits = inputs.block_bits
            return lambda b, h, t, j: bits[t // BLOCK, j // BLOCK]
    return None

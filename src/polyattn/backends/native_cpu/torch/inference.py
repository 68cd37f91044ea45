"""The forward kernel as an operator for compiled inference: ``polyattn::native_inference``.

`native_attention` serves every mode of torch, and for that runs Python code at two dispatch keys. A
graph that is compiled for inference needs one: here the extension reads the tensors by itself, as
in eager code. There is no formula for gradients: a call that would need one is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polyattn.backends.native_cpu.torch.arguments import DTYPES, program_of, terms_of
from polyattn.backends.native_cpu.torch.calls import Constants, Extras, empty_out, forward
from polyattn.backends.native_cpu.torch.derivatives import batched, mapped
from polyattn.masks import Dense
from polyattn.native import module
from polyattn.native.forms import isa_for
from polyattn.native.program import Terms
from polyattn.torch.internals import any_requires_grad, is_grad_enabled, is_lazy_copy

__all__ = ["EXCHANGE", "native_inference"]

EXCHANGE: Any = getattr(Tensor, "__dlpack_c_exchange_api__", None)
"""How C reads a tensor without a Python call. It would copy what is to be copied on write only."""

_library = torch.library.Library("polyattn", "FRAGMENT")
_library.define(
    "native_inference(Tensor q, Tensor k, Tensor v, Tensor? allowed, Tensor? bias, SymInt[] codes, "
    "Tensor[] arrays, str layout, float scale, float softcap) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)
native_inference: Callable[..., Tensor] = torch.ops.polyattn.native_inference.default


def _inference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    codes: Sequence[int],
    arrays: Sequence[Tensor],
    layout: str,
    scale: float,
    softcap: float,
) -> Tensor:
    if is_grad_enabled() and any_requires_grad(q, k, v, bias):
        raise RuntimeError(
            "got inputs that need gradients in polyattn::native_inference, which a graph compiled "
            "for inference holds; compile the function again with inputs that need them."
        )
    if not (_lazy(q) or _lazy(k) or _lazy(v) or _lazy(allowed) or _lazy(bias)):
        out = empty_out(q, k, v, layout)
        terms = terms_of(codes, arrays, layout)[0] if arrays else _static(tuple(codes))
        row = 1 if layout == "BTNH" else 2
        shape, code = q.shape, DTYPES[q.dtype]
        isa = isa_for(code, shape[row], shape[3 - row], k.shape[3 - row])
        run = _run or _loaded()
        try:
            run(EXCHANGE, isa, torch.get_num_threads(), code, row == 1, scale, softcap, q, k, v,
                out, terms, allowed, bias, None, None)  # fmt: skip
            return out
        except ValueError:  # zeros without memory, say: the other way knows, or says what is wrong
            pass
    return _carefully(q, k, v, allowed, bias, codes, arrays, Constants(layout, scale, softcap))


_run: Callable[..., None] | None = None


def _loaded() -> Callable[..., None]:
    global _run
    _run = run = module.load().forward_tensors
    return run


def _lazy(x: Tensor | None) -> bool:
    return x is not None and is_lazy_copy(x)


@functools.lru_cache(maxsize=1024)
def _static(codes: tuple[int, ...]) -> Terms:
    return terms_of(codes, (), "BNTH")[0]


def _carefully(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    codes: Sequence[int],
    arrays: Sequence[Tensor],
    constants: Constants,
) -> Tensor:
    if allowed is not None:
        codes, arrays = program_of(Dense(allowed), q, k, constants.layout)
    return forward(q, k, v, Extras(bias, None, None, codes, arrays), constants, False)[0]


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    bias: Tensor | None,
    codes: Sequence[int],
    arrays: Sequence[Tensor],
    layout: str,
    scale: float,
    softcap: float,
) -> Tensor:
    return empty_out(q, k, v, layout)


def _of_one(*args: Any) -> tuple[Tensor, ...]:
    return (native_inference(*args),)


def _mapped(*args: Any) -> Any:
    (out,), (dim,) = mapped(_of_one)(*args)
    return out, dim


_library.impl("native_inference", _inference, "CPU")
_library.impl("native_inference", lambda *args: batched(_of_one)(*args)[0], "Batched")
torch.library.register_fake("polyattn::native_inference", _fake, lib=_library)
torch.library.register_vmap("polyattn::native_inference", _mapped, lib=_library)

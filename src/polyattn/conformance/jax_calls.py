"""Cases for torch, run by JAX: the same tensors, the same truth, the same judgement.

A call of JAX becomes a function of tensors that torch differentiates: arrays go over as they are,
gradients come back from JAX's own reverse mode. JAX arrays have no strides and what is traced has
no values; all else of a case stands.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyattn.conformance.cases import Case
from polyattn.conformance.inputs import Inputs
from polyattn.conformance.jax_ways import SPREADING, attending, paged, spreading
from polyattn.errors import PolyattnError
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.problem import Problem
from polyattn.selection.registry import Backend

__all__ = [
    "forget", "jax_call", "jax_kernel", "jax_special", "on_device", "problem_for", "to_jax",
    "to_torch",
]  # fmt: skip

_EAGER = 4  # one case of so many is called outside of jit, and is compiled by the front


def on_device(kind: str) -> AbstractContextManager[Any]:
    """Have JAX put the arrays of cases on a device of that kind: cpu, cuda, rocm or tpu."""
    jax = importlib.import_module("jax")
    try:
        found = jax.devices(kind)
    except RuntimeError as error:
        here = ", ".join(sorted({device.platform for device in jax.devices()}))
        raise PolyattnError(
            f"got --device {kind}, which JAX does not see, expected one that is here: {here}"
        ) from error
    placed: AbstractContextManager[Any] = jax.default_device(found[0])
    return placed


def problem_for(problem: Problem) -> Problem:
    """Return the same problem as one of JAX's, where JAX puts its arrays now."""
    kind, arch = importlib.import_module("polyattn.jax.platform").present_device()
    return problem.with_(framework="jax", device=kind, arch=arch, contiguous=True, compiled=False)


def jax_call(case: Case, backend: Backend) -> Callable[[Inputs], Any]:
    """Return what runs inputs of the case through ``polyattn.jax.attention`` on a backend.

    Some cases in blocks of other sizes or cut over devices, see `conformance/jax_ways.py`.
    """
    return _bridged(case, attending(case, backend))


def jax_special(case: Case, backend: Backend) -> Callable[[Inputs], Any] | None:
    """Return what runs a case on a backend for spread sequences or for pages; None for others.

    Raises :class:`InvalidProblem` for a case that is nothing of the kind; so may the call.
    """
    if backend.name in SPREADING:
        return _bridged(case, spreading(case, backend))
    if backend.name == "jax_paged_decode":
        return _bridged(case, paged(case, backend))
    return None


def jax_kernel(case: Case, backend: Backend, problem: Problem) -> Callable[[Inputs], Any]:
    """Return what runs inputs of the case through the kernel, whatever its backend refuses."""
    kernel = backend.load()(problem_for(problem), {})

    def call(options: dict[str, Any], q: Any, k: Any, v: Any, *more: Any) -> Any:
        given = _named(*more)
        return kernel(q, k, v, given["mask"], given["bias"], given["sinks"])

    return _bridged(case, call)


def _named(mask: Any, bias: Any, sinks: Any) -> dict[str, Any]:
    return {"mask": mask, "bias": bias, "sinks": sinks}


def _attending(case: Case, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of arrays, leaves first, that gives a tuple: out, and lse if asked."""
    options = _options(case)

    def attend(leaves: Sequence[Any], bias: Any, mask: Any) -> Any:
        q, k, v, *rest = leaves
        if bias is not None:
            bias = bias.map(lambda name, x: rest[0])
        found = call(options, q, k, v, mask, bias, rest[-1] if case.sinks else None)
        return found if case.lse else (found,)

    return attend


def _pulling(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that gives the gradients of the leaves that are wanted."""
    jax = importlib.import_module("jax")

    def pull(
        wanted: tuple[int, ...], leaves: list[Any], bias: Any, mask: Any, grads: Sequence[Any]
    ) -> Any:
        def of_wanted(*given: Any) -> Any:
            every = dict(enumerate(leaves)) | dict(zip(wanted, given, strict=True))
            return attend(list(every.values()), bias, mask)

        _, back = jax.vjp(of_wanted, *(leaves[i] for i in wanted))
        return back(tuple(grads))

    return pull


def _bridged(case: Case, call: Callable[..., Any]) -> Callable[[Inputs], Any]:
    """Return a function of inputs whose results torch differentiates; compiled once a case."""
    jax = importlib.import_module("jax")
    importlib.import_module("polyattn.jax.kit.pytrees")  # masks and biases pass into jit
    attend = _attending(case, call)
    forward = attend if case.seed % _EAGER == 0 else jax.jit(attend)
    backward = jax.jit(_pulling(attend), static_argnums=0)

    class Through(torch.autograd.Function):
        """The call, with its gradients."""

        @staticmethod
        def forward(ctx: Any, bias: Any, mask: Any, *tensors: Tensor) -> Any:
            ctx.wanted = tuple(i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs)
            with _wide(jax, case):
                ctx.held = [to_jax(x) for x in tensors], bias, mask
                return tuple(map(to_torch, forward(*ctx.held)))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            with _wide(jax, case):
                found = backward(ctx.wanted, *ctx.held, [to_jax(x) for x in grads])
            each = dict(zip(ctx.wanted, map(to_torch, found), strict=True))
            return None, None, *map(each.get, range(len(ctx.held[0])))

    def run(inputs: Inputs) -> Any:
        with _wide(jax, case):
            mask, bias = _mask(inputs.mask), _mask(inputs.bias)
        payload = None if inputs.bias is None else inputs.bias.payload
        every = (inputs.q, inputs.k, inputs.v, payload, inputs.sinks)
        found = Through.apply(bias, mask, *(x for x in every if x is not None))  # type: ignore[no-untyped-call]
        return found if case.lse else found[0]

    return run


def _options(case: Case) -> dict[str, Any]:
    return {
        "scale": case.scale, "softcap": case.softcap, "layout": case.layout,
        "return_lse": case.lse, "deterministic": True if case.deterministic else None,
    }  # fmt: skip


def _wide(jax: Any, case: Case) -> AbstractContextManager[Any]:
    """JAX has numbers of 64 bits only where it is told so."""
    found: AbstractContextManager[Any] = jax.enable_x64(case.dtype == "float64")
    return found if case.dtype == "float64" else nullcontext()


def _mask(value: Mask | Bias | None) -> Any:
    if value is None:
        return None
    return value.map(lambda name, x: to_jax(x) if isinstance(x, Tensor) else x)


def to_jax(x: Tensor) -> Any:
    """Return a tensor of the CPU as an array of JAX; int64 becomes int32."""
    jnp = importlib.import_module("jax.numpy")
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return jnp.asarray(x.contiguous().view(torch.int16).numpy()).view(jnp.bfloat16)
    if x.dtype == torch.int64:
        x = x.to(torch.int32)
    return jnp.array(x.numpy())


def to_torch(x: Any) -> Tensor:
    """Return an array of JAX as a tensor on the CPU."""
    if x.dtype.name == "bfloat16":
        bits = np.array(x.view("int16"))
        return torch.from_numpy(bits).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def forget() -> None:
    """Let go of what JAX has compiled: each case is another program."""
    importlib.import_module("jax").clear_caches()

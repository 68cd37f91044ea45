"""The ways to run a case in JAX, each compiled before the timer, and torch's call beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.cases import WINDOW, Case
from polyattn.bench.cpu.repeats import Step
from polyattn.bench.cpu.ways import Way
from polyattn.jax import attention, explain
from polyattn.masks import Causal, Mask, Window
from polyattn.selection import Accepted

__all__ = ["AUTOMATIC", "JaxInputs", "others", "ours", "step", "stock", "way"]

AUTOMATIC = "automatic"
Array: TypeAlias = jax.Array
Call: TypeAlias = Callable[[Array, Array, Array], Array]


class JaxInputs:
    """The arrays of a case for JAX, and its mask."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.case = inputs, inputs.case
        self.q, self.k, self.v, self.grad_out = map(
            to_jax, (inputs.q, inputs.k, inputs.v, inputs.grad_out)
        )

    @property
    def mask(self) -> Mask | None:
        """The mask as polyattn takes it."""
        return {"causal": Causal(), "window": Window(left=WINDOW - 1, right=0)}.get(self.case.mask)


def to_jax(x: Tensor) -> Array:
    """Return a tensor as an array of JAX."""
    x = x.detach()
    if x.dtype == torch.bfloat16:
        return jax.lax.bitcast_convert_type(jnp.asarray(x.view(torch.int16).numpy()), jnp.bfloat16)
    return jnp.asarray(x.numpy())


def to_torch(x: Array) -> Tensor:
    """Return an array of JAX as a tensor."""
    if x.dtype == jnp.bfloat16:
        bits = np.asarray(jax.lax.bitcast_convert_type(x, jnp.int16))
        return torch.from_numpy(bits.copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def ours(given: JaxInputs, backend: str | None = None) -> Call:
    """Return the public call."""
    mask = given.mask
    return lambda q, k, v: attention(q, k, v, mask=mask, backend=backend)


def stock(case: Case) -> Call:
    """Return the call of JAX that a program makes."""
    options: dict[str, Any] = {"is_causal": case.mask == "causal"}
    if case.mask == "window":
        options["local_window_size"] = (WINDOW - 1, 0)
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, **options)


def others(given: JaxInputs, chosen: str) -> list[str]:
    """Return the other backends that can run the case and are exact."""
    decisions = explain(given.q, given.k, given.v, mask=given.mask).decisions
    return [
        name
        for name, decision in decisions.items()
        if isinstance(decision, Accepted) and name not in (chosen, "jax_reference")
    ]


def step(call: Call, given: JaxInputs) -> Step:
    """Compile and return what is timed: the forward pass, or forward and backward."""
    run = jax.jit(_trained(call) if given.case.train else call)
    arrays = (given.q, given.k, given.v, *((given.grad_out,) if given.case.train else ()))
    jax.block_until_ready(run(*arrays))
    return Step(lambda: jax.block_until_ready(run(*arrays)))


def _trained(call: Call) -> Callable[..., Any]:
    def run(q: Array, k: Array, v: Array, g: Array) -> Any:
        _, pull = jax.vjp(call, q, k, v)
        return pull(g)

    return run


def way(name: str, call: Call) -> Way:
    """Return a call of JAX as one on tensors, so that it is checked as all others are."""
    compiled, trained = jax.jit(call), jax.jit(_trained(call))

    class Bridge(torch.autograd.Function):
        """The call, with its gradients."""

        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Tensor:
            ctx.save_for_backward(*tensors)
            return to_torch(compiled(*map(to_jax, tensors)))

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            arrays = map(to_jax, (*ctx.saved_tensors, grads[0]))
            return tuple(map(to_torch, trained(*arrays)))

    return Way(name, lambda q, k, v: Bridge.apply(q, k, v))  # type: ignore[no-untyped-call,no-any-return]

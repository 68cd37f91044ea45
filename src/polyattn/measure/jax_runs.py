"""A recorded call of JAX, made again: the tensors of the truth as JAX arrays, compiled as JAX does.

The call's arguments are torch's, of which the float64 truth is computed; the candidates are JAX's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from polyattn.conformance.jax_calls import to_jax, to_torch
from polyattn.measure.inputs import Inputs

__all__ = ["JaxRun"]


class JaxRun:
    """A kernel of JAX on some inputs: forward, a training step, and its results as tensors.

    Both steps wait for the device. Kernels that compile nothing themselves are compiled here, as
    the front does it.
    """

    def __init__(self, kernel: Callable[..., Any], inputs: Inputs) -> None:
        self._jax: Any = importlib.import_module("jax")
        importlib.import_module("polyattn.jax.kit.pytrees")  # masks and biases pass into jit
        self._inputs = inputs
        bias: Any = inputs.bias
        self._mask: Any = None if inputs.mask is None else inputs.mask.map(_moved)
        self._bias: Any = None if bias is None else bias.map(_moved)
        every = {"query": inputs.q, "key": inputs.k, "value": inputs.v, "sinks": inputs.sinks}
        self._given = {name: None if x is None else to_jax(x) for name, x in every.items()}
        self._given["bias"] = None if self._bias is None else self._bias.payload
        self._dropout_key = self._jax.random.key(0) if inputs.problem.dropout_p else None

        def attend(query: Any, key: Any, value: Any, bias: Any, mask: Any, sinks: Any) -> Any:
            held = None if self._bias is None else self._bias.map(lambda name, x: bias)
            return kernel(query, key, value, mask, held, sinks, self._dropout_key)

        self._attend = attend
        self._forward = self._jax.jit(attend)
        self._learn = self._jax.jit(self._gradients)

    def _gradients(self, wanted: dict[str, Any], given: dict[str, Any], g: Any) -> Any:
        def of_wanted(wanted: dict[str, Any]) -> Any:
            found = self._attend(**{**given, **wanted}, mask=self._mask)
            return found[0] if isinstance(found, tuple) else found

        out, pull = self._jax.vjp(of_wanted, wanted)
        return out, pull(g)[0]

    def forward(self) -> Any:
        """Run the call, and wait."""
        return self._jax.block_until_ready(self._forward(**self._given, mask=self._mask))

    def stepper(self) -> Callable[[], Any]:
        """Return a function that runs forward and backward, and waits."""
        g = to_jax(self._inputs.grad_out.cpu())
        wanted = {name: self._given[name] for name in self._inputs.leaves}
        return lambda: self._jax.block_until_ready(self._learn(wanted, self._given, g))

    def results(self, grad_out: Tensor) -> dict[str, Tensor]:
        """Return out, lse and gradients by name, as tensors."""
        given = self.forward()
        out, lse = given if isinstance(given, tuple) else (given, None)
        found = {"out": to_torch(out)}
        if lse is not None:
            found["lse"] = to_torch(lse)
        if leaves := self._inputs.leaves:
            wanted = {name: self._given[name] for name in leaves}
            _, grads = self._learn(wanted, self._given, to_jax(grad_out.cpu()))
            found |= {name: to_torch(x) for name, x in grads.items()}
        return found


def _moved(name: str, x: Any) -> Any:
    return to_jax(x) if isinstance(x, Tensor) else x

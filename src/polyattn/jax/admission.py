"""JAX's side of the door: how admission sees arrays, and what is around a call."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.jax.context import spread_here
from polyattn.jax.kit.axes import axis_size
from polyattn.jax.kit.masking import bind_mask, known
from polyattn.jax.kit.pytrees import ensure_pytree
from polyattn.jax.kit.spread_sequence import SpreadSequence
from polyattn.jax.platform import arch_of, device_of
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.problem import Problem
from polyattn.problem.admission import ArrayFacts, Other, Surroundings
from polyattn.problem.admission import admit as admit_call

__all__ = ["FRONT", "Call", "admit", "facts_of"]


class Call(NamedTuple):
    """A checked call: its problem, and its mask, bias and sinks as JAX arrays."""

    problem: Problem
    mask: Mask | None
    bias: Bias | None
    sinks: jax.Array | None


def facts_of(x: Any) -> ArrayFacts | Other:
    """Return what admission is told of an argument."""
    if isinstance(x, (ArrayFacts, Other)):
        return x
    if isinstance(x, np.ndarray) and not x.dtype.isnative:
        hint = f"JAX reads no other byte order: cast it with astype(numpy.{x.dtype.name})"
        return Other(f"numpy.ndarray of {x.dtype.str}", True, hint)
    if isinstance(x, np.ma.MaskedArray):
        hint = (
            "JAX reads no mask of an array: fill it with filled(...), and say what may be seen by "
            "mask=polyattn.Dense(...)"
        )
        return Other("MaskedArray", True, hint)
    if isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):  # keys of jax.random
            return ArrayFacts(_sizes(x.shape), str(x.dtype), device_of(x))
        kept = jax.dtypes.canonicalize_dtype(x.dtype) if x.dtype.kind in "fiub" else x.dtype
        if kept != x.dtype and isinstance(x, np.ndarray):
            hint = (
                f"JAX would make it {kept.name}: cast it with astype(numpy.{kept.name}), or set "
                "jax_enable_x64"
            )
            return Other(f"numpy.ndarray of {x.dtype.name}", True, hint)
        return ArrayFacts(_sizes(x.shape), x.dtype.name, device_of(x))
    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
    hint = "jax.numpy.asarray makes it one" if is_array else ""
    if type(x).__module__.partition(".")[0] == "torch":
        hint = "call polyattn.torch.attention with tensors"
    return Other(type(x).__name__, is_array, hint)


def _sizes(shape: Any) -> tuple[int, ...]:
    """Return a shape whose sizes are numbers; comparing symbolic ones fails in JAX's own words."""
    for size in shape:
        if hasattr(size, "scope"):  # as of jax.export.symbolic_shape
            sizes = ", ".join(map(str, shape))
            raise InvalidProblem(
                f"got an array of shape ({sizes}), expected numbers: a choice needs sizes that are "
                "known; export with numbers, once for each size."
            )
    return tuple(shape)


class JaxFront:
    """JAX arrays, traced or not, for :class:`polyattn.problem.admission.Front`."""

    framework = "jax"
    array_type = "jax.Array"
    facts = staticmethod(facts_of)
    known = staticmethod(known)

    def surroundings(self, query: ArrayFacts) -> Surroundings:
        # whether gradients are taken is not known until they are: see polyattn.jax.differentiation
        return Surroundings(arch=arch_of(query.device_type), spread=_spread())

    def bind(self, mask: Mask, device: str) -> Mask:
        return bind_mask(mask)

    def arange(self, size: int) -> Any:
        return np.arange(size)


def _spread() -> str | None:
    """Return how the sequence is spread here; raise where an axis of it is bound to no mesh."""
    here = spread_here()
    if here is None:
        return None
    axes, balance, local = here
    sizes = tuple((axis, axis_size(axis)) for axis in axes)
    return str(SpreadSequence(sizes, balance, local))


FRONT = JaxFront()


def admit(q: Any, k: Any, v: Any, **options: Any) -> Call:
    """Check a call of :func:`polyattn.jax.attention`; raise :class:`InvalidProblem`."""
    for name in ("mask", "bias"):
        if isinstance(options.get(name), (Mask, Bias)):
            ensure_pytree(options[name])
    bias, sinks = options.get("bias"), options.get("sinks")
    if isinstance(bias, Bias) and isinstance(bias.payload, np.ndarray):
        _keeps(facts_of(bias.payload), "bias")
        bias = options["bias"] = bias.map(lambda name, x: jnp.asarray(x))
    problem, mask, _ = admit_call(q, k, v, front=FRONT, **options)
    if isinstance(sinks, np.ndarray):
        sinks = jnp.asarray(sinks)
    return Call(problem, mask, bias, sinks)


def _keeps(found: ArrayFacts | Other, name: str) -> None:
    if isinstance(found, Other):
        raise InvalidProblem(
            f"got {name} of type {found.type_name}, expected a jax.Array; {found.hint}."
        )

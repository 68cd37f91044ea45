"""The rules of a call of ``attention``, in the order in which they are checked."""

from __future__ import annotations

import math
import numbers
from typing import Any, NamedTuple

from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.masks.simplify import simplify
from polyattn.problem import DTYPES, LAYOUTS, MaskFacts, Problem
from polyattn.problem.admission.arrays import ArrayFacts, Front, Other, kind_of, no_array
from polyattn.problem.admission.masks import (
    check_bias_shape,
    check_devices,
    check_mask,
    packed_sequences,
)

__all__ = ["Admitted", "admit", "lengths_of", "number"]


class Admitted(NamedTuple):
    """A call that is one: its problem, and its mask, simplified and bound to the device."""

    problem: Problem
    mask: Mask | None
    cast: str | None  # what autocast turns the inputs into


def admit(
    query: Any,
    key: Any,
    value: Any,
    *,
    front: Front,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    dropout_p: Any = 0.0,
    layout: Any = "BTNH",
    return_lse: Any = False,
    deterministic: bool | None = None,
    is_simple: bool = False,
) -> Admitted:
    """Check a call of ``attention``; raise :class:`InvalidProblem` for what is none.

    Arrays are whatever `front` takes facts of. `is_simple`: the lengths have simplified the mask
    already, as a compiler does that knows them as symbols only.
    """
    if layout not in LAYOUTS:
        raise InvalidProblem(f"got layout={layout!r}, expected one of {', '.join(LAYOUTS)}.")
    q = _input("query", query, layout, front)
    around = front.surroundings(q)
    dtype = around.cast or q.dtype
    if dtype not in DTYPES:
        raise InvalidProblem(f"got query of dtype {dtype}, expected one of {', '.join(DTYPES)}.")
    k, v = (
        _alike(name, _input(name, x, layout, front), q, around.cast)
        for name, x in (("key", key), ("value", value))
    )
    batch, q_len, heads, kv_len, kv_heads, head_dim, value_dim = lengths_of(
        q.shape, k.shape, v.shape, layout
    )
    _check_types(mask, bias, front)
    if layout == "packed":
        batch = packed_sequences(mask)
    elif mask is not None and not is_simple and around.spread is None:
        mask = simplify(mask, q_len, kv_len)
    if mask is not None:
        check_devices(mask, q.device, front)
        mask = front.bind(mask, q.device)
    problem = Problem(
        batch=batch, q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads,
        head_dim=head_dim, value_dim=value_dim, dtype=dtype, device=q.device_type,
        arch=around.arch, framework=front.framework, layout=layout, mask=MaskFacts.of(mask),
        scale=None if scale is None else number("scale", scale),
        softcap=None if softcap is None else number("softcap", softcap),
        dropout_p=number("dropout_p", dropout_p),
        lse=return_lse is not None and truth("return_lse", return_lse),
        deterministic=(
            around.deterministic if deterministic is None else truth("deterministic", deterministic)
        ),
        grad=around.trains and any(x.grad for x in (q, k, v)),
        contiguous=all(x.unit_stride for x in (q, k, v)), compiled=around.compiled,
        spread=around.spread, higher=around.higher,
        **_added(bias, sinks, heads, q.device, around.trains, front),
    )  # fmt: skip
    _check_arrays(mask, bias, problem, front)
    return Admitted(problem, mask, None if {q.dtype, k.dtype, v.dtype} == {dtype} else around.cast)


def _check_arrays(mask: Mask | None, bias: Bias | None, problem: Problem, front: Front) -> None:
    if mask is not None:
        read = front.known if problem.spread is None else _not_read
        check_mask(mask, problem, read, front.arange)
    if bias is not None:
        check_bias_shape(bias, problem)


def _not_read(payload: Any) -> None:
    """Know nothing of an array: lengths of a spread sequence are those of the whole."""


def _input(name: str, x: Any, layout: str, front: Front) -> ArrayFacts:
    found = front.facts(x)
    if isinstance(found, Other):
        raise no_array(name, found, front)
    if found.form != "strided":
        raise InvalidProblem(
            f"got a nested or sparse {name}, expected a strided tensor; pass packed rows with "
            'layout="packed" and Packed(cu_q, cu_kv).'
        )
    rank = 3 if layout == "packed" else 4
    if len(found.shape) != rank:
        letters = "(total, N, H)" if layout == "packed" else f"({', '.join(layout)})"
        raise InvalidProblem(
            f"got {name} of shape {found.shape}, expected {rank} dims {letters} for "
            f"layout={layout!r}."
        )
    return found


def _alike(name: str, x: ArrayFacts, q: ArrayFacts, cast: str | None) -> ArrayFacts:
    both_cast = cast is not None and x.dtype in DTYPES and x.dtype != "float64"
    if (x.dtype != q.dtype and not both_cast) or x.device != q.device:
        raise InvalidProblem(
            f"got {name} {x.dtype} on {x.device} with query {q.dtype} on {q.device}, expected "
            "one dtype and one device; cast or move it."
        )
    return x


def lengths_of(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], layout: str
) -> tuple[int, int, int, int, int, int, int]:
    """Return B, T, N, S, K, H, V from three shapes of the layout's rank; B is 1 when packed.

    >>> lengths_of((2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 32), "BTNH")
    (2, 8, 4, 9, 2, 16, 32)
    """
    if layout == "BNTH":
        (b, n, t, h), (bk, kh, s, hk), (bv, kv, sv, value_dim) = q, k, v
    elif layout == "BTNH":
        (b, t, n, h), (bk, s, kh, hk), (bv, sv, kv, value_dim) = q, k, v
    else:
        (t, n, h), (s, kh, hk), (sv, kv, value_dim) = q, k, v
        b = bk = bv = 1
    if (bk, hk) != (b, h) or (bv, sv, kv) != (bk, s, kh) or h == 0:
        raise InvalidProblem(
            f"got query {tuple(q)}, key {tuple(k)}, value {tuple(v)} ({layout}), expected one "
            "batch size, one head dim >= 1 of query and key, and as many keys and key/value heads "
            "in key and value."
        )
    return b, t, n, s, kh, h, value_dim


def _check_types(mask: Any, bias: Any, front: Front) -> None:
    for name, x, kind, wrapper in (
        ("mask", mask, Mask, "Dense"),
        ("bias", bias, Bias, "DenseBias"),
    ):
        if x is None or isinstance(x, kind):
            continue
        other = kind_of(x, front)
        hint = (
            f"wrap it as polyattn.{wrapper}({name})"
            if other.is_array
            else f"see polyattn.{kind.__module__.split('.')[1]}"
        )
        raise InvalidProblem(
            f"got {name} of type {other.type_name}, expected a {kind.__name__}; {hint}."
        )


def number(name: str, x: Any) -> float:
    """Return a finite real number as a float; raise :class:`InvalidProblem` for anything else."""
    if isinstance(x, bool) or not isinstance(x, numbers.Real):
        kind = x.type_name if isinstance(x, Other) else type(x).__name__
        hint = ""
        if x.is_array if isinstance(x, Other) else hasattr(x, "shape"):
            hint = f"; pass float({name})"
            if name == "scale":  # scores are linear in the query
                hint += ", or multiply the query by what is learnt or traced and pass scale=1.0"
        raise InvalidProblem(f"got {name} of type {kind}, expected a Python number{hint}.")
    if not -math.inf < float(x) < math.inf:
        raise InvalidProblem(f"got {name}={float(x)!r}, expected a finite number.")
    return float(x)


def truth(name: str, x: Any) -> bool:
    """Return a bool, or an integer that is as good as one; :class:`InvalidProblem` for others.

    >>> truth("deterministic", 1)
    True
    """
    if isinstance(x, bool | numbers.Integral) and x in (0, 1):
        return bool(x)
    if type(x).__name__ in ("bool", "bool_"):  # NumPy's
        return bool(x)
    kind = x.type_name if isinstance(x, Other) else type(x).__name__
    raise InvalidProblem(f"got {name}={x!r} of type {kind}, expected True or False.")


def _added(
    bias: Bias | None, sinks: Any, heads: int, device: str, trains: bool, front: Front
) -> dict[str, Any]:
    """Return what a problem keeps of bias and sinks."""
    facts: dict[str, Any] = {}
    if bias is not None:
        found = _bias(bias, device, front)
        facts |= {"bias": bias.signature, "bias_grad": trains and found.grad}
    if sinks is not None:
        found = _sinks(sinks, heads, device, front)
        facts |= {"sinks": math.prod(found.shape[1:]), "sinks_grad": trains and found.grad}
    return facts


def _bias(bias: Bias, device: str, front: Front) -> ArrayFacts:
    found = front.facts(bias.payload)
    if isinstance(found, Other):
        raise no_array(f"a {type(bias).__name__}", found, front)
    if found.device != device:
        raise InvalidProblem(
            f"got {bias!r} on {found.device}, expected a {front.array_type} on {device}; move it "
            "there."
        )
    return found


def _sinks(sinks: Any, heads: int, device: str, front: Front) -> ArrayFacts:
    found = front.facts(sinks)
    if isinstance(found, Other):
        raise no_array("sinks", found, front)
    if len(found.shape) not in (1, 2) or found.shape[0] != heads or 0 in found.shape:
        raise InvalidProblem(
            f"got sinks of shape {found.shape}, expected (N,) or (N, M) with N = {heads}."
        )
    if "float" not in found.dtype or found.device != device:
        raise InvalidProblem(
            f"got sinks {found.dtype} on {found.device}, expected floating point on {device}."
        )
    return found

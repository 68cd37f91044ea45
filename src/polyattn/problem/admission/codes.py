"""The rules of a call on quantised keys: those of ``attention``, and those of codes and scales."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.problem import CODES
from polyattn.problem.admission.arrays import ArrayFacts, Front, described
from polyattn.problem.admission.call import Admitted, admit

__all__ = ["admit_quantized", "check_scales"]

_MEND = "polyattn.torch.quantize_kv makes codes and scales"


def admit_quantized(
    query: Any,
    key_codes: Any,
    value_codes: Any,
    key_scales: Any,
    value_scales: Any,
    block_size: Any,
    *,
    front: Front,
    layout: Any,
    **options: Any,
) -> Admitted:
    """Check a call of ``quantized_attention`` but for the values of codes and scales.

    `options` are those of `attention` that it takes: mask, bias, scale, softcap, sinks, return_lse.
    """
    if layout not in ("BTNH", "BNTH"):
        raise InvalidProblem(
            f"got layout={layout!r} with quantised keys, expected 'BTNH' or 'BNTH'; blocks of keys "
            "are counted in each batch entry, which packed rows have none of."
        )
    q, k, v = (front.facts(x) for x in (query, key_codes, value_codes))
    codes = None
    if isinstance(q, ArrayFacts):
        trains = front.surroundings(q).trains
        for name, x in (("key_codes", k), ("value_codes", v)):
            if isinstance(x, ArrayFacts):
                codes = _check_codes(name, x, codes, trains)
        k, v = (replace(x, dtype=q.dtype) if isinstance(x, ArrayFacts) else x for x in (k, v))
    admitted = admit(q, k, v, front=front, layout=layout, **options)
    problem = admitted.problem.with_(quantized=codes)
    if type(block_size) is not int or block_size < 1:
        raise InvalidProblem(
            f"got block_size={block_size!r}, expected how many keys share a scale, an int >= 1."
        )
    device = q.device if isinstance(q, ArrayFacts) else ""
    trains = isinstance(q, ArrayFacts) and front.surroundings(q).trains
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        found = front.facts(scales)
        if not isinstance(found, ArrayFacts) or found.dtype != "float32" or found.device != device:
            raise InvalidProblem(
                f"got {name} {described(scales, front)}, expected float32 on {device}; {_MEND}."
            )
        if found.grad and trains:
            raise _constant(name)
        check_scales(name, found.shape, problem.batch, problem.kv_heads, problem.kv_len, block_size)
    return admitted._replace(problem=problem)


def _check_codes(name: str, x: ArrayFacts, other: str | None, trains: bool) -> str:
    """Return the dtype of codes, which is `other` where that of others is known."""
    if x.dtype not in CODES or other not in (None, x.dtype):
        wanted = " or ".join(CODES) if other is None else f"{other} as key_codes"
        raise InvalidProblem(f"got {name} {x}, expected {wanted}; {_MEND}.")
    if x.grad and trains:
        raise _constant(name)
    return x.dtype


def _constant(name: str) -> InvalidProblem:
    return InvalidProblem(
        f"got {name} that need a gradient, expected constants: rounding has none. Detach them, or "
        "attend to the keys before they are quantised."
    )


def check_scales(
    name: str, shape: tuple[int, ...], batch: int, kv_heads: int, kv_len: int, block_size: int
) -> None:
    """Check that there is a scale for each batch entry, head and block of keys."""
    wanted = (batch, kv_heads, -(-kv_len // block_size))
    if shape != wanted:
        raise InvalidProblem(
            f"got {name} of shape {tuple(shape)}, expected {wanted}: a scale for each batch entry, "
            f"key head and block of {block_size} of the {kv_len} keys."
        )

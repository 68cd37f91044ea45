"""From the flags of the command line to a Problem, without any framework."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from polyattn.cli.arguments import integers
from polyattn.errors import InvalidProblem, near_matches
from polyattn.masks import (
    BlockMap,
    Causal,
    Dense,
    Full,
    Mask,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.masks.simplify import simplify
from polyattn.problem import MaskFacts, Problem

__all__ = ["MASKS", "problem_of"]

_BLOCK = 128


@dataclass(frozen=True)
class _Sizes:
    """An array of which only shape and dtype matter."""

    shape: tuple[int, ...]
    dtype: str = "int32"


@dataclass(frozen=True)
class _Dims:
    b: int
    t: int
    s: int
    n: int
    k: int
    h: int


def _blocks(d: _Dims) -> Mask:
    rows, columns = -(-d.t // _BLOCK), -(-d.s // _BLOCK)
    return BlockMap(_BLOCK, _BLOCK, _Sizes((d.b, d.n, rows, columns)), _Sizes((d.b, d.n, rows)))


MASKS: dict[str, Any] = {
    "Full": lambda d: Full(),
    "Causal": lambda d: Causal(),
    "Padding": lambda d: Padding(kv_lengths=_Sizes((d.b,))),
    "PrefixLM": lambda d: PrefixLM(_Sizes((d.b,))),
    "Segments": lambda d: Segments(_Sizes((d.b, d.t)), _Sizes((d.b, d.s))),
    "Dense": lambda d: Dense(_Sizes((d.b, 1, d.t, d.s), "bool")),
    "BlockMap": _blocks,
}


def problem_of(options: argparse.Namespace) -> Problem:
    """Return the problem that the flags describe; InvalidProblem for what makes no sense."""
    dims = _dims(options)
    mask = _mask(options, dims)
    if mask is not None and options.layout != "packed":
        mask = simplify(mask, dims.t, dims.s)
    return Problem(
        batch=dims.b, q_len=dims.t, kv_len=dims.s, heads=dims.n, kv_heads=dims.k,
        head_dim=dims.h, value_dim=-1 if options.value_dim is None else options.value_dim,
        dtype=options.dtype, layout=options.layout, mask=MaskFacts.of(mask),
        bias=_bias(options, dims), bias_grad=options.bias_grad, scale=options.scale,
        softcap=options.softcap, sinks=options.sinks, dropout_p=options.dropout,
        grad=options.grad, lse=options.lse, deterministic=options.deterministic,
        contiguous=not options.strided, compiled=options.compiled,
    )  # fmt: skip


def _dims(options: argparse.Namespace) -> _Dims:
    packed = options.layout == "packed"
    try:
        sizes = [x or 0 for x in integers("TOTAL,N,H" if packed else "B,T,N,H")(options.q)]
    except argparse.ArgumentTypeError as error:
        raise InvalidProblem(f"--q: {error}.") from None
    b = options.sequences if packed else sizes.pop(0)
    t, n, h = sizes
    s, k = options.kv or (t, n)
    return _Dims(b, t, s, n, k, h)


def _mask(options: argparse.Namespace, dims: _Dims) -> Mask | None:
    masks: list[Mask] = []
    if options.layout == "packed":
        masks.append(Packed(_Sizes((dims.b + 1,)), _Sizes((dims.b + 1,))))
    if options.causal:
        masks.append(Causal(options.causal))
    if options.window:
        masks.append(Window(*options.window))
    if options.padding:
        masks.append(MASKS["Padding"](dims))
    known = {name.lower(): name for name in MASKS}
    for name in options.mask:
        if name.lower() not in known:
            raise InvalidProblem(
                f"got --mask {name!r}, expected one of {', '.join(MASKS)} (--causal, --window and "
                f"--layout packed for the others).{near_matches(name, MASKS)}"
            )
        masks.append(MASKS[known[name.lower()]](dims))
    if not masks:
        return None
    joined = masks[0]
    for mask in masks[1:]:
        joined = joined & mask
    return joined


def _bias(options: argparse.Namespace, dims: _Dims) -> str | None:
    if options.bias is None:
        return None
    dtype = Problem(
        batch=1, q_len=1, kv_len=1, heads=1, kv_heads=1, head_dim=1, dtype=options.dtype
    ).dtype
    if options.bias == "alibi":
        return Alibi(_Sizes((dims.n,), dtype)).signature
    return DenseBias(_Sizes((dims.b, dims.n, dims.t, dims.s), dtype)).signature

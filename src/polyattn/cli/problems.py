"""From the flags of the command line to a Problem, without any framework."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from polyattn.cli.arguments import integers
from polyattn.errors import InvalidProblem, near_matches
from polyattn.masks import LEAVES, Causal, Mask, Packed, Padding, Window
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.masks.needs import Shape, Sizes, dims_of
from polyattn.masks.simplify import simplify
from polyattn.problem import MaskFacts, Problem

__all__ = ["MASKS", "problem_of"]


@dataclass(frozen=True)
class _Array:
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


class _Shapes:
    """Arrays of masks, as far as a choice rests on them."""

    def lengths(self, shape: Shape, most: int) -> _Array:
        return _Array(dims_of(shape))

    def starts(self, shape: Shape, most: int) -> _Array:
        return _Array(dims_of(shape))

    def ids(self, shape: Shape) -> _Array:
        return _Array(dims_of(shape))

    def offsets(self, shape: Shape, total: int) -> _Array:
        return _Array(dims_of(shape))

    def blocks(self, shape: Shape, columns: int) -> tuple[_Array, _Array]:
        return _Array(dims_of(shape)), _Array(dims_of(shape)[:-1])

    def booleans(self, shape: Shape) -> _Array:
        return _Array(dims_of(shape), "bool")


MASKS = {kind.__name__: kind for kind in LEAVES if kind is not Packed}
"""What ``--mask`` names: packed sequences have a layout, and with it their mask."""


def problem_of(options: argparse.Namespace) -> Problem:
    """Return the problem that the flags describe; InvalidProblem for what makes no sense."""
    _check_together(options)
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


def _check_together(options: argparse.Namespace) -> None:
    """Refuse what only another option gives a meaning: it would be left out without a word."""
    if options.bias_grad and options.bias is None:
        raise InvalidProblem("got --bias-grad without --bias, expected the bias: add --bias.")
    if options.sequences != 1 and options.layout != "packed":
        raise InvalidProblem(
            f"got --sequences {options.sequences} with --layout {options.layout}, expected "
            "--layout packed; the batch of the others is B of --q B,T,N,H."
        )


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
    sizes, arrays = Sizes(dims.b, dims.t, dims.s, dims.n), _Shapes()
    if options.layout == "packed":
        masks.append(Packed.example(sizes, arrays))
    if options.causal:
        masks.append(Causal(options.causal))
    if options.window:
        masks.append(Window(*options.window))
    if options.padding:
        masks.append(Padding.example(sizes, arrays))
    known = {name.lower(): kind for name, kind in MASKS.items()}
    for given in options.mask:
        name = given.removeprefix("~")
        if name.lower() not in known:
            raise InvalidProblem(
                f"got --mask {given!r}, expected one of {', '.join(MASKS)}, or ~ and one of them "
                "(--causal and --window say more, --layout packed packs sequences)."
                f"{near_matches(name, MASKS)}"
            )
        mask = known[name.lower()].example(sizes, arrays)
        masks.append(mask if name == given else ~mask)
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
        return Alibi(_Array((dims.n,), dtype)).signature
    return DenseBias(_Array((dims.b, dims.n, dims.t, dims.s), dtype)).signature

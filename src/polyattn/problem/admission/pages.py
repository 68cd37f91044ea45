"""The rules of a call of ``paged_attention``: those of ``attention``, and those of its pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.masks import Mask
from polyattn.problem import MaskFacts, Problem
from polyattn.problem.admission.arrays import ArrayFacts, Front, Other, described, no_array
from polyattn.problem.admission.call import admit

__all__ = ["admit_pages", "check_lengths"]

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def admit_pages(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    table: Any,
    lengths: Any,
    *,
    front: Front,
    mask: Any,
    layout: Any,
    **options: Any,
) -> Problem:
    """Check all of a paged call but the values of table and lengths.

    `options` are those of `attention` that pages leave: scale, softcap, sinks, return_lse.
    """
    if layout not in ("BTNH", "BNTH"):
        raise InvalidProblem(
            f"got layout={layout!r} with paged keys, expected 'BTNH' or 'BNTH'; give each sequence "
            "its row of the block table instead of packing."
        )
    _check_mask(mask)
    rows = front.facts(table)
    if isinstance(rows, Other):
        raise no_array("a block table", rows, front)
    if len(rows.shape) != 2:
        raise InvalidProblem(
            f"got a block table {described(table, front)}, expected a "
            f"{front.array_type} (B, most pages)."
        )
    q, k, v = (front.facts(x) for x in (query, key_pages, value_pages))
    if isinstance(q, ArrayFacts) and len(q.shape) == 4:
        if isinstance(k, ArrayFacts) and isinstance(v, ArrayFacts) and k.shape and v.shape:
            if k.shape[0] != v.shape[0]:
                raise InvalidProblem(
                    f"got {k.shape[0]} pages of keys and {v.shape[0]} pages of values, expected "
                    "as many of both."
                )
            # but for their number, pages are like keys: let each sequence have one
            k, v = (replace(x, shape=(q.shape[0], *x.shape[1:])) for x in (k, v))
        cast = front.surroundings(q).cast
        if cast is not None and q.dtype not in (cast, "float64"):
            raise InvalidProblem(
                f"got {q.dtype} pages under autocast to {cast}, expected pages in {cast}: a cache "
                "is not cast at every call."
            )
    one = admit(q, k, v, front=front, layout=layout, **options).problem
    problem = one.with_(
        kv_len=rows.shape[1] * one.kv_len, paged=one.kv_len, mask=MaskFacts.of(mask)
    )
    device = q.device if isinstance(q, ArrayFacts) else ""
    _check_integers("block_table", table, (problem.batch, rows.shape[1]), device, front)
    _check_integers("lengths", lengths, (problem.batch,), device, front)
    return problem


def _check_mask(mask: Any) -> None:
    if mask is not None and not (isinstance(mask, Mask) and mask.is_static):
        raise InvalidProblem(
            f"got mask={mask!r} with paged keys, expected None, or masks of positions (Causal, "
            "Window, Chunked, Dilated, FirstKeys) joined by &, | and ~: what a sequence's length "
            "hides needs no mask."
        )
    if mask is not None and mask.align == "top_left":
        raise InvalidProblem(
            f"got mask={mask!r} with paged keys, expected bottom_right masks: the queries are the "
            "last positions of their sequences."
        )


def _check_integers(name: str, x: Any, shape: tuple[int, ...], device: str, front: Front) -> None:
    found = front.facts(x)
    if isinstance(found, Other):
        raise no_array(name, found, front)
    if found.shape != shape or found.dtype not in _INTEGERS or found.device != device:
        raise InvalidProblem(
            f"got {name} {described(x, front)}, expected integers {shape} on {device}."
        )


def check_lengths(low: int, high: int, problem: Problem) -> None:
    """Check the least and the greatest length of a paged call's sequences."""
    if low < 0 or high > problem.kv_len:
        page = problem.paged or 1
        raise InvalidProblem(
            f"got lengths from {low} to {high}, expected 0 to {problem.kv_len}: "
            f"{problem.kv_len // page} pages of {page} keys a sequence."
        )

"""From an operator's arguments to those of ``attention``: each is mapped, or refused."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from polyattn.errors import InvalidProblem
from polyattn.jax.admission import facts_of
from polyattn.jax.operator.metadata import AttentionMetadata
from polyattn.jax.operator.metadata_checks import number
from polyattn.masks import Causal, Dense, Mask, Packed, Segments, Window
from polyattn.masks.biases import Bias, DenseBias
from polyattn.problem.admission import Other

__all__ = ["Arguments", "arguments", "arrays_of", "scale_of", "sinks_of", "window_of"]


class Arguments(NamedTuple):
    """A call of ``attention``: arrays, and options by its own names."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    options: dict[str, Any]


def arguments(
    metadata: AttentionMetadata,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Any = None,
    bias: Any = None,
    init_bias: Any = None,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    cum_seqlens_q: Any = None,
    cum_seqlens_k: Any = None,
    dropout_rng: Any = None,
    deterministic: bool = True,
    precision: Any = None,
    BTHD: bool = True,
) -> Arguments:
    """Map a call; metadata stands for what the call does not say."""
    if precision not in (None, "default", jax.lax.Precision.DEFAULT):
        raise InvalidProblem(
            f"got precision={precision!r}, expected None: products are of the inputs' dtype and "
            "sums are float32 in every backend; cast the inputs for more."
        )
    packed = cum_seqlens_q is not None or cum_seqlens_k is not None
    query, key, value = arrays_of(metadata, query=query, key=key, value=value)
    dropout = 0.0 if deterministic else float(metadata.dropout_prob)
    options = {
        "mask": _mask(mask, causal, sliding_window, (q_segment_ids, kv_segment_ids),
                      (cum_seqlens_q, cum_seqlens_k)),
        "bias": _bias(bias, init_bias),
        "scale": scale_of(metadata, softmax_scale),
        "softcap": metadata.soft_cap if logits_soft_cap is None else logits_soft_cap,
        "sinks": sinks_of(softmax_aux),
        "dropout_p": dropout,
        "dropout_key": dropout_rng if dropout > 0 else None,
        "layout": "packed" if packed else "BTNH" if BTHD else "BNTH",
    }  # fmt: skip
    return Arguments(query, key, value, options)


def arrays_of(metadata: AttentionMetadata, **arrays: Any) -> list[Any]:
    """Return arrays in the runtime dtype; raise :class:`InvalidProblem` for what is no array."""
    for name, x in arrays.items():
        if isinstance(found := facts_of(x), Other):
            hint = f"; {found.hint}" if found.hint else ""
            raise InvalidProblem(
                f"got {name} of type {found.type_name}, expected a jax.Array{hint}."
            )
    dtype, wide = metadata.runtime_dtype, metadata.runtime_softmax_dtype
    every = list(arrays.values())
    every = every if dtype is None else [jnp.asarray(x).astype(dtype) for x in every]
    if wide == "float64" and every[0].dtype != jnp.float64:
        raise InvalidProblem(
            f"got runtime_softmax_dtype='float64' for a query of {every[0].dtype}, expected "
            "float64: backends compute the soft-max of such calls in float32. Set "
            "runtime_dtype='float64' too (and jax_enable_x64)."
        )
    return every


def scale_of(metadata: AttentionMetadata, scale: Any) -> float | None:
    """Return the scale of a call, else the metadata's, as a number of Python."""
    if scale is None:
        return metadata.softmax_scale
    return number("softmax_scale", scale, "a finite number", -math.inf)


def sinks_of(softmax_aux: Any) -> Any:
    """Return sinks; a list of numbers becomes an array."""
    return jnp.asarray(softmax_aux) if isinstance(softmax_aux, (list, tuple)) else softmax_aux


def _mask(
    mask: Any, causal: bool, window: Any, ids: tuple[Any, Any], offsets: tuple[Any, Any]
) -> Mask | None:
    parts: list[Mask] = []
    if isinstance(mask, Mask):
        parts.append(mask)
    elif mask is not None:
        if getattr(mask, "dtype", None) != jnp.bool_:
            raise InvalidProblem(
                "got a mask that is neither a polyattn mask nor an array of booleans, expected one "
                "of them (True = attend); pass numbers that are added as bias."
            )
        parts.append(Dense(mask))
    if not isinstance(causal, (bool, np.bool_)):
        raise InvalidProblem(f"got causal={causal!r}, expected True or False.")
    if causal:
        parts.append(Causal())
    if window is not None:
        parts.append(window_of(window))
    if ids[0] is not None or ids[1] is not None:
        if ids[0] is None:
            raise InvalidProblem("got kv_segment_ids alone, expected q_segment_ids with them.")
        parts.append(Segments(*ids))
    if offsets[0] is not None or offsets[1] is not None:
        if offsets[0] is None:
            raise InvalidProblem("got cum_seqlens_k alone, expected cum_seqlens_q with it.")
        parts.append(Packed(*offsets))
    joined: Mask | None = None
    for part in parts:
        joined = part if joined is None else joined & part
    return joined


def window_of(window: Any) -> Window:
    """Return the window of a size: (left, right) count other keys; an int w is (w, w).

    With a causal mask an int w leaves w + 1 keys, the query's own among them: a model whose window
    counts its own key, as Mistral's, passes one less.

    >>> window_of(3), window_of((3, 0))
    (Window(left=3, right=3), Window(left=3, right=0))
    """
    pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    try:
        left, right = (None if side is None else _count(side) for side in pair)
    except (TypeError, ValueError) as error:
        raise InvalidProblem(
            f"got sliding_window={window!r}, expected a count of other keys, or two of them: "
            "(left, right), each an integer or None."
        ) from error
    return Window(left=left, right=right)


def _count(side: Any) -> int:
    if isinstance(side, bool):
        raise TypeError(side)
    return operator.index(side)


def _bias(bias: Any, init_bias: Any) -> Bias | None:
    """Return the bias; `init_bias` is a function that makes it, called where there is none."""
    if bias is None and init_bias is not None:
        if not callable(init_bias):
            raise InvalidProblem(
                f"got init_bias of type {type(init_bias).__name__}, expected a function that makes "
                "the bias; pass an array as bias."
            )
        bias = init_bias()
    return bias if bias is None or isinstance(bias, Bias) else DenseBias(bias)

"""From an operator's arguments to those of ``attention``: each is mapped, or refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from polyattn.errors import InvalidProblem
from polyattn.jax.operator.metadata import AttentionMetadata
from polyattn.masks import Causal, Dense, Mask, Packed, Segments, Window
from polyattn.masks.biases import Bias, DenseBias

__all__ = ["Arguments", "arguments", "window_of"]


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
    scale = metadata.softmax_scale if softmax_scale is None else softmax_scale
    dropout = 0.0 if deterministic else float(metadata.dropout_prob)
    options = {
        "mask": _mask(mask, causal, sliding_window, (q_segment_ids, kv_segment_ids),
                      (cum_seqlens_q, cum_seqlens_k)),
        "bias": _bias(bias, init_bias),
        "scale": None if scale is None else float(scale),
        "softcap": metadata.soft_cap if logits_soft_cap is None else logits_soft_cap,
        "sinks": softmax_aux,
        "dropout_p": dropout,
        "dropout_key": dropout_rng if dropout > 0 else None,
        "layout": "packed" if packed else "BTNH" if BTHD else "BNTH",
    }  # fmt: skip
    if metadata.runtime_dtype is not None:
        dtype = jnp.dtype(metadata.runtime_dtype)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    return Arguments(query, key, value, options)


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
    if causal:
        parts.append(Causal())
    if window is not None:
        parts.append(window_of(window))
    if ids[0] is not None or ids[1] is not None:
        if ids[0] is None or (ids[1] is None and ids[0] is None):
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


def window_of(window: int | tuple[int | None, int | None]) -> Window:
    """Return the window of a size: (left, right) count other keys; an int w is (w, w).

    With a causal mask an int w leaves w + 1 keys, the query's own among them: a model whose window
    counts its own key, as Mistral's, passes one less.

    >>> window_of(3), window_of((3, 0))
    (Window(left=3, right=3), Window(left=3, right=0))
    """
    left, right = (window, window) if isinstance(window, int) else window
    return Window(left=left, right=right)


def _bias(bias: Any, init_bias: Any) -> Bias | None:
    """Return the bias; `init_bias` is a function that makes it, called where there is none."""
    if bias is None and init_bias is not None:
        bias = init_bias()
    return bias if bias is None or isinstance(bias, Bias) else DenseBias(bias)

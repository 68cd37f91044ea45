"""The backend that is registered, called as diffusers' dispatcher calls its own.

Its meaning is that of the library's backend "native". The dispatcher hands a backend the keywords
that its signature names and drops the others, so the signature here takes all that is handed on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polyattn.errors import InvalidProblem, Unsupported
from polyattn.integrations.diffusers.context_parallel import attend_over_ranks
from polyattn.integrations.diffusers.on_this_rank import attend, over_four_dims

__all__ = ["polyattn_attention"]


def polyattn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
    **kwargs: Any,
) -> Any:
    """Compute attention of query (B, T, N, H) with key (B, S, K, H) and value (B, S, K, V).

    `attn_mask`: booleans (True = attend) or floats that are added, (B, S) or broadcasting to
    (B, N, T, S). `is_causal`: from the top left, as torch's. Returns (B, T, N, V), with
    `return_lse` also the log-sum-exp, (B, T, N) as diffusers has it. A keyword that is not
    understood is an :class:`~polyattn.errors.Unsupported`.
    """
    for name, given in kwargs.items():
        if given is not None:
            raise Unsupported(
                f"got {name}={type(given).__name__} for attention, which polyattn does not know; "
                "expected none that could change a result. Use another attention backend for this "
                "model, and report the name."
            )
    if not enable_gqa and key.shape[2] != query.shape[2]:
        raise InvalidProblem(
            f"got {query.shape[2]} query heads and {key.shape[2]} key heads, expected as many of "
            "both, or enable_gqa=True."
        )
    attn_mask = over_four_dims(attn_mask, query, key)
    if _parallel_config is not None:
        return attend_over_ranks(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse,
            _parallel_config,
        )  # fmt: skip
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, return_lse)

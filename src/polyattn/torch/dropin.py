"""torch's ``scaled_dot_product_attention``, signature and semantics, through polyattn."""

from __future__ import annotations

from typing import Any

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError

"""What an attention operator returns."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from polyattn.jax.operator.as_plain_data import check_names, described, read_fields, read_json

__all__ = ["AttentionOutput"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttentionOutput:
    """The results of one call; a pytree.

    `attention_weights`: (B, N, T, S), of implementations that are asked for them, else None.
    `attention_outputs`: (B, T, N, V), or (B, N, T, V) where the call's heads come second.
    `lse`: natural log-sum-exp of the scores, (B, N, T) float32, where it was asked for: by it
    partial results over other keys are joined (see `polyattn.partials`). `cache_view`: what was
    handed in as such.

    >>> import jax.numpy as jnp
    >>> out = AttentionOutput(attention_outputs=jnp.ones((1, 2, 1, 4)))
    >>> AttentionOutput.from_json(out.to_json()).attention_outputs.shape
    (1, 2, 1, 4)
    """

    attention_weights: Any = None
    attention_outputs: Any = None
    lse: Any = None
    cache_view: Any = None

    def replace(self, **changes: Any) -> AttentionOutput:
        """Return a copy with some fields changed."""
        check_names(changes, type(self))
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; arrays as lists with shape and dtype."""
        return {f.name: described(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionOutput:
        """Read what :meth:`to_dict` gives."""
        return cls(**read_fields(data, cls))

    def to_json(self, **options: Any) -> str:
        """Return JSON; `options` are those of ``json.dumps``."""
        return json.dumps(self.to_dict(), **options)

    @classmethod
    def from_json(cls, text: str) -> AttentionOutput:
        """Read what :meth:`to_json` gives."""
        return cls.from_dict(read_json(text))

"""A backend as the classes that layers are written against: impl, metadata, builder."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from polyattn.errors import InvalidProblem, near_matches
from polyattn.masks import Causal, Mask
from polyattn.platforms import platform_of
from polyattn.registry import registry

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "backend_class",
]


@dataclass(frozen=True)
class AttentionMetadata:
    """What changes from step to step: the time step, and the mask of this call."""

    current_timestep: int = 0
    mask: Mask | None = None
    bias: Any = None


class AttentionMetadataBuilder:
    """Builds the metadata of a step."""

    def prepare(self) -> None:
        """Nothing has to be prepared."""

    def build(self, **values: Any) -> AttentionMetadata:
        """Return metadata from keyword arguments; an unknown one is an error, never dropped."""
        known = [f.name for f in fields(AttentionMetadata)]
        for name in values:
            if name not in known:
                raise InvalidProblem(
                    f"got metadata {name!r}, expected {', '.join(known)}."
                    f"{near_matches(name, known)}"
                )
        return AttentionMetadata(**values)


class AttentionImpl:
    """One layer's attention, bound to one backend: it runs there or raises.

    `num_heads` N, `head_size` H, `softmax_scale`: None for 1/sqrt(H), `causal`: bottom-right,
    `num_kv_heads` K: None for N.
    """

    backend_name: str

    def __init__(
        self, num_heads: int, head_size: int, softmax_scale: float | None = None,
        causal: bool = False, num_kv_heads: int | None = None, prefix: str = "",
        dropout_p: float = 0.0,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if min(num_heads, head_size, self.num_kv_heads) < 1 or num_heads % self.num_kv_heads:
            raise InvalidProblem(
                f"got num_heads={num_heads}, head_size={head_size}, num_kv_heads="
                f"{self.num_kv_heads}, expected sizes >= 1, heads a multiple of key/value heads."
            )
        self.softmax_scale, self.causal = softmax_scale, causal
        self.prefix, self.dropout_p = prefix, dropout_p
        self._attention = platform_of("torch").attention

    def preprocess_qkv(self, qkv: Any, attn_metadata: AttentionMetadata | None = None) -> Any:
        """Return `qkv` as it is: no backend here wants another layout."""
        return qkv

    def postprocess_output(
        self, output: Any, attn_metadata: AttentionMetadata | None = None
    ) -> Any:
        """Return `output` as it is."""
        return output

    def forward(
        self, query: Any, key: Any, value: Any, attn_metadata: AttentionMetadata | None = None
    ) -> Any:
        """Compute attention of query (B, T, N, H) with key and value (B, S, K, H)."""
        if (
            query.shape[-2:] != (self.num_heads, self.head_size)
            or key.shape[-2] != self.num_kv_heads
        ):
            raise InvalidProblem(
                f"got query {tuple(query.shape)} and key {tuple(key.shape)}, expected "
                f"(B, T, {self.num_heads}, {self.head_size}) and {self.num_kv_heads} heads of keys."
            )
        mask = attn_metadata.mask if attn_metadata is not None else None
        if self.causal:
            mask = Causal() if mask is None else mask & Causal()
        return self._attention(
            query, key, value, mask=mask, scale=self.softmax_scale, dropout_p=self.dropout_p,
            bias=attn_metadata.bias if attn_metadata is not None else None,
            backend=self.backend_name,
        )  # fmt: skip


class AttentionBackend:
    """A chosen backend; asked through its static methods, never instantiated."""

    @staticmethod
    def get_name() -> str:
        """Return the name in upper case, as in ``AttentionBackendEnum``."""
        raise NotImplementedError

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class whose ``forward`` computes."""
        raise NotImplementedError

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the class of the metadata."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds the metadata."""
        return AttentionMetadataBuilder


def backend_class(name: str) -> type[AttentionBackend]:
    """Return the class of the backend called `name`."""
    title = "".join(part.capitalize() for part in name.split("_"))
    impl = type(f"{title}Impl", (AttentionImpl,), {"backend_name": name})
    members = {
        "get_name": staticmethod(name.upper),
        "get_impl_cls": staticmethod(lambda: impl),
        "__doc__": f"{registry.get(name, 'torch').summary or name}, as the class that layers use.",
    }
    return type(f"{title}Backend", (AttentionBackend,), members)

"""What FastVideo's own layers tell an impl, read as its own dense kernels read it.

One metadata object serves every layer of a model there, with sparse kernels and without. The dense
ones read ``attn_mask`` and ``is_causal`` of it, and so is it here: what else it has is for other
layers' kernels.

Source: ``SDPAImpl`` and ``FlashAttentionImpl`` of FastVideo (Apache-2.0).
"""

from __future__ import annotations

import functools
from typing import Any

from polyattn.errors import Unsupported
from polyattn.integrations.fastvideo.layer import AttentionBackend, AttentionImpl, backend_class
from polyattn.integrations.fastvideo.metadata import AttentionMetadata

__all__ = ["for_foreign_layers"]


@functools.cache
def for_foreign_layers(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return `backend`, a class of :mod:`polyattn.integrations.fastvideo.layer`, for their layers.

    >>> backend = for_foreign_layers(backend_class("sdpa_math"))
    >>> backend.get_name(), backend.get_impl_cls()
    ('SDPA_MATH', <class 'polyattn.integrations.fastvideo.foreign_layer.ForeignImpl[sdpa_math]'>)
    """
    impl = backend.get_impl_cls()
    named = impl.__qualname__.partition("[")[2]

    def made(name: str, *bases: type, **members: Any) -> type[Any]:
        members |= {"__module__": __name__, "__qualname__": f"{name}[{named}"}
        return type(f"{name}[{named}", bases, members)

    foreign = made("ForeignImpl", _ForeignImpl, impl, __doc__=impl.__doc__)
    return made(
        "ForeignBackend",
        backend,
        get_impl_cls=staticmethod(lambda: foreign),
        __doc__=backend.__doc__,
    )


class _ForeignImpl(AttentionImpl):
    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        """Compute attention of query (B, T, n, H) with key and value (B, S, k, H)."""
        metadata = _read(attn_metadata, query, key)
        if (self.causal or metadata.is_causal) and query.shape[1] != key.shape[1]:
            raise Unsupported(
                f"got a causal layer with {query.shape[1]} queries and {key.shape[1]} keys, "
                "of which FastVideo's FLASH_ATTN and TORCH_SDPA make different things (aligned at "
                "the ends, at the beginnings); expected as many of both, or the mask as attn_mask "
                "(B, T, S)."
            )
        return super().forward(query, key, value, metadata)

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (self.backend_name, *self.others), self.__getstate__()


def _empty(*names: str) -> AttentionImpl:
    """Return an impl to be filled from what was pickled."""
    backend: Any = backend_class(*names)
    impl = for_foreign_layers(backend).get_impl_cls()
    return impl.__new__(impl)


def _read(metadata: Any, query: Any, key: Any) -> AttentionMetadata:
    if metadata is None or isinstance(metadata, AttentionMetadata):
        return metadata or AttentionMetadata()
    mask = getattr(metadata, "attn_mask", None)
    if mask is not None:
        mask = _over_last_keys(mask.to(device=query.device), key.shape[1])
    return AttentionMetadata(attn_mask=mask, is_causal=bool(getattr(metadata, "is_causal", False)))


def _over_last_keys(mask: Any, kv_len: int) -> Any:
    """Return a mask (..., S) of (..., s): what it does not cover comes first, and is attended."""
    missing = kv_len - mask.shape[-1]
    if missing <= 0:
        return mask
    size = (*mask.shape[:-1], kv_len)
    whole = mask.new_zeros(size) if mask.dtype.is_floating_point else mask.new_ones(size)
    whole[..., missing:] = mask
    return whole

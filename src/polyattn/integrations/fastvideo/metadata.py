"""What changes from step to step: this package's metadata, and that of other code bases.

Layers of other code bases hand their own objects to ``forward``. What such an object says of the
computation is read or refused, never passed over.

Source: the meaning of ``attn_mask`` and ``is_causal`` is that of FastVideo's ``SDPAMetadata``
(Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Number
from typing import Any

from polyattn.errors import InvalidProblem, near_matches
from polyattn.masks import Causal, Dense, Mask
from polyattn.masks.biases import Bias, DenseBias
from polyattn.masks.payload import dtype_name, shape_of

__all__ = ["AttentionMetadata", "AttentionMetadataBuilder", "mask_and_bias", "says_nothing"]


@dataclass(frozen=True)
class AttentionMetadata:
    """The time step, and the mask and bias of this call.

    `mask` and `bias` are polyattn's own. `attn_mask` is an array as other code bases pass it:
    boolean or integer (nonzero = attend), or floating point (added to the scores); (B, s) over the
    last s keys, (B, T, S), or broadcastable to (B, N, T, S). `is_causal`: bottom-right.
    """

    current_timestep: Any = 0
    mask: Mask | None = None
    bias: Bias | None = None
    attn_mask: Any = None
    is_causal: bool = False


_KNOWN = tuple(f.name for f in fields(AttentionMetadata))


class AttentionMetadataBuilder:
    """Builds the metadata of a step."""

    def prepare(self) -> None:
        """Nothing has to be prepared."""

    def build(self, **values: Any) -> AttentionMetadata:
        """Return metadata from keyword arguments; an unknown one that says something is an error.

        >>> AttentionMetadataBuilder().build(current_timestep=3, VSA_sparsity=0.0).current_timestep
        3
        """
        for name, value in values.items():
            if name not in _KNOWN and not says_nothing(value):
                raise InvalidProblem(
                    f"got metadata {name!r}, expected {', '.join(_KNOWN)}."
                    f"{near_matches(name, _KNOWN)}"
                )
        return AttentionMetadata(**{n: v for n, v in values.items() if n in _KNOWN})


def says_nothing(value: object) -> bool:
    """Say whether an argument that is not known may pass: None, zero, False or empty.

    >>> [says_nothing(v) for v in (None, 0, 0.0, False, "", (), {}, 0.1, "x", [0])]
    [True, True, True, True, True, True, True, False, False, False]
    """
    plain = (Number, str, bytes, list, tuple, dict, set, frozenset)
    return value is None or (isinstance(value, plain) and not value)


def mask_and_bias(metadata: Any, batch: int, kv_len: int) -> tuple[Mask | None, Bias | None]:
    """Return what `metadata`, an object of any class or a mapping, says of the computation.

    `batch` and `kv_len` are those of the call. Raises :class:`InvalidProblem` for an attribute
    that is not known and says something.
    """
    if metadata is None:
        return None, None
    own = type(metadata) is AttentionMetadata
    said = vars(metadata) if own else _attributes(metadata)
    mask, bias = said.get("mask"), said.get("bias")
    _check_type("mask", mask, Mask)
    _check_type("bias", bias, Bias)
    dense = said.get("attn_mask")
    if dense is not None:
        dense = _to_bnts(dense, batch, kv_len)
        if "float" not in dtype_name(dense):
            mask = Dense(dense) if mask is None else mask & Dense(dense)
        elif bias is None:
            bias = DenseBias(dense)
        else:
            raise InvalidProblem(
                "got metadata with a bias and an additive attn_mask, expected one of them; add "
                "them up as bias=DenseBias(...)."
            )
    causal = said.get("is_causal")
    if causal is not None and not isinstance(causal, (bool, int)):
        raise InvalidProblem(
            f"got metadata with is_causal={causal!r}, expected True, False or None."
        )
    if causal:
        mask = Causal() if mask is None else mask & Causal()
    return mask, bias


def _check_type(name: str, value: Any, expected: type) -> None:
    if value is not None and not isinstance(value, expected):
        raise InvalidProblem(
            f"got metadata with {name} of type {type(value).__name__}, expected a polyattn "
            f"{expected.__name__}; pass arrays as attn_mask."
        )


def _attributes(metadata: Any) -> dict[str, Any]:
    """Return what is read of a foreign object; refuse other attributes that say something.

    The time step is not looked at: compiled code would be guarded on it.
    """
    is_mapping = isinstance(metadata, Mapping)

    def value_of(name: str) -> Any:
        return metadata.get(name) if is_mapping else getattr(metadata, name, None)

    for name in metadata if is_mapping else _names(metadata):
        if name in _KNOWN or name.startswith("_"):
            continue
        if not says_nothing(value_of(name)):
            raise InvalidProblem(
                f"got metadata of {type(metadata).__name__} with {name} of type "
                f"{type(value_of(name)).__name__}, which no backend here reads; expected "
                f"{', '.join(_KNOWN)}, and everything else None, zero or empty."
                f"{near_matches(name, _KNOWN)}"
            )
    # by name, since these may also be properties, or defaults of the class
    return {name: value_of(name) for name in _KNOWN if name != "current_timestep"}


def _names(metadata: Any) -> list[str]:
    names = [*getattr(metadata, "__dict__", ()), *getattr(metadata, "_fields", ())]
    for kind in type(metadata).__mro__:
        slots = getattr(kind, "__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return names


def _to_bnts(attn_mask: Any, batch: int, kv_len: int) -> Any:
    """Return `attn_mask`, boolean or floating point, of a shape that broadcasts to (B, N, T, S)."""
    if not (hasattr(attn_mask, "shape") and hasattr(attn_mask, "dtype")):
        raise InvalidProblem(
            f"got metadata with attn_mask of type {type(attn_mask).__name__}, expected an array "
            "(B, S), (B, T, S) or broadcastable to (B, N, T, S); masks of polyattn go into mask."
        )
    dtype, shape = dtype_name(attn_mask), shape_of(attn_mask)
    if "complex" in dtype or not any(kind in dtype for kind in ("bool", "int", "float")):
        raise InvalidProblem(
            f"got metadata with attn_mask of dtype {dtype}, expected boolean or integer (nonzero "
            "= attend) or floating point (added to the scores)."
        )
    if "int" in dtype:
        attn_mask = attn_mask != 0
    if len(shape) == 4:
        return attn_mask
    if len(shape) == 3 and shape[0] in (1, batch):
        return attn_mask[:, None]
    if len(shape) == 2 and shape[0] in (1, batch) and shape[1] <= kv_len:
        return _over_last_keys(attn_mask, kv_len)[:, None, None]
    raise InvalidProblem(
        f"got metadata with attn_mask of shape {tuple(shape)} for batch {batch} and {kv_len} keys, "
        "expected (B, s) over the last s keys, (B, T, S), or 4 sizes that broadcast to "
        "(B, N, T, S); write a mask (T, S) as (1, 1, T, S)."
    )


def _over_last_keys(attn_mask: Any, kv_len: int) -> Any:
    """Return (B, S) of (B, s): text follows video, and tokenizers speak of the text alone."""
    missing = kv_len - attn_mask.shape[1]
    if not missing:
        return attn_mask
    size = (attn_mask.shape[0], kv_len)
    additive = "float" in dtype_name(attn_mask)
    whole = attn_mask.new_zeros(size) if additive else attn_mask.new_ones(size)
    whole[:, missing:] = attn_mask
    return whole

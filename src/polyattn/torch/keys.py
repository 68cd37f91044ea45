"""The key of a call: all that a choice rests on but the tensors, built once and handed down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from polyattn import settings
from polyattn.masks import Dense
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.selection import scopes
from polyattn.torch.internals import is_allowed, is_grad_enabled
from polyattn.torch.internals import is_deterministic as determined
from polyattn.torch.repeated_masks import signature_of
from polyattn.torch.size_classes import LAYOUTS

__all__ = [
    "STRANGE",
    "SWITCHES",
    "Key",
    "around",
    "array_key",
    "bias_key",
    "determined",
    "key_for",
    "mask_key",
    "switches",
]

SWITCHES = (
    is_allowed["sdpa_flash"],
    is_allowed["sdpa_efficient"],
    is_allowed["sdpa_math"],
    is_allowed["sdpa_cudnn"],
)
"""torch's own switches of its kernels: flash, efficient, math, cuDNN."""

_state, _local = scopes.state, scopes.local


class Key(NamedTuple):
    """All that a choice rests on but the tensors themselves, which an entry's check compares.

    Built once for a call, by :meth:`of`, and handed down. Of masks and biases it holds what arrays
    of any lengths have in common (see :func:`pattern`), `around` what is in force there (see
    :func:`around`), `switches` torch's own (see :func:`switches`), `door` the way in.
    """

    layout: str
    mask: Any
    scale: Any
    softcap: Any
    dropout_p: Any
    return_lse: Any
    deterministic: Any
    backend: Any
    around: Any
    determined: bool
    switches: Any
    environ: Any
    bias: Any = None
    sinks: Any = None
    layer: Any = None
    cast: Any = None
    pages: Any = None
    causal: Any = None  # of torch's signature, as the next
    gqa: Any = None
    door: str = "attention"
    noted: Any = None  # the choice that a recomputation has to repeat

    @classmethod
    def of(
        cls,
        q: Any,
        k: Any,
        mask: Any,
        bias: Any,
        scale: Any,
        softcap: Any,
        sinks: Any,
        dropout_p: Any,
        layout: Any,
        return_lse: Any,
        deterministic: Any,
        backend: Any,
    ) -> Key:
        """Return the key of a call of ``attention``; TypeError where an option can be in none."""
        if bool in (scale.__class__, softcap.__class__, dropout_p.__class__):  # True equals 1.0
            raise TypeError
        key = cls(
            layout, mask_key(mask, q, k, layout), scale, softcap, dropout_p,
            return_lse, deterministic, backend, around(), determined(), switches(),
            settings.raw(settings.BACKEND), bias_key(bias, q, k, layout), array_key(sinks),
        )  # fmt: skip
        hash(key)
        return key

    @classmethod
    def of_sdpa(
        cls, q: Any, k: Any, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any
    ) -> Key:
        """Return the key of a call with torch's signature; TypeError as of :meth:`of`."""
        if not is_causal.__class__ is gqa.__class__ is bool or dropout_p.__class__ is bool:
            raise TypeError  # torch takes no 1 for True
        key = cls(
            "BNTH", added_key(attn_mask, q, k, "BNTH"), scale, None, dropout_p, False, None, None,
            around(), determined(), switches(), settings.raw(settings.BACKEND), causal=is_causal,
            gqa=gqa, door="sdpa",
        )  # fmt: skip
        hash(key)
        return key

    @classmethod
    def of_paged(
        cls,
        q: Any,
        k: Any,
        block_table: Any,
        lengths: Any,
        mask: Any,
        scale: Any,
        softcap: Any,
        sinks: Any,
        layout: Any,
        return_lse: Any,
        backend: Any,
    ) -> Key:
        """Return the key of a call on pages."""
        signature = None if mask is None else mask.signature
        key = cls.of(
            q, k, None, None, scale, softcap, sinks, 0.0, layout, return_lse, None, backend
        )
        pages = array_key(block_table), array_key(lengths)
        return key._replace(mask=signature, pages=pages, door="paged")

    @classmethod
    def of_quantized(
        cls,
        q: Any,
        k: Any,
        key_scales: Any,
        value_scales: Any,
        block_size: Any,
        mask: Any,
        bias: Any,
        scale: Any,
        softcap: Any,
        sinks: Any,
        layout: Any,
        return_lse: Any,
        backend: Any,
    ) -> Key:
        """Return the key of a call on quantised keys; how many scales there are is not in it."""
        key = cls.of(
            q, k, mask, bias, scale, softcap, sinks, 0.0, layout, return_lse, None, backend
        )
        facts = [array_key(x)[1:] for x in (key_scales, value_scales)]
        # True and 1.0 would find what 1 has left
        pages = *facts, type(block_size), block_size
        hash(pages)
        return key._replace(pages=pages, door="quantized")

    @property
    def is_plainest(self) -> bool:
        """Whether nothing is asked of the call, by its options or from around it."""
        return self == Key(
            self.layout,
            None,
            None,
            None,
            0.0,
            False,
            None,
            None,
            None,
            self.determined,
            None,
            self.environ,
        )


STRANGE = (LookupError, TypeError, AttributeError, ValueError, RuntimeError)
"""What making a key may raise: the options of a call are anything, and it may be no call at all."""


def key_for(q: Any, k: Any, v: Any, of: Callable[..., Key], *options: Any) -> Key | None:
    """Return ``of(q, k, *options)``, or None for calls that the table cannot hold."""
    try:
        if q.is_nested or k.is_nested or v.is_nested:  # which have no shapes, and no check takes
            return None
        return of(q, k, *options)
    except STRANGE:  # for admission to say
        return None


def around() -> Any:
    """Return what is in force around a call, as part of a key; None if nothing ever was."""
    if not _state.armed:
        return None
    asked = scopes.scope.get("") or None, _local.traced, _local.module
    return None if asked == _NOTHING else asked


_NOTHING = (None, None, None)


def switches() -> tuple[bool, ...] | None:
    """Return torch's own switches, in the order of :data:`SWITCHES`; None: all are on."""
    flash, efficient, math, cudnn = SWITCHES
    found = flash(), efficient(), math(), cudnn()
    return None if found == _ALL_ON else found


_ALL_ON = (True, True, True, True)


def array_key(x: Any) -> Any:
    """Return what a choice rests on of an array that is no input."""
    if x is None:
        return None
    return x.shape, x.dtype, x.device, x.requires_grad and is_grad_enabled(), type(x)


def added_key(x: Any, q: Any, k: Any, layout: str) -> Any:
    """Return what a choice rests on of an array that is added to the scores or masks them."""
    if x is None:
        return None
    _, *facts = array_key(x)
    return (pattern(x.shape, q, k, layout), *facts)


def bias_key(bias: Any, q: Any, k: Any, layout: str) -> Any:
    """Return what a choice rests on of a bias."""
    if bias is None:
        return None
    if type(bias) is DenseBias and layout in LAYOUTS:
        return (DenseBias, *added_key(bias.payload, q, k, layout))
    found = array_key(bias.payload)
    if type(bias) is Alibi and len(found[0]) == 2:  # a slope for each entry of the batch, or one
        return (Alibi, found[0][0] == q.shape[0], *found)
    return bias.signature, found


def mask_key(mask: Any, q: Any, k: Any, layout: str) -> Any:
    """Return what a choice rests on of a mask: its signature, or its array's pattern."""
    if mask is None:
        return None
    if type(mask) is Dense and layout in LAYOUTS and type(mask.mask) is Tensor:
        return (Dense, *added_key(mask.mask, q, k, layout))
    if (signature := signature_of(mask)) is not None:
        return signature
    parts = [mask_key(part, q, k, layout) for part in mask.parts]
    if not parts or all(isinstance(part, str) for part in parts):
        return mask.signature
    return (type(mask), *parts)


def pattern(shape: Any, q: Any, k: Any, layout: str) -> tuple[int, ...]:
    """Return an array's shape with -1 where it is as whole as the scores, (B, N, T, S).

    Beside the shapes of query and key it says the array's, and does so for all lengths at once.
    """
    q, k = q.shape, k.shape
    if len(q) == 4:
        row = 1 if layout == "BTNH" else 2
        whole = q[0], q[3 - row], q[row], k[row] if row < len(k) else -1
    else:  # torch's signature has calls of other dims
        whole = (*q[:-1], k[-2] if len(k) > 1 else -1)
    spare = len(shape) - len(whole)
    return tuple(
        -1 if i >= spare and size != 1 and size == whole[i - spare] else size
        for i, size in enumerate(shape)
    )

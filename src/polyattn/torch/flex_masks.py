"""Masks for torch's FlexAttention, made of polyattn's and known again by what they are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from polyattn.errors import InvalidProblem
from polyattn.masks import Index, Mask
from polyattn.torch.kit.masking import bind_mask, check_mask, expand_blocks
from polyattn.torch.repeated_masks import Lengths

__all__ = ["block_mask", "has_own_blocks", "mask_behind"]


class Behind(NamedTuple):
    """The mask that a ``mask_mod`` is made of, and the lengths that it is made for."""

    mask: Mask
    q_len: int
    kv_len: int


def block_mask(
    mask: Mask,
    q_len: int,
    kv_len: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str = "cpu",
    block_size: int | tuple[int, int] = 128,
) -> Any:
    """Return torch's BlockMask of a mask, for FlexAttention (torch.nn.attention.flex_attention).

    `q_len`, `kv_len`: T and S. `batch`, `heads`: B and N, where the mask has arrays of them; None
    for one mask of all. While attention is routed (:class:`polyattn.integrations.sdpa_patch`), a
    call with it runs on the best backend; otherwise FlexAttention computes the same.

    Raises :class:`~polyattn.errors.InvalidProblem` where an array of the mask does not fit.

    >>> from torch.nn.attention.flex_attention import flex_attention
    >>> from polyattn import Causal, Window
    >>> found = block_mask(Causal() & Window(left=99), 512, 512)
    >>> found.shape, found.sparsity()
    ((1, 1, 512, 512), 56.25)
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if not isinstance(mask, Mask):
        raise InvalidProblem(
            f"got mask of type {type(mask).__name__}, expected a Mask; torch's create_block_mask "
            "takes functions."
        )
    bound = bind_mask(mask, torch.device(device))
    check_mask(bound, Lengths(batch or 1, heads or 1, q_len, kv_len, "BNTH"))
    made = create_block_mask(
        _mask_mod(bound, q_len, kv_len), batch, heads, q_len, kv_len, device, block_size
    )
    # What torch makes of it later, with other blocks, has no such mark.
    made.polyattn_blocks = True  # type: ignore[attr-defined]
    return made


def _mask_mod(mask: Mask, q_len: int, kv_len: int) -> Any:
    asked, align = expand_blocks(mask, kv_len), mask.align or "bottom_right"

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return asked.allows(Index(b, h, q_idx, kv_idx, q_len, kv_len, align))

    mask_mod.polyattn_mask = Behind(mask, q_len, kv_len)  # type: ignore[attr-defined]
    return mask_mod


def mask_behind(mask_mod: Any, q_len: int, kv_len: int) -> Mask | None:
    """Return the mask that a ``mask_mod`` is made of, for these lengths; None of any other's."""
    behind = getattr(mask_mod, "polyattn_mask", None)
    if getattr(mask_mod, "__wrapped__", None) is not None:
        return None  # functools.wraps has copied what stood on ours to a function that is not
    if not isinstance(behind, Behind) or (behind.q_len, behind.kv_len) != (q_len, kv_len):
        return None
    return behind.mask


def has_own_blocks(made: Any) -> bool:
    """Whether a block mask has the blocks that :func:`block_mask` found, and no others."""
    return getattr(made, "polyattn_blocks", False) is True

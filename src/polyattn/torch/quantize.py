"""``quantize_kv``: keys or values as codes of 8 bits, with a scale for each block of them.

The scale of a block of a head is its largest magnitude over the largest code. Every entry is
divided by it in float32 and rounded once, to the nearest code, ties to even.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.problem import CODES
from polyattn.torch.kit.quantised import scales_of_rows

__all__ = [
    "FLOATS", "Codes", "check_finite", "checked_form", "encode", "largest_of_blocks",
    "largest_of_rows", "quantize_kv", "scales_for",
]  # fmt: skip

Codes = Literal["int8", "float8_e4m3fn"]
_LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
_SMALLEST = torch.finfo(torch.float32).tiny  # so that no division underflows, nor is one by 0
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def quantize_kv(
    x: Tensor, *, dtype: Codes | torch.dtype = "int8", block_size: int = 64, layout: str = "BTNH"
) -> tuple[Tensor, Tensor]:
    """Return codes and scales of keys or values, as `quantized_attention` takes them.

    `x` (B, S, K, H), or (B, K, S, H) with ``layout="BNTH"``, of any float dtype; `dtype` is
    ``"int8"`` or ``"float8_e4m3fn"``, or torch's dtype of that name. The codes have the shape of
    `x`; the scales are float32 (B, K, ceil(S / block_size)), one for each `block_size` neighbouring
    keys of a head, over all of the head dim.

    With x^ = code * scale, up to a factor of 1 + 2^-15 for the rounding of the quotient:
    abs(x^ - x) <= scale / 2 for int8, and <= max(2^-4 * abs(x), 2^-10 * scale) for float8_e4m3fn.
    The scale is max(abs(x)) / 127, or / 448, and at least 2^-126: zeros stay zeros.

    Raises :class:`~polyattn.errors.InvalidProblem` for NaN and infinity, and for a wrong call.

    >>> import torch
    >>> codes, scales = quantize_kv(torch.tensor([1.27, -0.5, 9.0]).view(1, 3, 1, 1), block_size=2)
    >>> codes.flatten().tolist(), scales
    ([127, -50, 127], tensor([[[0.0100, 0.0709]]]))
    """
    dtype = checked_form(dtype, block_size, layout)
    if not isinstance(x, Tensor) or x.dtype not in FLOATS or x.dim() != 4:
        got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise InvalidProblem(f"got x {got}, expected keys or values {layout} of a float dtype.")
    rows = x.detach() if layout == "BTNH" else x.detach().transpose(1, 2)
    largest = largest_of_rows(rows)
    check_finite("x", largest)
    scales = scales_for(largest_of_blocks(largest, block_size), dtype)
    each = scales_of_rows(scales, rows.shape[1], block_size)
    codes = torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    encode(
        codes if layout == "BTNH" else codes.transpose(1, 2), rows, each.transpose(1, 2)[..., None]
    )
    return codes, scales


def checked_form(dtype: Any, block_size: Any, layout: Any) -> Codes:
    """Check what codes are to be like; return the name of their dtype."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in CODES:
        raise InvalidProblem(f"got dtype={dtype!r}, expected one of {', '.join(map(repr, CODES))}.")
    if type(block_size) is not int or block_size < 1:
        raise InvalidProblem(
            f"got block_size={block_size!r}, expected how many keys share a scale, an int >= 1."
        )
    if layout not in ("BTNH", "BNTH"):
        raise InvalidProblem(f"got layout={layout!r}, expected 'BTNH' or 'BNTH'.")
    return "int8" if name == "int8" else "float8_e4m3fn"


def check_finite(name: str, largest: Tensor) -> None:
    """Refuse rows of which some magnitude is not finite."""
    if not bool(largest.isfinite().all()):
        raise InvalidProblem(
            f"got NaN, an infinity or what float32 cannot hold in {name}, expected finite numbers: "
            "one such entry would be the scale of its whole block."
        )


def largest_of_rows(rows: Tensor) -> Tensor:
    """Return the largest magnitude of each row, (B, S, K) float32; NaN where there is one."""
    if not rows.shape[-1]:
        return rows.new_zeros(rows.shape[:-1], dtype=torch.float32)
    return rows.abs().amax(-1).float()


def largest_of_blocks(largest: Tensor, block_size: int) -> Tensor:
    """Return the largest of each block: (B, S, K) -> (B, K, blocks)."""
    each = largest.transpose(1, 2)
    length = each.shape[-1]
    block = min(block_size, max(length, 1))
    padded = torch.nn.functional.pad(each, (0, -length % block))
    return padded.unflatten(-1, (-1, block)).amax(-1)


def scales_for(largest: Tensor, dtype: str) -> Tensor:
    """Return the scales of blocks with these magnitudes."""
    return (largest / _LARGEST[dtype]).clamp_(min=_SMALLEST)


def encode(codes: Tensor, rows: Tensor, scales: Tensor) -> None:
    """Write the codes of rows, whose scales broadcast to them.

    None is out of range: no entry exceeds the largest, by which the scale was made, and the
    rounding of scale and quotient is far below half a code.
    """
    quotients = rows.float() / scales
    codes.copy_(quotients.round_() if codes.dtype == torch.int8 else quotients)

"""The order in which torch's SDPA tries its kernels, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn.attention import SDPBackend

from polyattn.errors import FlagsError
from polyattn.torch.internals.switches import sdp_priority, set_sdp_priority

__all__ = ["NAMES", "order", "put_order", "take_order"]

NAMES = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
_NUMBERS = {name: number for number, name in NAMES.items()}


def order() -> list[str]:
    """Return the order in force."""
    return [NAMES.get(int(number), str(number)) for number in sdp_priority()]


def put_order(names: Sequence[str]) -> None:
    """Set a whole order, as :func:`take_order` returns it."""
    set_sdp_priority([_NUMBERS[name] for name in names])


def take_order(value: Any) -> list[str]:
    """Return the whole order that a list of some of the kernels asks for; the rest follow.

    Kernels by name (``flash``, ``flash_attention``, ``sdpa_flash``) or as torch's ``SDPBackend``.

    >>> take_order(["math", "sdpa_flash"])[:2]
    ['math', 'flash']
    """
    given = [value] if isinstance(value, str | SDPBackend) else value
    if not isinstance(given, list | tuple) or not given:
        raise _refuse(value, "a list of at least one kernel")
    names = [_name(one) for one in given]
    if len(set(names)) < len(names):
        raise _refuse(value, "each kernel once")
    return [*names, *(name for name in order() if name not in names)]


def _name(value: Any) -> str:
    if isinstance(value, SDPBackend):
        value = NAMES.get(value.value, value)
    if isinstance(value, str):
        short = value.lower().removeprefix("sdpa_").removesuffix("_attention")
        if short in _NUMBERS:
            return short
    raise _refuse(value, f"kernels out of {', '.join(_NUMBERS)}")


def _refuse(value: Any, wanted: str) -> FlagsError:
    return FlagsError(f"got cuda.sdp_priority={value!r}, expected {wanted}.", "cuda.sdp_priority")

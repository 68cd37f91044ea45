"""How a backend may be written: by name, by members of enumerations, or as other code bases do.

torch's ``SDPBackend`` is told by its type's name, so that the core need not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from polyattn.errors import UnknownBackend

__all__ = ["is_of_the_field", "spelt", "unknown"]

_TORCH_MEMBERS = {
    "MATH": "sdpa_math",
    "FLASH_ATTENTION": "sdpa_flash",
    "EFFICIENT_ATTENTION": "sdpa_efficient",
    "CUDNN_ATTENTION": "sdpa_cudnn",
}

_DENSE = ("sdpa_flash", "sdpa_cudnn")
_QUANTISED = "quantised attention; near, and exact, is", ("sdpa_flash",)
_SPARSE = "sparse attention; near, with a mask of your own such as BlockMap, is", ("flex",)
_OF_THE_FIELD: dict[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("flash_attn", "flash_attention", "flash_attn_2", "flash_attn_3", "fa2", "fa3", "fa4"),
        ("flash attention; near is torch's", _DENSE),
    ),
    "xformers": ("memory-efficient attention; near is torch's", ("sdpa_efficient",)),
    **dict.fromkeys(
        ("sage_attn", "sage_attn_three", "attn_qat_infer", "attn_qat_train"), _QUANTISED
    ),
    **dict.fromkeys(
        (
            *("sliding_tile_attn", "video_sparse_attn", "video_sparse_attn_h3", "vmoba_attn"),
            *("bsa_attn", "sla_attn", "sage_sla_attn", "nabla_attn"),
        ),
        _SPARSE,
    ),
    "no_attention": ("no attention at all; leave the layer out", ()),
}
"""Names in use elsewhere: what each stands for there, and the backends here that come near it."""


def spelt(name: object) -> str:
    """Return the name to look up for what a user wrote.

    A member of an enumeration goes by its value where that is a name, and else by its own name;
    members of torch's ``SDPBackend`` by the backend that runs the kernel of that name.

    >>> from enum import Enum
    >>> spelt(" SDPA_Flash "), spelt(Enum("Theirs", ["TORCH_SDPA"]).TORCH_SDPA)
    ('sdpa_flash', 'torch_sdpa')
    """
    if isinstance(name, Enum):
        is_name = isinstance(name.value, str) and name.value.strip().isidentifier()
        return str(name.value if is_name else name.name).strip().lower()
    if _is_torch_member(name):
        member = str(name.name)  # type: ignore[attr-defined]
        return _TORCH_MEMBERS.get(member, f"sdpbackend.{member.lower()}")
    return str(name).strip().lower()


def is_of_the_field(name: object) -> bool:
    """Say whether `name` means something in other code bases, so that it is no misspelling."""
    return isinstance(name, Enum) or _key(name) in _OF_THE_FIELD


def unknown(name: object, known: Iterable[str], *, asked_by: str) -> UnknownBackend:
    """Build the error for `name`, which nothing registered answers to; says what comes near."""
    names = sorted(known)
    registered = f"Registered: {', '.join(names)}."
    if _is_torch_member(name):
        return UnknownBackend(
            f"got {asked_by} {name!r}, which names no kernel; expected SDPBackend."
            f"{', SDPBackend.'.join(_TORCH_MEMBERS)} or a name. {registered}"
        )
    if _key(name) in _OF_THE_FIELD:
        meaning, near = _OF_THE_FIELD[_key(name)]
        close = " or ".join(repr(n) for n in near if n in names)
        return UnknownBackend(
            f"got {asked_by} {name!r}, a name of the field with no backend behind it here: "
            f"{meaning}{' ' if close else ''}{close}. {registered}"
        )
    shown = spelt(name) if isinstance(name, Enum) else name
    return UnknownBackend.named(shown, names, asked_by=asked_by)


def _key(name: object) -> str:
    return spelt(name).replace("-", "_")


def _is_torch_member(name: object) -> bool:
    kind = type(name)
    return kind.__name__.lstrip("_") == "SDPBackend" and kind.__module__.startswith("torch")

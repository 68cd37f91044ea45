"""Facts of a machine: what a dry run is told instead of looking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from polyattn.errors import InvalidProblem

__all__ = ["Facts"]


@dataclass(frozen=True)
class Facts:
    """A machine one does not have, as far as capabilities ask about it.

    `device`: ``"cpu"`` or ``"cuda"``, `arch`: ``"sm_90"`` or None, `packages`: versions of
    what is installed there; a package mapped to None is known to be absent, one that is not
    named is assumed present. `torch_build`: ``"cuda"`` or ``"cpu"``.

    >>> Facts.parse("cuda:sm_90")
    Facts(device='cuda', arch='sm_90', torch_build='cuda', packages={})
    """

    device: str
    arch: str | None = None
    torch_build: str = "cuda"
    packages: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, packages: Mapping[str, str | None] | None = None) -> Facts:
        """Read ``cpu``, ``cuda:sm_90`` or a card's name such as ``h100``."""
        name = text.strip().lower()
        name = _CARDS.get(name, name)
        device, _, arch = name.partition(":")
        if device not in ("cpu", "cuda") or (arch and not _is_arch(arch)):
            raise InvalidProblem(
                f"got the machine {text!r}, expected cpu, cuda:sm_XX or one of "
                f"{', '.join(sorted(_CARDS))}."
            )
        return cls(device, arch or None, "cpu" if device == "cpu" else "cuda", packages or {})


_CARDS = {
    "t4": "cuda:sm_75",
    "a100": "cuda:sm_80",
    "rtx3090": "cuda:sm_86",
    "l40s": "cuda:sm_89",
    "rtx4090": "cuda:sm_89",
    "h100": "cuda:sm_90",
    "h200": "cuda:sm_90",
    "b200": "cuda:sm_100",
    "rtx5090": "cuda:sm_120",
}


def _is_arch(arch: str) -> bool:
    return arch.startswith("sm_") and arch[3:].rstrip("a").isdigit()

"""What metadata asks of the backends of an implementation: a platform, sizes of blocks."""

from __future__ import annotations

from polyattn.errors import InvalidProblem
from polyattn.jax.operator.metadata import BLOCKS, AttentionMetadata

__all__ = ["PLAIN", "blocks_of", "of_platform"]

PLAIN = ("jax_xla", "jax_blockwise", "jax_decode", "jax_paged_decode", "jax_reference")
"""The backends that XLA compiles from plain JAX."""
_OF_PLATFORM = {
    "xla": PLAIN, "jax": PLAIN, "pallas": ("pallas", "splash"), "triton": ("pallas",),
}  # fmt: skip


def of_platform(
    metadata: AttentionMetadata, name: str, backends: tuple[str, ...]
) -> tuple[str, ...]:
    """Return those of an implementation's backends that are of the metadata's platform.

    Raises :class:`InvalidProblem` where there is none.
    """
    wanted = _OF_PLATFORM.get(metadata.platform or "")
    found = tuple(one for one in backends if wanted is None or one in wanted)
    if not found:
        raise InvalidProblem(
            f"got platform={metadata.platform!r} for {name!r}, which runs on "
            f"{' or '.join(backends)} here, expected one of {', '.join(wanted or ())} among them: "
            "choose another implementation, or platform=None."
        )
    return found


def blocks_of(metadata: AttentionMetadata) -> dict[str, int]:
    """Return the sizes of blocks that were asked for, as backends call them."""
    asked = {name: getattr(metadata, name) for name in BLOCKS}
    return {
        name.replace("blocksize", "block"): size
        for name, size in asked.items()
        if size != BLOCKS[name]
    }

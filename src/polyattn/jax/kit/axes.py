"""Mesh axes that are bound where code is traced."""

from __future__ import annotations

import jax

from polyattn.errors import InvalidProblem

__all__ = ["axis_size"]


def axis_size(axis_name: str | tuple[str, ...]) -> int:
    """Return how many devices a mesh axis has, or several together.

    Raises :class:`InvalidProblem` for an axis that is bound to none.
    """
    try:
        return int(jax.lax.axis_size(axis_name))
    except NameError as error:
        raise InvalidProblem(
            f"got axis_name={axis_name!r}, which is bound to no mesh axis here; expected a call "
            f"within jax.shard_map over a mesh that has it ({error})."
        ) from error

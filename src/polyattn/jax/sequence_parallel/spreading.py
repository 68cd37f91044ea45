"""``spread_sequence``: within it, arrays are a device's rows of a sequence, not whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from polyattn.errors import InvalidProblem
from polyattn.jax.context import within_spread
from polyattn.jax.kit.spread_sequence import BALANCES
from polyattn.selection.registry import registry

__all__ = ["spread_sequence"]


@contextmanager
def spread_sequence(
    axis_name: str | tuple[str, str] = "sp",
    *,
    balance: str = "contiguous",
    local: str | tuple[str, ...] | None = None,
) -> Iterator[None]:
    """Say that the calls of :func:`polyattn.jax.attention` within get this device's rows.

    For code under ``jax.shard_map``. `axis_name`: the mesh axis over which the sequence lies; two
    of them for the hybrid, where keys travel along the first and heads are exchanged along the
    second, and device (r, u) holds part r * U + u. `balance`: ``contiguous`` or ``zigzag``, see
    :func:`~polyattn.jax.sequence_parallel.ring.ring_attention`. `local`: the backend, or several in
    order, of what each device computes; otherwise that is chosen.

    ``jax_ring``, ``jax_ulysses`` and ``jax_hybrid`` are the backends of such calls; all others
    refuse them. It is part of JAX's key: code that was traced without it is traced again.

    Raises :class:`~polyattn.errors.InvalidProblem` for names that are none, and at the call for an
    axis that no mesh binds; :class:`~polyattn.errors.UnknownBackend` for `local`.

    >>> import jax, jax.numpy as jnp
    >>> from polyattn import Causal
    >>> from polyattn.jax import attention, spread_sequence
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("sp",))
    >>> rows = jax.sharding.PartitionSpec(None, "sp")
    >>> def layer(x):
    ...     with spread_sequence("sp"):
    ...         return attention(x, x, x, mask=Causal(), backend="jax_ring")
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> jax.shard_map(layer, mesh=mesh, in_specs=rows, out_specs=rows)(x).shape
    (1, 8, 2, 4)
    """
    axes = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if len({*axes}) != len(axes) or len(axes) > 2 or not all(map(_is_name, axes)):
        raise InvalidProblem(
            f"got axis_name={axis_name!r}, expected the name of a mesh axis, or of two: of the "
            "ring and of the exchange of heads."
        )
    if balance not in BALANCES:
        raise InvalidProblem(f"got balance={balance!r}, expected one of {', '.join(BALANCES)}.")
    given = () if local is None else (local,) if isinstance(local, str) else tuple(local)
    names = tuple(name for one in given for name in registry.expand(one, asked_by="local="))
    with within_spread((axes, balance, names)):
        yield


def _is_name(axis: object) -> bool:
    return isinstance(axis, str) and bool(axis) and not {*axis} & {*" ,="}

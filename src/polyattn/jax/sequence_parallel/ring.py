"""Ring attention: keys and values travel around the devices, queries stay.

Each device keeps the partial result over the keys that have passed, joined by their log-sum-exp.
Backward, keys travel again with their gradients, which come home after a whole turn: memory is that
of the local arrays, whatever the number of devices. Source: Liu, Zaharia and Abbeel, *Ring
Attention with Blockwise Transformers* (arXiv 2310.01889).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from polyattn.errors import InvalidProblem
from polyattn.jax.kit.axes import axis_size
from polyattn.jax.kit.own_promotion import own_promotion
from polyattn.jax.kit.reverse_only import RING, reverse_only
from polyattn.jax.kit.spread_sequence import BALANCES
from polyattn.jax.kit.varying import as_varying
from polyattn.jax.sequence_parallel.local_attention import local_attention
from polyattn.jax.sequence_parallel.spread_masks import Spread, Whole, local_bands, spread
from polyattn.masks import Mask, Padding, Segments

__all__ = ["ring_attention"]

Array: TypeAlias = jax.Array


class _Static(NamedTuple):
    """What a call is beside its arrays; hashable."""

    axis: str | tuple[str, ...]
    whole: Whole
    low: int | None
    high: int | None
    scale: float
    softcap: float | None
    backend: str | tuple[str, ...] | None
    unroll: int


class _Keys(NamedTuple):
    """What travels: keys, values and their segment ids, of one device."""

    k: Array
    v: Array
    ids: Any


class _Fixed(NamedTuple):
    """What stays: the ids of the rows, and the lengths of the whole sequences."""

    q_ids: Any
    q_lengths: Any
    kv_lengths: Any


@own_promotion
def ring_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    axis_name: str | tuple[str, ...] = "sp",
    mask: Mask | None = None,
    sinks: Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    balance: str = "contiguous",
    return_lse: bool = False,
    backend: str | tuple[str, ...] | None = None,
    unroll: bool = False,
) -> Any:
    """Compute attention over a sequence spread along a mesh axis, within ``jax.shard_map``.

    `query` (B, T / P, N, H), `key` and `value` (B, S / P, K, H): the rows of this device, of P
    along `axis_name`. `mask`: Causal, Window, Segments (whose ids are those of these rows and
    keys) and Padding (whose lengths are those of the whole sequences), joined by ``&``. `balance`:
    ``contiguous`` (device r holds the r-th part) or ``zigzag`` (see
    :func:`~polyattn.jax.sequence_parallel.zigzag.to_zigzag`), which gives each device the same
    work under a causal mask. `sinks`, `scale`, `softcap`: as in :func:`polyattn.jax.attention`,
    which computes each step on `backend`, or on what it chooses. Steps of which nothing is seen
    are skipped; `unroll` writes them out one by one instead of as a loop.

    Returns out (B, T / P, N, V), with `return_lse` also the log-sum-exp (B, N, T / P) float32. All
    of it has gradients. Raises :class:`~polyattn.errors.InvalidProblem` while tracing for an axis
    that is not there, masks that cannot be spread, and lengths that do not fit.

    >>> import jax, jax.numpy as jnp
    >>> from polyattn import Causal
    >>> mesh = jax.sharding.Mesh(jax.devices()[:1], ("sp",))
    >>> rows = jax.sharding.PartitionSpec(None, "sp")
    >>> call = lambda x: ring_attention(x, x, x, mask=Causal())
    >>> x = jnp.ones((1, 8, 2, 4))
    >>> jax.shard_map(call, mesh=mesh, in_specs=rows, out_specs=rows)(x).shape
    (1, 8, 2, 4)
    """
    devices = axis_size(axis_name)
    parts = spread(mask)
    whole = _whole(query.shape[1], key.shape[1], devices, balance, parts)
    if query.dtype != key.dtype or query.ndim != 4:
        raise InvalidProblem(
            f"got query {query.shape} {query.dtype} with key {key.shape} {key.dtype}, expected "
            "(B, T / P, N, H) of one dtype."
        )
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    names = tuple(backend) if isinstance(backend, list) else backend
    static = _Static(
        axis_name, whole, parts.low, parts.high, scale, softcap, names, devices if unroll else 1
    )
    fixed = _Fixed(parts.q_ids, parts.q_lengths, parts.kv_lengths)
    given = query, _Keys(key, value, _ids_of_keys(parts)), sinks, fixed
    given = as_varying(given, given, jax.lax.axis_index(axis_name))
    out, lse = _ring(static, *reverse_only(RING, given))
    return (out, lse) if return_lse else out


def _ids_of_keys(parts: Spread) -> Any:
    return parts.kv_ids if parts.kv_ids is not None else parts.q_ids


def _whole(q_len: int, kv_len: int, devices: int, balance: str, parts: Spread) -> Whole:
    if balance not in BALANCES:
        raise InvalidProblem(f"got balance={balance!r}, expected one of {', '.join(BALANCES)}.")
    if q_len != kv_len:
        raise InvalidProblem(
            f"got {q_len} rows with {kv_len} keys on each device, expected as many of both: a "
            "sequence that attends to itself. Gather the keys for anything else."
        )
    chunks = 2 if balance == "zigzag" else 1
    if q_len % chunks or q_len == 0:
        raise InvalidProblem(
            f"got {q_len} rows on each device with balance={balance!r}, expected a multiple of "
            f"{chunks}, 1 at least."
        )
    return Whole(devices, q_len // chunks, chunks)


def _places(whole: Whole, rank: Array) -> list[Array]:
    """Return which chunks of the whole sequence a device holds."""
    if whole.chunks == 1:
        return [rank]
    return [rank, 2 * whole.devices - 1 - rank]


def _step(
    static: _Static, fixed: _Fixed, q: Array, keys: _Keys, rank: Array, source: Array
) -> tuple[Array, Array]:
    """Return (out, lse) of this device's rows over the keys of `source`."""
    rows = []
    sources = _places(static.whole, source)
    for at, place in enumerate(_places(static.whole, rank)):
        found = [
            _pair(static, fixed, q, keys, (at, place), (of, other))
            for of, other in enumerate(sources)
        ]
        rows.append(functools.reduce(_joined, found))
    outs, lses = zip(*rows, strict=True)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2)


def _pair(
    static: _Static,
    fixed: _Fixed,
    q: Array,
    keys: _Keys,
    row: tuple[int, Array],
    column: tuple[int, Array],
) -> tuple[Array, Array]:
    """Return (out, lse) of a chunk of rows over one of keys; masks are known by distance."""
    chunk, bands = static.whole.chunk, local_bands(static.whole, static.low, static.high)
    (at, place), (of, other) = row, column
    mine, theirs = slice(at * chunk, (at + 1) * chunk), slice(of * chunk, (of + 1) * chunk)
    q, k, v = q[:, mine], keys.k[:, theirs], keys.v[:, theirs]
    extra = _local(fixed, keys, (mine, theirs), (place * chunk, other * chunk), chunk, q.shape[0])
    kinds: list[Any] = []
    which = [_index_of(kinds, band) for band in bands]

    def branch(band: Any) -> Any:
        if isinstance(band, str):
            return lambda q, k, v, extra: _nothing(q, v)
        return lambda q, k, v, extra: _wide(
            *local_attention(
                q, k, v, mask=_both(band, extra), scale=static.scale, softcap=static.softcap,
                backend=static.backend,
            )
        )  # fmt: skip

    if len(kinds) == 1:
        return branch(kinds[0])(q, k, v, extra)  # type: ignore[no-any-return]
    choice = jnp.asarray(which)[other - place + len(bands) // 2]
    return jax.lax.switch(choice, [branch(one) for one in kinds], q, k, v, extra)  # type: ignore[no-any-return]


def _index_of(kinds: list[Any], band: Any) -> int:
    for i, kind in enumerate(kinds):
        if kind is band or (type(kind) is type(band) and repr(kind) == repr(band) and
                            not hasattr(band, "mask")):  # fmt: skip
            return i
    kinds.append(band)
    return len(kinds) - 1


def _local(
    fixed: _Fixed, keys: _Keys, at: tuple[slice, slice], begin: tuple[Array, Array], chunk: int,
    batch: int,
) -> Mask | None:  # fmt: skip
    """Return what ids and lengths say of a chunk of rows and a chunk of keys."""
    mask: Mask | None = None
    if fixed.q_ids is not None:
        mask = Segments(fixed.q_ids[..., at[0]], keys.ids[..., at[1]])
    if fixed.q_lengths is not None or fixed.kv_lengths is not None:
        lengths = [
            None if given is None else jnp.clip(given - first, 0, chunk)
            for given, first in zip((fixed.q_lengths, fixed.kv_lengths), begin, strict=True)
        ]
        padding = Padding(*lengths)
        mask = padding if mask is None else mask & padding
    return mask


def _both(band: Mask | None, extra: Mask | None) -> Mask | None:
    if band is None or extra is None:
        return extra if band is None else band
    return band & extra


def _wide(out: Array, lse: Array) -> tuple[Array, Array]:
    return out.astype(jnp.promote_types(out.dtype, jnp.float32)), lse


def _nothing(q: Array, v: Array) -> tuple[Array, Array]:
    wide = jnp.promote_types(q.dtype, jnp.float32)
    b, t, n, _ = q.shape
    sums = jnp.zeros((b, t, n, v.shape[-1]), wide), jnp.full((b, n, t), -jnp.inf, wide)
    return as_varying(sums, q)


def _joined(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Join two partial results; a part that saw nothing counts for nothing, NaN included."""
    top = jnp.maximum(a[1], b[1])
    level = jnp.where(top == -jnp.inf, 0, top)
    shares = [jnp.exp(part[1] - level) for part in (a, b)]
    total = shares[0] + shares[1]
    whole = jnp.where(total == 0, 1, total)
    out = sum(
        jnp.where(share[..., None] == 0, 0, part[0].swapaxes(1, 2) * (share / whole)[..., None])
        for part, share in zip((a, b), shares, strict=True)
    )
    lse = jnp.where(total == 0, -jnp.inf, jnp.log(whole) + level)
    return out.swapaxes(1, 2), lse  # type: ignore[union-attr]


def _turn(axis: Any, devices: int, x: Any) -> Any:
    """Hand everything on to the next device."""
    ring = [(i, (i + 1) % devices) for i in range(devices)]
    return jax.tree_util.tree_map(lambda leaf: jax.lax.ppermute(leaf, axis, ring), x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: _Static, q: Array, keys: _Keys, sinks: Any, fixed: _Fixed) -> tuple[Array, Array]:
    out, lse = _around(static, q, keys, sinks, fixed)
    return out.astype(q.dtype), lse


def _around(
    static: _Static, q: Array, keys: _Keys, sinks: Any, fixed: _Fixed
) -> tuple[Array, Array]:
    rank, devices = jax.lax.axis_index(static.axis), static.whole.devices

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        keys, sums = carry
        source = (rank - number) % devices
        sums = _joined(sums, _step(static, fixed, q, keys, rank, source))
        return (_turn(static.axis, devices, keys), sums), None

    (_, (out, lse)), _ = jax.lax.scan(
        step, (keys, _nothing(q, keys.v)), jnp.arange(devices), unroll=static.unroll
    )
    return (out, lse) if sinks is None else _with_sinks(out, lse, sinks)


def _with_sinks(out: Array, lse: Array, sinks: Array) -> tuple[Array, Array]:
    """Add the sinks to the denominator: once, of the whole."""
    wide = lse.dtype
    logits = jax.nn.logsumexp(sinks.astype(wide).reshape(sinks.shape[0], -1), -1)[None, :, None]
    total = jnp.logaddexp(lse, logits)
    share = jnp.where(lse == -jnp.inf, 0, jnp.exp(lse - total))
    return out * share.swapaxes(1, 2)[..., None], total


def _forward(static: _Static, q: Array, keys: _Keys, sinks: Any, fixed: _Fixed) -> Any:
    out, lse = _around(static, q, keys, sinks, fixed)
    return (out.astype(q.dtype), lse), (q, keys, sinks, fixed, out, lse)


def _backward(static: _Static, kept: Any, given: tuple[Array, Array]) -> Any:
    q, keys, sinks, fixed, out, lse = kept
    dout, dlse = (x.astype(lse.dtype) for x in given)
    rank, devices = jax.lax.axis_index(static.axis), static.whole.devices
    excess = dlse - (dout * out).sum(-1).swapaxes(1, 2)  # what each row's share adds to

    def step(carry: Any, number: Array) -> tuple[Any, None]:
        keys, dkeys, dq = carry
        source = (rank - number) % devices

        def local(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            return _step(static, fixed, q, _Keys(k, v, keys.ids), rank, source)

        (part, part_lse), pull = jax.vjp(local, q, keys.k, keys.v)
        share = jnp.where(part_lse == -jnp.inf, 0, jnp.exp(part_lse - lse))
        dpart = dout * share.swapaxes(1, 2)[..., None]
        dsum = share * ((dout * part).sum(-1).swapaxes(1, 2) + excess)
        more, dk, dv = pull((dpart, dsum))
        dkeys = dkeys[0] + dk.astype(lse.dtype), dkeys[1] + dv.astype(lse.dtype)
        turned = _turn(static.axis, devices, (keys, dkeys))
        return (*turned, dq + more.astype(lse.dtype)), None

    zeros = tuple(jnp.zeros(x.shape, lse.dtype) for x in (keys.k, keys.v))
    begin = as_varying((keys, zeros, jnp.zeros(q.shape, lse.dtype)), q)
    (_, (dk, dv), dq), _ = jax.lax.scan(step, begin, jnp.arange(devices), unroll=static.unroll)
    dkeys = _Keys(dk.astype(keys.k.dtype), dv.astype(keys.v.dtype), None)
    return dq.astype(q.dtype), dkeys, _dsinks(sinks, lse, excess), None


def _dsinks(sinks: Any, lse: Array, excess: Array) -> Any:
    if sinks is None:
        return None
    logits = sinks.astype(lse.dtype).reshape(sinks.shape[0], -1)
    level = jnp.where(lse == -jnp.inf, 0, lse)
    shares = jnp.where(
        (lse == -jnp.inf)[..., None], 0, jnp.exp(logits[None, :, None] - level[..., None])
    )
    total = (shares * excess[..., None]).sum((0, 2))
    return total.reshape(sinks.shape).astype(sinks.dtype)


_ring.defvjp(own_promotion(_forward), own_promotion(_backward))

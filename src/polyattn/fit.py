"""Whether the arguments of a call fit each other: what the front-ends of every array library check.

Shapes and ranges only; whether something is an array of the right library, dtype and device is
for the front-end to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from polyattn.biases import Alibi, Bias
from polyattn.errors import InvalidProblem
from polyattn.masks import BlockMap, Dense, Mask, Or, Packed, Padding, PrefixLM, Segments
from polyattn.payload import shape_of

__all__ = [
    "Lengths", "check_bias_shape", "check_mask", "check_number", "check_sinks_shape", "lengths_of",
    "packed_sequences",
]  # fmt: skip


class Lengths(Protocol):
    """What masks and biases are checked against: a Problem, or symbolic sizes."""

    @property
    def batch(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def q_len(self) -> int: ...
    @property
    def kv_len(self) -> int: ...
    @property
    def layout(self) -> str: ...


def lengths_of(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], layout: str
) -> tuple[int, int, int, int, int, int, int]:
    """Return B, T, N, S, K, H, V from three shapes of the layout's rank; B is 1 when packed.

    >>> lengths_of((2, 8, 4, 16), (2, 9, 2, 16), (2, 9, 2, 32), "BTNH")
    (2, 8, 4, 9, 2, 16, 32)
    """
    if layout == "BNTH":
        (b, n, t, h), (bk, kh, s, hk), (bv, kv, sv, value_dim) = q, k, v
    elif layout == "BTNH":
        (b, t, n, h), (bk, s, kh, hk), (bv, sv, kv, value_dim) = q, k, v
    else:
        (t, n, h), (s, kh, hk), (sv, kv, value_dim) = q, k, v
        b = bk = bv = 1
    if (bk, hk) != (b, h) or (bv, sv, kv) != (bk, s, kh) or h == 0:
        raise InvalidProblem(
            f"got query {tuple(q)}, key {tuple(k)}, value {tuple(v)} ({layout}), expected one "
            "batch size, one head dim >= 1 of query and key, and as many keys and key/value heads "
            "in key and value."
        )
    return b, t, n, s, kh, h, value_dim


def check_number(name: str, number: Any) -> None:
    """Raise :class:`InvalidProblem` for what is no finite Python number."""
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise InvalidProblem(f"got {name}={number!r}, expected a Python number.")
    if not -float("inf") < number < float("inf"):
        raise InvalidProblem(f"got {name}={number!r}, expected a finite number.")


def check_sinks_shape(shape: tuple[int, ...], heads: int) -> None:
    """Raise :class:`InvalidProblem` where sinks are neither (N,) nor (N, M)."""
    if len(shape) not in (1, 2) or shape[0] != heads or 0 in shape:
        raise InvalidProblem(
            f"got sinks of shape {shape}, expected (N,) or (N, M) with N = {heads}."
        )


def packed_sequences(mask: Mask | None) -> int:
    """Return how many sequences the mask of a packed call names.

    >>> packed_sequences(Packed([0, 2, 5]) & Padding(kv_lengths=[1, 3]))
    2
    """
    packed = (
        [leaf for leaf in mask.leaves() if isinstance(leaf, Packed)] if mask is not None else []
    )
    if mask is None or len(packed) != 1 or _is_under_or(mask):
        raise InvalidProblem(
            f'got layout="packed" with mask={mask!r}, expected one Packed(cu_q, cu_kv), '
            "joined with other masks by &."
        )
    return shape_of(packed[0].cu_q)[0] - 1


def _is_under_or(mask: Mask) -> bool:
    return any("Packed" in part.kinds and part.parts for part in mask.parts) or isinstance(mask, Or)


def check_mask(
    mask: Mask, lengths: Lengths, known: Callable[[Any], Any], arange: Callable[[int], Any]
) -> None:
    """Raise :class:`InvalidProblem` where an array of the mask does not fit the call.

    `known` returns a payload as an array, or None where reading its entries is not possible or
    not worth its price; `arange` counts from 0 in the same library.
    """
    b, n, t, s = lengths.batch, lengths.heads, lengths.q_len, lengths.kv_len
    packed = lengths.layout == "packed"
    if packed != any(isinstance(leaf, Packed) for leaf in mask.leaves()):
        raise InvalidProblem(
            f'got layout={lengths.layout!r} with mask={mask!r}, expected layout="packed" and '
            "Packed(cu_q, cu_kv) joined with & together, or neither."
        )
    for leaf in mask.leaves():
        if isinstance(leaf, Padding):
            _fits(leaf, leaf.q_lengths, (b,), t if not packed else None, known)
            _fits(leaf, leaf.kv_lengths, (b,), s if not packed else None, known)
        elif isinstance(leaf, PrefixLM):
            _fits(leaf, leaf.lengths, (b,), s if not packed else None, known)
        elif isinstance(leaf, Segments):
            for ids, length in ((leaf.q_ids, t), (leaf.kv_ids, s)):
                if shape_of(ids) not in ((length,), (b, length), (1, length)):
                    _misfit(leaf, shape_of(ids), f"({length},) or ({b}, {length})")
        elif isinstance(leaf, Dense):
            _broadcasts(leaf, shape_of(leaf.mask), (b, n, t, s), packed)
        elif isinstance(leaf, BlockMap):
            _check_block_map(leaf, (b, n, t, s), packed, known, arange)
        elif isinstance(leaf, Packed):
            _check_packed(leaf, lengths, known)


def _fits(
    leaf: Any, payload: Any, shape: tuple[int, ...], limit: int | None, known: Callable[[Any], Any]
) -> None:
    if payload is None:
        return
    if shape_of(payload) != shape:
        _misfit(leaf, shape_of(payload), f"{shape}, one length for each batch entry or sequence")
    read = known(payload)
    if read is not None and limit is not None and read.shape[0]:
        low, high = int(read.min()), int(read.max())
        if low < 0 or high > limit:
            raise InvalidProblem(
                f"got {leaf!r} with lengths from {low} to {high}, expected 0 to {limit}."
            )


def _misfit(leaf: Any, got: Any, expected: str) -> None:
    raise InvalidProblem(f"got {leaf!r} with an array of shape {got}, expected {expected}.")


def _broadcasts(leaf: Any, got: tuple[int, ...], full: tuple[int, ...], packed: bool) -> None:
    if packed:
        raise InvalidProblem(
            f"got {leaf!r} in a packed problem, expected masks that have a meaning within each "
            "sequence; use Segments, or unpack."
        )
    padded = (1,) * (4 - len(got)) + got
    if len(got) > 4 or any(g not in (1, f) for g, f in zip(padded, full, strict=True)):
        _misfit(leaf, got, f"broadcastable to (B, N, T, S) = {full}")


def _check_block_map(
    leaf: BlockMap, full: tuple[int, ...], packed: bool, known: Callable[[Any], Any],
    arange: Callable[[int], Any],
) -> None:  # fmt: skip
    b, n, t, s = full
    rows, blocks = -(-t // leaf.block_q), -(-s // leaf.block_k)
    got = shape_of(leaf.counts)
    if packed or got[0] not in (1, b) or got[1] not in (1, n) or got[2] != rows:
        _misfit(leaf, got, f"counts ({b}|1, {n}|1, {rows}) for {rows} blocks of queries")
    indices, counts = known(leaf.indices), known(leaf.counts)
    if indices is None or counts is None or 0 in counts.shape:
        return
    most = indices.shape[-1]
    if int(counts.min()) < 0 or int(counts.max()) > most:
        raise InvalidProblem(
            f"got {leaf!r} with counts from {int(counts.min())} to {int(counts.max())}, expected "
            f"0 to {most}, the last dim of indices."
        )
    meant = arange(most) < counts[..., None]
    if bool((meant & ((indices < 0) | (indices >= blocks))).any()):
        raise InvalidProblem(
            f"got {leaf!r} with a block index outside of 0 to {blocks - 1}, expected indices of "
            f"blocks of {leaf.block_k} keys out of {s}."
        )


def _check_packed(leaf: Packed, lengths: Lengths, known: Callable[[Any], Any]) -> None:
    for name, cu, total in (
        ("cu_q", leaf.cu_q, lengths.q_len),
        ("cu_kv", leaf.cu_kv, lengths.kv_len),
    ):
        read = known(cu)
        if read is None or not read.shape[0]:
            continue
        if int(read[0]) != 0 or int(read[-1]) != total or bool((read[1:] < read[:-1]).any()):
            raise InvalidProblem(
                f"got {name}={read.tolist()[:8]}, expected offsets that rise from 0 to {total}."
            )


def check_bias_shape(bias: Bias, lengths: Lengths) -> None:
    """Raise :class:`InvalidProblem` where the bias does not broadcast to the scores."""
    full = (lengths.batch, lengths.heads, lengths.q_len, lengths.kv_len)
    packed, got = lengths.layout == "packed", shape_of(bias.payload)
    if not isinstance(bias, Alibi):
        _broadcasts(bias, got, full, packed)
        return
    if got not in (full[1:2], full[:2], (1, full[1])):
        _misfit(bias, got, f"({full[1]},) or {full[:2]} slopes")
    if packed:
        _broadcasts(bias, (0,), full, True)

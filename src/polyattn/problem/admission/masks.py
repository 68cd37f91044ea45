"""Whether the arrays of masks and biases fit the call: shapes, devices, known entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from polyattn.errors import InvalidProblem
from polyattn.masks import BlockMap, Dense, Mask, Or, Packed, Padding, PrefixLM, Segments
from polyattn.masks.biases import Alibi, Bias
from polyattn.masks.payload import shape_of
from polyattn.problem.admission.arrays import ArrayFacts, Front

__all__ = ["Lengths", "check_bias_shape", "check_devices", "check_mask", "packed_sequences"]


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


def check_devices(mask: Mask, device: str, front: Front) -> None:
    """Raise :class:`InvalidProblem` where an array of the mask is on another accelerator."""

    def check(name: str, payload: Any) -> Any:
        found = None if payload is None else front.facts(payload)
        if not isinstance(found, ArrayFacts) or found.device == device:
            return payload  # lists, and arrays of other libraries, are copied
        if found.device_type not in ("cpu", "meta"):
            raise InvalidProblem(
                f"got a mask whose {name} is on {found.device}, expected {device}, where the "
                "query is; move it there."
            )
        return payload

    if not mask.is_static:
        mask.map(check)


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
        low, high = _ends(read)
        if low < 0 or high > limit:
            raise InvalidProblem(
                f"got {leaf!r} with lengths from {low} to {high}, expected 0 to {limit}."
            )


def _ends(read: Any) -> tuple[int, int]:
    """Return the smallest and the largest entry; a few are compared sooner than two kernels run."""
    if read.shape[0] > _FEW:
        return int(read.min()), int(read.max())
    entries = read.tolist()
    return min(entries), max(entries)


_FEW = 256


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
    leaf: BlockMap,
    full: tuple[int, ...],
    packed: bool,
    known: Callable[[Any], Any],
    arange: Callable[[int], Any],
) -> None:
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

"""Ring, Ulysses and their hybrid; imports no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from polyattn.backends.declaring import FLOATS, JAX_DEVICES, jax_probe, loader
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import Capabilities, Reason
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 27
_CAN = Capabilities(
    devices=JAX_DEVICES, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts={"BTNH", "BNTH"},
    masks={"And", "Causal", "Window", "Segments", "Padding"}, scale=True, softcap=True,
    sinks=True, sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, strided=True,
    spread=True,
)  # fmt: skip


def declare(registry: Registry) -> None:
    """Register them."""
    registry.register(_backend("jax_ring", _ring, "keys travel around the devices, queries stay"))
    registry.register(_backend("jax_ulysses", _ulysses, "rows are exchanged for heads"))
    registry.register(
        _backend("jax_hybrid", _hybrid, "heads exchanged along one mesh axis, a ring along another")
    )


def _backend(name: str, extra: Callable[[Problem], Iterator[Reason]], how: str) -> Backend:
    return Backend(
        name,
        "jax",
        _CAN,
        jax_probe,
        loader("sequence_parallel.jax", f"load_{name.removeprefix('jax_')}"),
        extra,
        "jax",
        f"a sequence over many devices (`spread_sequence`): {how}; local backends are chosen",
    )


def _spread(p: Problem, axes: int) -> tuple[int, ...] | None:
    """Return the sizes of the mesh axes, None where there are not as many as that."""
    if p.spread is None:
        return None
    sizes = tuple(int(axis.rsplit("=", 1)[1]) for axis in p.spread.split(" ")[0].split(","))
    return sizes if len(sizes) == axes else None


def _axes(p: Problem, axes: int) -> Iterator[Reason]:
    if _spread(p, axes) is None:
        takes = "one mesh axis" if axes == 1 else "two mesh axes"
        got = "a whole sequence" if p.spread is None else f"one over {p.spread.split(' ')[0]}"
        yield Reason("sequence", got, f"one over {takes}", "polyattn.jax.spread_sequence says it")


def _square(p: Problem) -> Iterator[Reason]:
    if p.q_len != p.kv_len:
        yield Reason("lengths", f"T={p.q_len}, S={p.kv_len} on a device", "as many rows as keys")
    if p.spread is not None and "zigzag" in p.spread and p.q_len % 2:
        yield Reason("lengths", f"{p.q_len} rows on a device", "two chunks in zigzag order")


def _heads(p: Problem, devices: int) -> Iterator[Reason]:
    if p.heads % devices or (p.kv_heads % devices and devices % p.kv_heads):
        got = f"{p.heads} query and {p.kv_heads} key/value heads"
        yield Reason("heads", got, f"multiples of {devices}, the devices they are exchanged over")


def _ring(p: Problem) -> Iterator[Reason]:
    yield from _axes(p, 1)
    yield from _square(p)


def _ulysses(p: Problem) -> Iterator[Reason]:
    yield from _axes(p, 1)
    if (sizes := _spread(p, 1)) is not None:
        yield from _heads(p, sizes[0])
    if p.spread is not None and "zigzag" in p.spread:
        yield Reason("order", "zigzag", "contiguous parts: each device has as much to do anyway")


def _hybrid(p: Problem) -> Iterator[Reason]:
    yield from _axes(p, 2)
    yield from _square(p)
    if (sizes := _spread(p, 2)) is not None:
        yield from _heads(p, sizes[1])

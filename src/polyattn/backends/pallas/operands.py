"""The arrays of a kernel by name, each with the part of it that a program of the grid gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from polyattn.backends.pallas.tiles import Call
from polyattn.backends.pallas.visits import Lists, Shown

__all__ = ["Operands", "Place", "place_of", "tiles_of"]

Array: TypeAlias = jax.Array


class Operands:
    """Collects what ``pallas_call`` takes, and names it for the kernel."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.names: list[str] = []
        self.arrays: list[Array] = []
        self.specs: list[Any] = []

    def add(self, name: str, array: Array, spec: Any) -> None:
        """Add an array with its specification."""
        self.names.append(name)
        self.arrays.append(array)
        self.specs.append(spec)

    def _head(self, array: Array) -> Callable[[Any], Any]:
        """Return from which head of an array a query head reads: its group's, where it is one."""
        group = self.call.heads // array.shape[1]
        # of the index's own type: under jax_enable_x64 a number of Python has 64 bits
        return lambda n: jax.lax.div(n, np.int32(group)) if group > 1 else n

    def rows(self, name: str, array: Array, block: int | None = None) -> None:
        """Add a block of (B, N|K, rows, size)."""
        size, head = block or self.call.tiling.q, self._head(array)
        shape = (None, None, size, array.shape[-1])
        self.add(name, array, self.call.machine.spec(shape, lambda b, n, i: (b, head(n), i, 0)))

    def whole(self, name: str, array: Array) -> None:
        """Add all of one head of (B, N|K, rows, size)."""
        head = self._head(array)
        shape = (None, None, *array.shape[2:])
        self.add(name, array, self.call.machine.spec(shape, lambda b, n, i: (b, head(n), 0, 0)))

    def scalars(self, name: str, array: Array | None) -> None:
        """Add an array of which single numbers are read; nothing where there is none."""
        if array is not None:
            self.add(name, array, self.call.machine.scalars())

    def mask(self, mask: Shown | None, *, by_keys: bool) -> None:
        """Add what a mask gives: columns (rows, 1) beside rows (1, keys), or transposed."""
        if mask is None:
            return
        for name, array in zip(Lists._fields, mask.lists, strict=True):
            self.scalars(name, array)
        for name, vector in (("start", mask.start), ("stop", mask.stop)):
            self._vector(name, vector, across=by_keys, blocked=not by_keys)
        for i, (q_ids, kv_ids) in enumerate(mask.ids):
            self._vector(f"q_ids{i}", q_ids, across=by_keys, blocked=not by_keys)
            self._vector(f"k_ids{i}", kv_ids, across=not by_keys, blocked=by_keys)

    def _vector(self, name: str, x: Array, *, across: bool, blocked: bool) -> None:
        """Add (B|1, length): as (1, length) or (length, 1), of a program's block or whole."""
        many, machine, tiling = x.shape[0] > 1, self.call.machine, self.call.tiling
        entry: Callable[[Any], Any] = (lambda b: b) if many else (lambda b: 0)
        size = tiling.k if name.startswith("k") else tiling.q
        size = size if blocked else x.shape[1]
        array = x[:, None, :] if across else x[:, :, None]
        shape = (None, 1, size) if across else (None, size, 1)

        def index(b: Any, n: Any, i: Any) -> Any:
            block = i if blocked else 0
            return (entry(b), 0, block) if across else (entry(b), block, 0)

        self.add(name, array, machine.spec(shape, index))

    def kernel(self, body: Callable[..., None], outputs: tuple[str, ...]) -> Callable[..., None]:
        """Return the kernel whose references go to `body` by name."""
        call, names = self.call, (*self.names, *outputs)

        def run(*refs: Any) -> None:
            body(call, dict(zip(names, refs, strict=True)))

        return run


class Place(NamedTuple):
    """Where a program is: batch entry, head, block; and its list of tiles, if there is one."""

    b: Any
    n: Any
    i: Any
    ref: dict[str, Any]

    def tile(self, t: Any) -> Any:
        """Return which tile the t-th is."""
        return self._of("tiles", t) if "tiles" in self.ref else t

    def count(self, name: str) -> Any:
        """Return how many tiles are ``full``, or are to be visited at all (``any``)."""
        return self._of(name)

    def _of(self, name: str, *more: Any) -> Any:
        ref = self.ref[name]
        b, n = (x if size > 1 else 0 for x, size in zip((self.b, self.n), ref.shape, strict=False))
        return ref[(b, n, self.i, *more)]


def place_of(call: Call, ref: dict[str, Any]) -> Place:
    """Return where this program is."""
    return Place(*call.machine.places(), ref)


def tiles_of(
    call: Call, place: Place, tiles: int, step: Callable[..., Any], sums: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Run `step(t, sums, masked)` over the tiles: those that are seen wholly without a mask."""
    if not call.masked:
        return jax.lax.fori_loop(0, tiles, lambda t, s: step(t, s, False), sums)  # type: ignore[no-any-return]
    full = place.count("full")
    sums = jax.lax.fori_loop(0, full, lambda t, s: step(t, s, False), sums)
    return jax.lax.fori_loop(full, place.count("any"), lambda t, s: step(t, s, True), sums)  # type: ignore[no-any-return]

"""`trace`: records what `tap` marks, from the start of a ``with`` block until all of it has run."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from polyattn.errors import TraceError
from polyattn.trace.format.header import Header
from polyattn.trace.recorders.jax.active_trace import Active, Rank, Tapped, as_active, free, occupy
from polyattn.trace.recorders.jax.device_statistics import supported
from polyattn.trace.recorders.jax.native_lines import NativeLines, is_row
from polyattn.trace.recorders.jax.native_taps import place_of, tapped_at, works
from polyattn.trace.recorders.jax.python_taps import PythonTaps
from polyattn.trace.recorders.jax.rank_files import RankFiles
from polyattn.trace.recorders.jax.received import fields_of
from polyattn.trace.recorders.jax.receiver_thread import Desk
from polyattn.trace.recorders.numpy import TraceWriter
from polyattn.trace.statistics import extension

__all__ = ["JaxTrace", "trace"]

_MOST = 20_000
"""Tensors that may wait for the thread that makes records; then the program waits."""
_NO_ORDER = "ordered effects are not supported for more than 1 device"
"""What JAX says of a program on several devices."""


def trace(path: str | Path, **options: Any) -> JaxTrace:
    """Record what `tap` marks, until the end of the ``with`` block; see :class:`JaxTrace`."""
    return JaxTrace(path, **options)


class JaxTrace:
    """A context manager: what this thread runs inside of it is recorded by its taps.

    `params`: a pytree of the weights, as a model of equinox is one; their fingerprints go into the
    header, each named by its path joined with dots (``blocks.0.attn.weight``), which `name_of` may
    rewrite. Leaves that are no arrays of numbers, as functions, are passed over. `layers`: only
    taps in whose module's name this regular expression is found. `steps`: only these of
    :meth:`step`. `gradients`: also the gradients of inputs and outputs that pass the taps (a
    program under forward-mode differentiation cannot have that). `ordered`: the order of the
    program; JAX has it on one device only, and ``ordered=False`` works on several. What is tapped
    inside ``shard_map`` goes into a file for each rank, `path` with the rank in its name. `seed`,
    `overwrite`, and any field of the header as for :class:`~polyattn.trace.TraceWriter`.

    The end of the block waits for all computations, as their records come while they run. It
    raises TraceError for whatever of the trace was lost, and warns if nothing was recorded.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        params: Any = None,
        name_of: Callable[[str], str] | None = None,
        layers: str | None = None,
        steps: Iterable[int] | None = None,
        gradients: bool = False,
        ordered: bool = True,
        overwrite: bool = False,
        **fields: Any,
    ) -> None:
        if layers is not None:
            _compiled(layers)
        self._steps = None if steps is None else frozenset(steps)
        self._options = (layers, gradients, ordered)
        as_active(None)  # raises where this JAX cannot
        weights = _named(params, name_of)
        chosen = {"layers": layers, "steps": None if steps is None else sorted(self._steps or ())}
        header = _header(weights, chosen | {"gradients": gradients}, fields)
        self.writer = TraceWriter(path, header, overwrite=overwrite)
        self.path = self.writer.path
        self._late: list[tuple[int, int, Tapped, Mapping[str, Any], Rank | None]] = []
        self._seen: Counter[tuple[int, tuple[str, str, str], Rank | None]] = Counter()
        self._records = 0
        self._ranks = RankFiles(path, header, overwrite=overwrite)
        self._taps: Any = None
        self._lines: NativeLines | None = None
        self._desk: Desk | None = None
        self._stack: ExitStack | None = None
        self._active: Active | None = None

    def __enter__(self) -> Self:
        if self._stack is not None or self.writer.sink.closed:
            raise TraceError(f"got the trace {self.path} a second time, expected a new one.")
        native, ordered = works(), self._options[2]
        self._lines = NativeLines(self.writer) if native and ordered else None
        slot = occupy(self._receive)
        self._taps = extension.load().TraceTaps(slot, _MOST) if native else PythonTaps(_MOST)
        self._desk = Desk(self._taps, self._told)
        self._active = Active(slot, *self._options)
        self._stack = ExitStack()
        self._stack.callback(free, slot)
        self._stack.enter_context(as_active(None if self._steps is not None else self._active))
        return self

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Give what runs inside the step `index`, after waiting for what runs before and in it.

        With ``steps=`` a step that is not among them runs without any tap.
        """
        self._wait()
        wanted = self._steps is None or index in self._steps
        with self.writer.step(index), as_active(self._active if wanted else None):
            self._ranks.step, outer = index, self._ranks.step
            try:
                yield
            finally:
                self._wait()
                self._ranks.step = outer

    def _wait(self) -> None:
        """Until every record of what was started has come, and those out of order are sorted."""
        jax.effects_barrier()
        assert self._desk is not None
        self._desk.wait()
        late, self._late = sorted(self._late, key=lambda one: one[:2]), []
        self._seen.clear()
        for _, _, tapped, found, rank in late:
            self._add(tapped, found, rank)

    def _receive(self, tapped: Tapped, vector: Any, rank: Rank | None) -> None:
        """Called by JAX while the program runs, from whichever thread; it must not fail there."""
        place = place_of(tapped, 0 if rank is None else rank.world)
        self._taps.tell(place, -1 if rank is None else rank.number, np.array(vector).tobytes())

    def _told(self, found: Sequence[tuple[int, int, bytes]]) -> None:
        """Called for what was received, in order."""
        rows: list[tuple[Tapped, bytes]] = []
        for place, number, numbers in found:
            tapped, rank = tapped_at(place, number)
            if self._lines is not None and rank is None and is_row(numbers):
                rows.append((tapped, numbers))
                continue
            self._add_rows(rows)
            rows = []
            self._record(tapped, np.frombuffer(numbers, np.int32), rank)
        self._add_rows(rows)

    def _add_rows(self, rows: Sequence[tuple[Tapped, bytes]]) -> None:
        if rows and self._lines is not None:
            self._records += len(rows)
            self._lines.add(rows)

    def _record(self, tapped: Tapped, vector: np.ndarray, rank: Rank | None) -> None:
        found = fields_of(tapped.shape, tapped.dtype, vector)
        if self._options[2] and rank is None:
            self._add(tapped, found, None)
            return
        key = (tapped.position, (tapped.module, tapped.phase, tapped.tensor), rank)
        self._late.append((self._seen[key], tapped.position, tapped, found, rank))
        self._seen[key] += 1

    def _add(self, tapped: Tapped, found: Mapping[str, Any], rank: Rank | None) -> None:
        if rank is not None:
            self._ranks.add(rank, tapped, found)
            return
        self._records += 1
        self.writer.add(tapped.module, tapped.phase, tapped.tensor, found, cls=tapped.cls)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stack, self._stack = self._stack, None
        assert stack is not None
        assert self._desk is not None
        with stack, suppress(Exception) if error is not None else ExitStack():
            self._wait()
        self._desk.close()
        if error is not None:
            self.writer.__exit__(kind, error, traceback)
            self._ranks.close(kind, error, traceback)
            if isinstance(error, ValueError) and _NO_ORDER in str(error):
                raise TraceError(
                    "got a program on several devices, where JAX can run nothing in order, "
                    "expected trace(..., ordered=False): it sorts the records of each step."
                ) from error
            return
        self.writer.close()
        self._ranks.close(None, None, None)
        lost = self._desk.error
        if lost is not None:
            raise TraceError(f"a record of {self.path} was lost: {lost}") from lost
        if not self._records and self._ranks.any:
            self.path.unlink()  # all is in the ranks' files
        elif not self._records:
            warnings.warn(
                f"the trace {self.path} has no record: no tap ran in this thread, or none that "
                f"layers={self._options[0]!r} and the steps let through. Programs compiled ahead "
                "of the trace (jit(f).lower(...).compile()) have no taps in them.",
                RuntimeWarning,
                stacklevel=2,
            )


def _compiled(layers: Any) -> re.Pattern[str]:
    try:
        return re.compile(layers)
    except (re.error, TypeError) as error:
        raise TraceError(
            f"got layers={layers!r}, expected a regular expression: {error}."
        ) from error


def _named(params: Any, name_of: Callable[[str], str] | None) -> dict[str, Any]:
    """The weights by name: a model is a tree of functions, keys and Python's numbers as well."""
    every = jax.tree_util.tree_flatten_with_path(params)[0]
    leaves = [(path, leaf) for path, leaf in every if _is_weight(leaf)]
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    found = {name if name_of is None else name_of(name): leaf for name, leaf in named.items()}
    if len(found) < len(leaves):
        raise TraceError(
            f"got {len(leaves)} weights and {len(found)} names, expected a name each: see name_of."
        )
    return found


def _is_weight(leaf: Any) -> bool:
    """Whether a leaf is an array of numbers, as far as JAX can tell."""
    if not hasattr(leaf, "dtype"):
        return False
    try:
        return supported(leaf.dtype)
    except TypeError:  # an array of another library, whose fingerprint is tried
        return True


def _header(
    weights: Mapping[str, Any], selection: Mapping[str, Any], fields: Mapping[str, Any]
) -> Header:
    import jaxlib

    from polyattn.jax.flags import snapshot
    from polyattn.trace.fingerprints import fingerprint

    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    defaults: dict[str, Any] = {
        "framework": "jax", "flags": snapshot(),
        "dtypes": dict(Counter(str(weight.dtype) for weight in weights.values())),
        "selection": selection,
        "weights": {name: fingerprint(weight) for name, weight in weights.items()},
    }  # fmt: skip
    given = dict(fields)
    versions |= dict(given.pop("versions", {}))
    try:
        return Header.new(**defaults | given, versions=versions)
    except TypeError as error:
        raise TraceError(f"got fields that no header has: {error}.") from error

"""The recorder of one trace: what calls tell it becomes rows on the device and events for lines.

Each thread has a lane of its own, locked only against one that flushes or closes. What is on the
host is written before the module goes on, so a killed process loses at most the record at hand.
What has to wait, for a device or the disk, is handed to the writing thread with all that follows:
when the outermost call of the program's thread ends, on the CPU also every `_INTERVAL` seconds.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from threading import get_ident
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyattn.torch.internals import current_graph_task, own_parameters, transform_level, version_of
from polyattn.trace.format.record import UNKNOWN
from polyattn.trace.format.sink import JsonlSink
from polyattn.trace.recorders.torch.device_rows import RowPool, Rows
from polyattn.trace.recorders.torch.full_tensors import Saving, TensorFolder
from polyattn.trace.recorders.torch.gradients import Gradients
from polyattn.trace.recorders.torch.lines import Lines
from polyattn.trace.recorders.torch.per_thread import Call, Lane, Seen, versions
from polyattn.trace.recorders.torch.readable_tensors import joined, plain, without_values
from polyattn.trace.recorders.torch.step import current_step
from polyattn.trace.recorders.torch.tensor_paths import Unreadable
from polyattn.trace.recorders.torch.tensor_statistics import recording
from polyattn.trace.recorders.torch.user_statistics import own_statistics, said
from polyattn.trace.recorders.torch.what_to_record import Chosen

if TYPE_CHECKING:
    from polyattn.trace.recorders.torch.trace_hook import TraceHook

__all__ = ["Recorder"]

logger = logging.getLogger("polyattn.trace")

_HOST = torch.device("cpu")
_NO_SHAPE = torch.Size((0,))
_LONGEST = 160
_INTERVAL = 0.05
_PATIENCE = 5.0
"""Seconds to wait for another thread's record: a statistic of the user's may wait for us."""

Found = list[tuple[str, Any]]
"""Tensors, and Unreadable for what could not be looked into, each with its path."""

Place = tuple[int, str, int, int | None, str, str]


class Recorder:
    """Records calls into a sink.

    `chosen`: the statistics. `model`: the model's class, for messages. `steps`: those to record,
    None for all. `inputs`, `parameters`, `gradients`: whether these are recorded too. `folder`:
    where whole tensors go. `immediate`: have nothing wait, for a device or the disk either.
    """

    def __init__(
        self,
        sink: JsonlSink,
        chosen: Chosen,
        *,
        model: str = "",
        rank: int = 0,
        steps: frozenset[int] | None = None,
        inputs: bool = True,
        parameters: bool = False,
        gradients: bool = False,
        folder: TensorFolder | None = None,
        immediate: bool = False,
    ) -> None:
        self.sink, self.steps, self.inputs, self.parameters = sink, steps, inputs, parameters
        self.folder, self.immediate, self.model = folder, immediate, model
        self.custom = chosen.custom
        self._records = self.calls = self.left_out = 0
        with torch.inference_mode(False):
            self.order = torch.zeros(1)
        self._gradients = Gradients(self) if gradients else None
        self._pool = RowPool()
        self._lines = Lines(chosen.names, rank, self._pool)
        self._next_seq = itertools.count().__next__
        self._native = recording(self._next_seq, self._lines.native, sink)
        self._quickly = None if self._native is None else self._native.record
        self._lanes: dict[int, Lane] = {}
        self._counting = threading.Lock()
        self._said: set[str] = set()

    @property
    def records(self) -> int:
        """How many were handed over."""
        return self._records + (0 if self._native is None else self._native.written)

    def go_on(self, seq: int, records: int) -> None:
        """Before any record: go on after those that others wrote; `seq` is the next to give."""
        for _ in range(seq):
            self._next_seq()
        self._records += records

    def lane(self) -> Lane:
        """Return the lane of this thread."""
        lane = self._lanes.get(get_ident())
        if lane is None:
            lane = self._lanes.setdefault(get_ident(), Lane())
        return lane

    def enter(self, hook: TraceHook, found: Found, compiled: bool = False) -> None:
        """A call of the hook's module begins, with these tensors."""
        if (
            current_graph_task() != -1
        ):  # recomputing(): checkpointing runs what was recorded a second time
            return
        lane = self._lanes.get(get_ident()) or self.lane()
        stack = lane.stack
        if compiled and stack:
            self._drop_stale(lane, hook)
        step = current_step()
        wanted = (self.steps is None or step in self.steps) and not self.sink.closed
        call = Call(hook, hook.next_call(), step, wanted, compiled)
        stack.append(call)
        if not wanted:
            self.left_out += 1
            return
        lane.calls += 1
        try:
            if self.parameters:
                self._weights(lane, call)
            if self.inputs:
                self.record(lane, call, "in", found)
                if not compiled:
                    call.given = versions(found)
                if self._gradients is not None:
                    self._gradients.follow(call, "grad_in", found)
        except Exception as error:
            self.missed(hook, error)

    def leave(self, hook: TraceHook, found: Found, compiled: bool = False) -> None:
        """The call ends, with these tensors."""
        if current_graph_task() != -1:
            return
        lane = self._lanes.get(get_ident()) or self.lane()
        call = self._pop(lane, hook)
        if call is None:
            return
        try:
            if call.wanted:
                # what is changed in place comes out too, though the module may not return it
                changed = call.changed() if call.given else ()
                self.record(lane, call, "out", [*found, *changed] if changed else found)
                if self._gradients is not None:
                    self._gradients.follow(call, "grad_out", found)
            if not lane.stack:
                self.end_of_forward(lane)
            elif (
                lane.later
                and monotonic() - lane.since > _INTERVAL
                and all(device.type == "cpu" for device in lane.rows)
            ):
                self.hand_over(lane)
        except Exception as error:
            self.missed(hook, error)

    def fail(self, hook: TraceHook) -> None:
        """The call ends in an exception."""
        lane = self.lane()
        if self._pop(lane, hook) is not None and not lane.stack:
            self.end_of_forward(lane)

    def missed(self, hook: TraceHook, error: Exception) -> None:
        """Say what could not be recorded; the model goes on, whatever is wrong with its trace."""
        self.say(f"something of {hook.name!r} could not be recorded ({said(error)})")

    def end_of_forward(self, lane: Lane) -> None:
        """Hand over, and forget which tensors were seen."""
        lane.seen.clear()
        self.hand_over(lane)

    def _pop(self, lane: Lane, hook: TraceHook) -> Call | None:
        """The innermost call of the module, and those in it that compiled code did not end."""
        for place in range(len(lane.stack) - 1, -1, -1):
            if lane.stack[place].hook is hook:
                call = lane.stack[place]
                del lane.stack[place:]
                return call
        return None

    def _drop_stale(self, lane: Lane, hook: TraceHook) -> None:
        """A module that compiled code calls inside itself: rather, the earlier call has failed."""
        for place, call in enumerate(lane.stack):
            if call.hook is hook and call.compiled:
                del lane.stack[place:]
                if not lane.stack:
                    self.end_of_forward(lane)
                return

    def record(self, lane: Lane, call: Call, phase: str, found: Found) -> None:
        """Record tensors of a call. It runs for every tensor, so it calls little."""
        with lane.lock:
            try:
                self._record(lane, call, phase, found)
            except BaseException:  # KeyboardInterrupt: nothing may refer to what was not written
                self._forget(lane)
                raise

    def _record(self, lane: Lane, call: Call, phase: str, found: Found) -> None:
        hook, level, done = call.hook, transform_level(), 0
        special = bool(self.custom) or hook.whole
        if self._quickly is not None and not special and level is None:
            # in native code, up to the first that is no plain tensor on the CPU
            done = self._quickly(
                lane, found, hook.head, call.number, call.step, phase, call.compiled
            )
        for path, t in found[done:] if done else found:
            try:
                if type(t) is Unreadable:
                    raise t.error
                if (type(t) is not Tensor or level is not None) and (t := plain(t)) is None:
                    continue
                self._one(lane, call, phase, path, t, special)
            except Exception as error:  # the model goes on, whatever is wrong with its trace
                self._unread(lane, call, phase, path, t, error)
        if not lane.events:  # native code has written them
            return
        if self.immediate:
            self._hand_over(lane)
        elif not lane.later:
            self._write(lane)

    def _one(self, lane: Lane, call: Call, phase: str, path: str, t: Tensor, special: bool) -> None:
        hook, seq = call.hook, self._next_seq()
        # Compiled code changes tensors behind their version, and inference tensors have none:
        # there the numbers tell whether a tensor came before.
        version = -1 if call.compiled or t.is_inference() else version_of(t)
        hit = None if version < 0 else lane.seen.get(id(t))
        place = (seq, hook.head, call.number, call.step, phase, path)
        if hit is not None and hit[1] == version and hit[0]() is t:
            if not special:
                lane.events.append((*place, None, None, None, 0, hit[2], None, None))
                return
        else:
            hit = None
        file = self._new(lane, place, t, hook.whole, hit)
        if version >= 0 and hit is None:
            lane.seen[id(t)] = weakref.ref(t), version, seq, file

    def _new(
        self, lane: Lane, place: Place, t: Tensor, whole: bool, hit: Seen | None
    ) -> str | None:
        """Add the event of a tensor; return the file it goes to. `hit`: it was seen before."""
        extra: dict[str, Any] = {}
        if t.is_nested:
            t, extra["nested"] = joined(t)
        why = without_values(t)
        if self.custom:
            extra |= own_statistics(self.custom, t, why)
        saving, file = None, hit[3] if hit is not None else None
        if whole and file is None and not why and (saving := self._save(t, place[0])) is not None:
            file, lane.later = saving.file, True
        if whole and file is not None:
            extra["file"] = file
        if hit is not None and saving is None:
            lane.events.append((*place, None, None, None, 0, hit[2], extra, None))
            return file
        rows, slot = None, 0
        if not why:
            rows, slot, why = self._statistics(lane, t)
        if why:
            extra["note"] = why
        shape = t.shape if type(t) is Tensor else torch.Size(map(int, t.shape))
        lane.events.append((*place, shape, t.dtype, rows, slot, None, extra or None, saving))
        return file

    def _unread(
        self, lane: Lane, call: Call, phase: str, path: str, t: Any, error: Exception
    ) -> None:
        """Add the event of what cannot even be asked for its shape."""
        kind = t.kind if type(t) is Unreadable else type(t).__name__
        extra = {"note": f"a {kind} that cannot be read ({said(error)})"}
        place = (self._next_seq(), call.hook.head, call.number, call.step, phase, path)
        lane.events.append((*place, _NO_SHAPE, UNKNOWN, None, 0, None, extra, None))

    def _statistics(self, lane: Lane, t: Tensor) -> tuple[Rows | None, int, str]:
        """The row that the tensor's numbers are in, or None and why there is none."""
        try:
            device = t.device
            rows = lane.rows.get(device)
            if rows is None or rows.used == rows.size:
                if rows is not None:
                    self.hand_over(lane)
                rows = lane.rows[device] = self._pool.take(device)
            if device.type != "cpu":
                lane.later = True
            slot = rows.used
            rows.write(t, slot)
        except Exception as error:  # the model goes on, whatever is wrong with its trace
            return None, 0, _why(t, error)
        rows.used = slot + 1
        return rows, slot, ""

    def _save(self, t: Tensor, seq: int) -> Saving | None:
        if self.folder is None:
            return None
        try:
            return self.folder.save(t, seq, lambda: self.sink.closed or self.sink.error is not None)
        except Exception as error:
            self.say(f"a tensor could not be kept whole and was left out: {error}")
            return None

    def _weights(self, lane: Lane, call: Call) -> None:
        """Record the module's own parameters, those that have changed since they were recorded."""
        module = call.hook.module()
        for name, t in [] if module is None else own_parameters(module).items():
            if t is None:
                continue
            known = versions([(name, t)])
            version = (id(t), known[0][2] if known else -1)
            if call.hook.recorded_weights.get(name) != version:
                call.hook.recorded_weights[name] = version
                self.record(lane, call, "param", [(name, t)])

    def say(self, what: str) -> None:
        """Log a warning once."""
        if what not in self._said:
            self._said.add(what)
            logger.warning("%s: %s", self.sink.path, what)

    def hand_over(self, lane: Lane) -> None:
        """Give what the lane has to the writing thread."""
        with lane.lock:
            try:
                self._hand_over(lane)
            except BaseException:
                self._forget(lane)
                raise

    def _forget(self, lane: Lane) -> None:
        lane.seen.clear()
        self._lines.forget()

    def _write(self, lane: Lane) -> None:
        """Write the events of a lane whose numbers are on the host."""
        events, rows = lane.events, lane.rows.get(_HOST)
        lane.events = []
        if not self.sink.direct(lambda: self._lines.now(events, rows), len(events)):
            lane.events = events
            self._hand_over(lane)
            return
        with self._counting:
            self._records += len(events)
        if rows is not None:
            rows.used = 0

    def _hand_over(self, lane: Lane) -> None:
        events, rows = lane.events, lane.rows
        lane.since = monotonic()
        if lane.calls:
            with self._counting:
                self.calls += lane.calls
            lane.calls = 0
        if not events:
            return
        lane.events, lane.rows, lane.later = [], {}, False
        for one in rows.values():
            one.send()
        with self._counting:
            self._records += len(events)
        self.sink.extend(self._lines.of(events, list(rows.values())), len(events))

    def finish(self) -> None:
        """Hand over what every thread has; what one is recording just now it hands over itself."""
        for lane in list(self._lanes.values()):
            if lane.lock.acquire(timeout=_PATIENCE):
                try:
                    self._hand_over(lane)
                finally:
                    lane.lock.release()


def _why(t: Tensor, error: Exception) -> str:
    """Why a tensor has no statistics, as its record says it."""
    if type(t) in (Tensor, torch.nn.Parameter):
        return f"{error}"[:_LONGEST]
    return f"a {type(t).__name__}, whose values are not to be had ({error})"[:_LONGEST]

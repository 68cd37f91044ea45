"""What users ask for: scopes, recording.

A scope is encoded as one short string, ``"flex,sdpa_math;never,these;fallback"``, because a
string is what both a dictionary key and a compiler's guard compare fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from contextvars import Token
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from polyattn.errors import InvalidProblem
from polyattn.selection import Selection, scopes
from polyattn.selection.decorated import run_within
from polyattn.selection.registry import registry

__all__ = ["Request", "record_selections", "use_backend"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Request:
    """An ordered allow-list (empty = all), what is never to run, and what else may happen."""

    names: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    on_unsupported: str | None = None

    def encode(self) -> str:
        """Return the request as a string; see :meth:`decode`."""
        return f"{','.join(self.names)};{','.join(self.never)};{self.on_unsupported or ''}"

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def decode(cls, text: str) -> Request:
        """Read an encoded request.

        >>> Request.decode("flex;sdpa_math;fallback")
        Request(names=('flex',), never=('sdpa_math',), on_unsupported='fallback')
        """
        names, never, policy = (*text.split(";"), "", "")[:3]
        split = tuple(filter(None, names.split(","))), tuple(filter(None, never.split(",")))
        return cls(*split, policy or None)

    @classmethod
    def make(
        cls,
        names: Iterable[object],
        never: Iterable[object] = (),
        on_unsupported: str | None = None,
    ) -> Request:
        """Check and expand what a user wrote; raise for unknown names and policies."""
        if on_unsupported not in (None, "error", "fallback"):
            raise InvalidProblem(
                f"got on_unsupported={on_unsupported!r}, expected 'error' or 'fallback'."
            )
        return cls(_expand(names, "backend"), _expand(never, "never="), on_unsupported)


def _expand(names: Iterable[object], asked_by: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        names = (names,)
    found = [e for name in names for e in registry.expand(name, asked_by=asked_by)]
    return tuple(dict.fromkeys(found))


def nested(
    outer: str | None, names: tuple[Any, ...], never: tuple[Any, ...], on_unsupported: str | None
) -> str:
    """Encode a scope within `outer`: its own allow-list if it has one, all "never"s together.

    A backend that the inner scope names is not held back by an outer "never": the more specific
    wish wins. A pure function of constants: polyattn.torch tells compilers so.
    """
    inner = Request.make(names, never, on_unsupported)
    around = Request.decode(outer or "")
    barred = [n for n in around.never if n not in inner.names]
    return Request(
        inner.names or around.names,
        tuple(dict.fromkeys([*barred, *inner.never])),
        inner.on_unsupported or around.on_unsupported,
    ).encode()


class use_backend:
    """Ask for backends within a ``with`` block, or within a decorated function.

    `names`: an ordered allow-list; the first that can run a problem runs it, and if none can,
    :class:`~polyattn.errors.Unsupported` is raised with every reason
    (``on_unsupported="fallback"``: the automatic choice steps in, and it is recorded).
    `never`: backends that may not run. The innermost scope counts; "never" lists add up.

    Right under nesting, exceptions, threads and asyncio tasks, and seen by compiled code.

    >>> with use_backend("sdpa_flash", "sdpa_math"), use_backend(never="sdpa_math"):
    ...     use_backend.current()
    Request(names=('sdpa_flash', 'sdpa_math'), never=('sdpa_math',), on_unsupported=None)
    """

    def __init__(
        self, *names: object, never: Iterable[object] | str = (), on_unsupported: str | None = None
    ) -> None:
        if len(names) == 1 and isinstance(names[0], (list, tuple, set, frozenset)):
            names = tuple(names[0])
        self._names = names
        one = isinstance(never, str) or not isinstance(never, Iterable)
        self._never = (never,) if one else tuple(never)
        self._on_unsupported = on_unsupported
        self._before: list[str | None] = []
        nested(None, self._names, self._never, on_unsupported)  # misspelt names fail here
        if not names and not self._never and on_unsupported is None:
            raise InvalidProblem(
                "got use_backend() without anything, expected backend names, never=, or "
                "on_unsupported=."
            )

    def __enter__(self) -> None:
        outer = scopes.current_scope()
        encoded = nested(outer, self._names, self._never, self._on_unsupported)
        self._before.append(scopes.enter(encoded, self))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        before = self._before.pop()
        try:
            scopes.leave(before, self)
        except BaseException:  # an interrupt may have cut it short anywhere
            scopes.leave(before, self)
            raise

    def __call__(self, function: F) -> F:
        """Decorate a function, coroutine or generator: each call runs in a scope of its own."""
        fresh = functools.partial(
            use_backend, *self._names, never=self._never, on_unsupported=self._on_unsupported
        )
        return run_within(fresh, function)

    @staticmethod
    def current() -> Request:
        """Return what is asked for here; empty outside of any scope."""
        return Request.decode(scopes.current_scope() or "")


class _Recording(NamedTuple):
    """A recorder that was entered, and what puts back what was before it."""

    ran: list[Selection]
    recording: Token[Any]
    recorded: Token[str]
    number: Token[int]
    noted: tuple[bool, bool]


class record_selections(AbstractContextManager[list[Selection]]):
    """Record what really runs: one :class:`~polyattn.selection.Selection` per call, in order.

    ::

        with record_selections() as ran:
            model(x)
        print(ran[0].backend, ran[0].version, ran[0].source)

    Calls of this context are recorded (not of other threads); nested recorders all record.
    """

    def __init__(self) -> None:
        self._entered: dict[int, _Recording] = {}  # threads may share this object

    def __enter__(self) -> list[Selection]:
        ran: list[Selection] = []
        outer, outer_number = scopes.recording.get(()), scopes.recorder.get()
        scopes.record(1)
        try:
            recording = scopes.recording.set((*outer, ran))
            number = scopes.recorder.set(next(scopes.recorders))
            recorded = scopes.recorded.set("recorded")
            mine = _Recording(ran, recording, recorded, number, scopes.begin())
            self._entered[id(ran)] = mine
        except BaseException:  # an interrupt
            scopes.record(-1)
            scopes.recording.set(outer)
            scopes.recorded.set("recorded" if outer else "")
            scopes.recorder.set(outer_number)
            raise
        return ran

    def __exit__(self, *exc: object) -> None:
        scopes.record(-1)
        now = scopes.recording.get(())
        found = (self._entered.pop(id(one), None) for one in reversed(now))
        mine = next((one for one in found if one is not None), None)
        if mine is None:  # a generator that is closed in another context than its own
            scopes.tell(-1, scopes.entered_by_coroutine())
            return
        left = tuple(one for one in now if one is not mine.ran)
        before = mine.recording.old_value
        before = () if before is Token.MISSING else before
        if list(map(id, left)) == list(map(id, before)):
            scopes.put_back(scopes.recorder, mine.number, 0)
            scopes.put_back(scopes.recorded, mine.recorded, "recorded" if left else "")
            scopes.put_back(scopes.recording, mine.recording, left)
            scopes.end(mine.noted)
            return
        # generators that are closed out of turn: the others go on
        scopes.recording.set(left)
        if left:
            scopes.tell(-1, mine.noted[1])
            return
        scopes.recorded.set("")
        scopes.recorder.set(0)
        scopes.end(mine.noted)

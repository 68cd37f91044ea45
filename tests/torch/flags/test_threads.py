"""Scopes of knobs in several threads, tasks and processes at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.errors import FlagsError
from polyattn.torch.flags import FlagsConflictWarning, flags, snapshot
from tests.torch.flags.flag_programs import Worker, stand

ON, OFF = {"cudnn.benchmark": True}, {"cudnn.benchmark": False}


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = stand(later=True)
    yield
    assert stand(later=True) == before


@pytest.fixture
def other() -> Iterator[Worker]:
    worker = Worker(1)
    before = worker.do(stand)
    yield worker
    assert worker.do(stand) == before
    worker.end()


def benchmark() -> bool:
    return torch.backends.cudnn.benchmark


@contextlib.contextmanager
def held(worker: Worker, changes: dict[str, Any], **options: Any) -> Iterator[None]:
    """A scope that another thread holds."""
    scope = flags(changes, **options)
    worker.do(scope.__enter__)
    try:
        yield
    finally:
        worker.do(lambda: scope.__exit__(None, None, None))


def enter(changes: dict[str, Any], **options: Any) -> None:
    with flags(changes, **options):
        pass


def test_another_value_in_another_thread_warns_with_who_and_where(other: Worker) -> None:
    with held(other, ON):
        assert benchmark(), "the knob is for the whole process"
        with pytest.warns(FlagsConflictWarning) as caught:
            enter(OFF)
        text = str(caught[0].message)
        assert "cudnn.benchmark=False" in text and "program-1 holds cudnn.benchmark=True" in text
        assert __file__ in text or "flag_programs.py" in text, "where it was entered"
        assert caught[0].filename == __file__, "the warning does not point at the caller"
        assert benchmark()


def test_another_value_in_another_thread_can_be_refused(other: Worker) -> None:
    with held(other, ON):
        before = stand()
        with pytest.raises(FlagsError, match=r"holds cudnn\.benchmark=True"):
            enter({"flush_denormal": True, **OFF}, on_conflict="refuse")
        assert stand() == before
    enter(OFF, on_conflict="refuse")


def test_another_value_in_another_thread_can_be_allowed(other: Worker) -> None:
    with held(other, ON), warnings.catch_warnings():
        warnings.simplefilter("error")
        enter(OFF, on_conflict="allow")


def test_warning_that_is_an_error_leaves_nothing_set(other: Worker) -> None:
    with held(other, ON), warnings.catch_warnings():
        warnings.simplefilter("error")
        before = stand()
        with pytest.raises(FlagsConflictWarning):
            enter({"flush_denormal": True, **OFF})
        assert stand() == before


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (ON, ON),  # the same value
        (ON, {"cudnn.deterministic": True}),  # another knob
        ({"grad_enabled": False}, {"grad_enabled": True}),  # one of the thread
        ({"flush_denormal": True}, {"flush_denormal": False}),
    ],
)
def test_no_conflict(theirs: dict[str, Any], ours: dict[str, Any], other: Worker) -> None:
    with held(other, theirs), warnings.catch_warnings():
        warnings.simplefilter("error")
        enter(ours, on_conflict="refuse")
        enter(ours, on_conflict="warn")


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"float32_matmul_precision": "high"}, {"cuda.matmul.fp32_precision": "ieee"}),
        ({"cuda.matmul.allow_tf32": True}, {"float32_matmul_precision": "highest"}),
        ({"deterministic_debug_mode": 2}, {"deterministic_algorithms": False}),
        ({"num_threads": 2}, {"num_threads": 3}),
    ],
)
def test_coupled_knobs_conflict(
    theirs: dict[str, Any], ours: dict[str, Any], other: Worker
) -> None:
    with held(other, theirs), pytest.raises(FlagsError, match="holds"):
        enter(ours, on_conflict="refuse")


def test_nested_scopes_of_one_thread_do_not_conflict(other: Worker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with flags(ON), flags(OFF), flags(ON):
            assert benchmark()


@pytest.mark.parametrize("first_to_end", [0, 1])
def scopes_of_two_threads_that_end_in_either_order(first_to_end: int, other: Worker) -> None:
    ours = flags({"num_threads": 3, "float32_matmul_precision": "high"}, on_conflict="allow")
    theirs = flags({"num_threads": 2, "cuda.matmul.fp32_precision": "ieee"}, on_conflict="allow")
    ours.__enter__()
    other.do(theirs.__enter__)
    ends: list[Callable[[], Any]] = [
        lambda: ours.__exit__(None, None, None),
        lambda: other.do(lambda: theirs.__exit__(None, None, None)),
    ]
    ends[first_to_end]()
    ends[1 - first_to_end]()


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_inductor_s_switch_in_two_threads(first_to_end: int, other: Worker) -> None:
    import torch._inductor.config as config

    if not hasattr(config, "deterministic"):
        pytest.skip("not in this version of torch")
    scopes = [flags(deterministic_algorithms=True, on_conflict="allow") for _ in range(2)]
    scopes[0].__enter__()
    other.do(scopes[1].__enter__)
    try:
        ends: list[Callable[[], Any]] = [
            lambda: scopes[0].__exit__(None, None, None),
            lambda: other.do(lambda: scopes[1].__exit__(None, None, None)),
        ]
        ends[first_to_end]()
        ends[1 - first_to_end]()
        assert config.deterministic is False
        assert other.do(lambda: config.deterministic) is False
    finally:
        config.deterministic = False
        other.do(lambda: setattr(config, "deterministic", False))


def test_scope_that_ends_in_another_thread(other: Worker) -> None:
    scope = flags(ON)
    other.do(scope.__enter__)
    assert benchmark()
    scope.__exit__(None, None, None)
    assert not benchmark()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other.do(lambda: enter(OFF))  # it is gone for the thread that entered it, too


def test_scope_of_a_thread_s_knob_that_ends_in_another_says_what_stays(other: Worker) -> None:
    scope = flags({"grad_enabled": False, **ON})
    other.do(scope.__enter__)
    with pytest.raises(FlagsError, match="end of a scope in another thread"):
        scope.__exit__(None, None, None)
    assert torch.is_grad_enabled() and not benchmark()
    assert other.do(torch.is_grad_enabled) is False
    other.do(lambda: torch.set_grad_enabled(True))


def test_number_of_threads_is_the_thread_s_and_that_of_later_ones(other: Worker) -> None:
    own = torch.get_num_threads()
    theirs = other.do(torch.get_num_threads)
    with flags(num_threads=own + 2), ThreadPoolExecutor(1) as pool:
        assert torch.get_num_threads() == own + 2
        assert pool.submit(torch.get_num_threads).result() == own + 2
        assert other.do(torch.get_num_threads) == theirs


async def task(changes: dict[str, Any], entered: asyncio.Event, wait: asyncio.Event) -> None:
    with flags(changes):
        entered.set()
        await wait.wait()


def test_tasks_with_different_values_warn() -> None:
    async def main() -> None:
        events = [asyncio.Event() for _ in range(4)]

        async def second() -> None:
            await events[0].wait()
            with pytest.warns(FlagsConflictWarning):
                await task(OFF, events[1], events[0])
            events[2].set()

        await asyncio.gather(task(ON, events[0], events[2]), second())

    asyncio.run(main())


def test_tasks_that_end_in_the_order_of_their_beginning() -> None:
    async def main() -> None:
        first, second, end_first, end_second = (asyncio.Event() for _ in range(4))
        one = asyncio.create_task(task(ON, first, end_first))
        await first.wait()
        two = asyncio.create_task(
            task({"float32_matmul_precision": "high"} | ON, second, end_second)
        )
        await second.wait()
        end_first.set()
        await one
        assert benchmark()
        end_second.set()
        await two
        assert not benchmark()

    asyncio.run(main())


def test_child_task_and_thread_of_a_task_inside_its_scope_do_not_warn() -> None:
    async def main() -> None:
        with flags(ON):
            await asyncio.gather(child(OFF), asyncio.to_thread(enter, OFF))

    async def child(changes: dict[str, Any]) -> None:
        with flags(changes):
            await asyncio.sleep(0)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(main())


def test_many_threads_at_once_without_a_schedule() -> None:
    names = ["cudnn.benchmark", "cudnn.deterministic", "cuda.flash_sdp_enabled", "grad_enabled"]
    start = threading.Barrier(8)

    def work(number: int) -> bool:
        start.wait(30)
        for step in range(100):
            with (
                flags({names[(number + step) % 4]: bool(step % 2)}, on_conflict="allow"),
                flags(float32_matmul_precision=("high", "highest")[step % 2], on_conflict="allow"),
            ):
                snapshot()
        return torch.is_grad_enabled()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [True] * 8


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("busy", ["holding a scope", "entering and leaving"])
def test_fork_while_another_thread_is_busy(busy: str) -> None:
    stop, started = threading.Event(), threading.Event()

    def work() -> None:
        if busy == "holding a scope":
            with flags(ON):
                started.set()
                stop.wait(60)
        while not stop.is_set():
            with flags({"cudnn.deterministic": True}, on_conflict="allow"):
                started.set()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(60)
    try:
        for _ in range(20 if busy == "entering and leaving" else 2):
            assert in_a_child(_child) == 0
    finally:
        stop.set()
        thread.join(60)


def _child() -> int:
    """Scopes work in the child, and what its own set it puts back."""
    before = snapshot()
    with flags({"float32_matmul_precision": "high"}, on_conflict="allow"):
        inside = torch.get_float32_matmul_precision() == "high"
    return 0 if inside and snapshot() == before else 3


def in_a_child(call: Callable[[], int]) -> int:
    """The child's exit status; it is killed if it takes too long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads is the point
        child = os.fork()
    if child == 0:
        status = 4
        try:
            status = call()
        finally:
            sys.stdout.flush()
            os._exit(status)
    return wait(child)


def wait(child: int) -> int:
    timer = threading.Timer(60, os.kill, (child, 9))
    timer.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        timer.cancel()

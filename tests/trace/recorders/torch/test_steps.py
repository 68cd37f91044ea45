"""Steps of tasks, generators and threads: each call is of the step that it is in, whoever waits."""

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from polyattn.hooks import trace, trace_step
from polyattn.trace import read
from polyattn.trace.recorders.torch import current_step


@contextmanager
def a_step_of_another_thread(step: int) -> Iterator[None]:
    """One that is begun before the block and ends after it."""
    inside, go = threading.Event(), threading.Event()

    def other() -> None:
        with trace_step(step):
            inside.set()
            go.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    try:
        yield
    finally:
        go.set()
        thread.join()


async def turn() -> None:
    """Let the other tasks go on."""
    for _ in range(3):
        await asyncio.sleep(0)


def test_each_task_is_in_its_own_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)

    async def request(step: int) -> None:
        with trace_step(step):
            await turn()
            model(torch.full((1, 4), float(step)))

    async def both() -> None:
        await asyncio.gather(request(0), request(1))

    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        asyncio.run(both())
    ins = [r for r in read(tmp_path / "run.jsonl").records if r.phase == "in"]
    assert [r.step for r in ins] == [0, 1] == [r.samples[0] for r in ins if r.samples]
    assert current_step() is None


def test_the_filter_of_steps_follows_the_task(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)

    async def request(step: int) -> None:
        with trace_step(step):
            await turn()
            model(torch.full((1, 4), float(step)))

    async def three() -> None:
        await asyncio.gather(*map(request, range(3)))

    with torch.no_grad(), trace(model, tmp_path / "run.jsonl", steps={1}):
        asyncio.run(three())
    found = read(tmp_path / "run.jsonl").records
    assert [(r.phase, r.step) for r in found] == [("in", 1), ("out", 1)]
    assert found[0].samples and found[0].samples[0] == 1


def test_a_task_in_no_step_is_not_in_that_of_another() -> None:
    seen: list[int | None] = []

    async def inside() -> None:
        with trace_step(7):
            await turn()

    async def outside() -> None:
        seen.append(current_step())

    async def both() -> None:
        await asyncio.gather(inside(), outside())

    asyncio.run(both())
    assert seen == [None]


def test_a_task_is_in_the_step_that_started_it_until_that_ends() -> None:
    seen: list[int | None] = []

    async def worker() -> None:
        for _ in range(2):
            seen.append(current_step())
            await turn()

    async def program() -> None:
        with trace_step(3):
            task = asyncio.create_task(worker())
            await asyncio.sleep(0)
        await task

    asyncio.run(program())
    assert seen == [3, None]


def test_a_thread_that_a_task_starts_is_in_the_step_begun_last() -> None:
    async def program() -> int | None:
        with trace_step(5):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(None, current_step)  # without the task's context

    assert asyncio.run(program()) == 5


def test_interleaved_generators_leave_no_step_behind() -> None:
    def tokens(step: int) -> Iterator[None]:
        with trace_step(step):
            yield

    first, second = tokens(0), tokens(1)
    next(first)
    next(second)
    first.close()
    assert current_step() == 1
    second.close()
    with a_step_of_another_thread(9):
        assert current_step() == 9
    assert current_step() is None


def test_a_step_that_ends_in_another_context_is_over_in_its_own() -> None:
    def tokens() -> Iterator[None]:
        with trace_step(4):
            yield

    begun = tokens()
    next(begun)
    contextvars.copy_context().run(begun.close)  # as a server closes a stream
    assert current_step() is None
    with trace_step(1):
        assert current_step() == 1


def test_code_in_a_context_from_before_is_in_the_step_around_it() -> None:
    before = contextvars.copy_context()
    with trace_step(2):
        assert before.run(current_step) == 2


def test_a_step_inside_compiled_code(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)

    @torch.compile(backend="eager")
    def loop(x: torch.Tensor) -> torch.Tensor:
        for step in range(3):
            with trace_step(step):
                x = model(x)
        return x

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the graph ends there, and nothing is wrong
        with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
            loop(torch.ones(1, 4))
    torch._dynamo.reset()
    assert [r.step for r in read(tmp_path / "run.jsonl").records] == [0, 0, 1, 1, 2, 2]

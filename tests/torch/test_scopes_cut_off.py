"""What is in force when scopes end out of turn, in another context, or by an interrupt."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any

import pytest
import torch

from polyattn import record_selections, set_backend, use_backend
from polyattn.integrations import routing
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.selection import module_policy, prepare, scopes
from polyattn.selection.registry import registry
from polyattn.torch import attention
from polyattn.torch.dropin import torch_sdpa

Q = torch.randn(1, 8, 2, 16)


def asked() -> str | None:
    return scopes.current_scope()


def held(name: str) -> Generator[None, None, None]:
    with use_backend(name):
        yield


def recorded(into: list[Any]) -> Generator[None, None, None]:
    with record_selections() as ran:
        into.append(ran)
        yield


def test_a_generator_that_is_closed_within_a_later_scope_leaves_that_in_force() -> None:
    first, second = held("sdpa_math"), held("flex")
    next(first)
    next(second)
    with use_backend("reference"):
        here = asked()
        first.close()
        assert asked() == here
        second.close()
        assert asked() == here
    assert asked() is None


def test_a_generator_that_is_closed_in_another_context_ends_no_scope_there() -> None:
    running = held("sdpa_math")
    contextvars.Context().run(next, running)
    with use_backend("reference"):
        here = asked()
        running.close()
        assert asked() == here
    assert asked() is None


def test_recorders_of_generators_end_in_any_order() -> None:
    heard: list[Any] = []
    first, second = recorded(heard), recorded(heard)
    next(first)
    next(second)
    first.close()
    attention(Q, Q, Q)
    second.close()
    attention(Q, Q, Q)
    assert list(map(len, heard)) == [0, 1]
    assert not scopes.recording.get(()) and not scopes.recorded.get("")


def test_threads_may_share_a_recorder() -> None:
    recorder, together = record_selections(), threading.Barrier(2)
    heard: list[list[Any]] = []

    def work() -> None:
        for _ in range(20):
            together.wait(10)
            with recorder as ran:
                attention(Q, Q, Q)
            heard.append(ran)
        heard.append([*scopes.recording.get(())] or [None])

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(map(len, heard)) == [1] * 42 and heard.count([None]) == 2


def test_an_asynchronous_generator_that_the_loop_closes_may_hold_a_recorder() -> None:
    faults: list[Any] = []

    async def items() -> AsyncIterator[None]:
        with use_backend("reference"), record_selections():
            yield

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: faults.append(told))
        running = items()
        await running.__anext__()
        del running
        for _ in range(3):
            await asyncio.sleep(0)

    before = scopes.state.recorders
    asyncio.run(main())
    assert not faults and scopes.state.recorders == before


def interrupted(*_: object, **__: object) -> Any:
    raise KeyboardInterrupt


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    calls: list[None] = []

    def cut_off(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return interrupted() if len(calls) == 1 else function(*args, **kwargs)

    return cut_off


@pytest.mark.parametrize(
    ("scope", "where"),
    [
        (lambda: use_backend("reference"), "begin"),
        (lambda: use_backend("reference"), "put_back"),
        (lambda: use_backend("reference"), "end"),
        (record_selections, "begin"),
    ],
)
def test_an_interrupt_within_a_scopes_ends_leaves_nothing(
    scope: Any, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = scopes.state.recorders
    monkeypatch.setattr(scopes, where, once(getattr(scopes, where)))
    with pytest.raises(KeyboardInterrupt), scope():
        pass
    assert asked() is None and not scopes.recording.get(())
    assert scopes.state.recorders == before


@pytest.mark.parametrize("where", ["_take_names", "_wait"])
def test_an_interrupt_while_routing_begins_leaves_nothing_replaced(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing.Router, where, interrupted)
    with pytest.raises(KeyboardInterrupt), route_sdpa(request=use_backend("reference")):
        pass
    assert torch.nn.functional.scaled_dot_product_attention is torch_sdpa
    assert routing.router.depth == 0 and not routing.router.scopes and asked() is None


def test_an_interrupt_while_routing_ends_leaves_nothing_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(KeyboardInterrupt), route_sdpa(request=use_backend("reference")):
        monkeypatch.setattr(routing, "_swap", once(routing._swap))
    assert torch.nn.functional.scaled_dot_product_attention is torch_sdpa
    assert routing.router.depth == 0 and asked() is None


def test_an_interrupt_while_policies_are_attached_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    monkeypatch.setattr(module_policy, "_Enter", once(module_policy._Enter))
    with pytest.raises(KeyboardInterrupt):
        set_backend(model, {"*": "reference"})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("error", [RecursionError, MemoryError])
def test_what_a_deep_stack_raises_is_no_fault_of_a_backend(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise error

    own = registry["torch", "reference"]
    with monkeypatch.context() as patch:
        patch.setitem(prepare._loads, own.key, prepare._Loaded(own, fails))
        scopes.invalidate()
        with pytest.raises(error):
            attention(Q[:, :3], Q, Q, backend="reference")
    assert attention(Q[:, :3], Q, Q, backend="reference").shape == (1, 3, 2, 16)

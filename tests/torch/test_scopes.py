"""Scopes: precedence, nesting, exceptions, threads, tasks, modules; and what they override."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from polyattn import (
    Causal,
    InvalidProblem,
    UnknownBackend,
    Unsupported,
    record_selections,
    set_backend,
    use_backend,
)
from polyattn.integrations.fastvideo import selector
from polyattn.selection import Source, scopes
from polyattn.torch import attention, explain
from polyattn.torch import scaled_dot_product_attention as sdpa

Q = torch.randn(1, 8, 2, 16)


def ran_on(**options: object) -> tuple[str, str]:
    with record_selections() as ran:
        attention(Q, Q, Q, **options)
    assert len(ran) == 1
    return ran[0].backend, str(ran[0].source)


def test_automatic_is_the_default() -> None:
    assert ran_on() == ("sdpa_flash", "HEURISTIC")


def test_precedence_from_weakest_to_strongest(monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer(torch.nn.Module):
        def forward(self) -> tuple[str, str]:
            return ran_on()

    layer = Layer()
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_math")
    assert ran_on() == ("sdpa_math", "ENV")
    with set_backend(layer, "reference"):
        assert layer() == ("reference", "MODULE")
        with use_backend("sdpa_flash"):
            assert layer() == ("sdpa_flash", "SCOPE")
            assert ran_on(backend="sdpa_math") == ("sdpa_math", "CALL")
            with selector.global_force_attn_backend_context_manager("reference"):
                assert ran_on(backend="sdpa_math") == ("reference", "FORCED")
                picked = explain(Q, Q, Q, backend="sdpa_math")
                assert picked.overridden == {
                    "CALL": "sdpa_math",
                    "SCOPE": "sdpa_flash",
                    "ENV": "sdpa_math",
                }
    assert ran_on() == ("sdpa_math", "ENV")
    monkeypatch.delenv("POLYATTN_BACKEND")
    assert ran_on() == ("sdpa_flash", "HEURISTIC")


def test_misspelt_environment_is_an_error_with_near_matches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_flsh")
    with pytest.raises(UnknownBackend, match=r"POLYATTN_BACKEND.*'sdpa_flash'"):
        attention(Q, Q, Q)
    with pytest.raises(UnknownBackend):
        selector.get_env_variable_attn_backend()


def test_an_ordered_allow_list_takes_the_first_that_can() -> None:
    with use_backend("sdpa_cudnn", "reference", "sdpa_math"):
        assert ran_on() == ("reference", "SCOPE")


def test_requests_are_strict_and_carry_every_decision() -> None:
    with use_backend("sdpa_cudnn"), pytest.raises(Unsupported) as caught:
        attention(Q, Q, Q)
    assert set(caught.value.decisions) >= {"sdpa_flash", "sdpa_cudnn", "reference", "flex"}
    assert "SCOPE" in str(caught.value)


def test_fallback_is_allowed_only_by_policy_and_recorded() -> None:
    with use_backend("sdpa_cudnn", on_unsupported="fallback"), record_selections() as ran:
        attention(Q, Q, Q)
    assert ran[0].backend == "sdpa_flash"
    assert ran[0].source is Source.HEURISTIC
    assert "sdpa_cudnn" in str(ran[0].fallback)


def test_never_adds_up_and_the_allow_list_is_inherited() -> None:
    with use_backend(never="sdpa_flash"):
        assert ran_on() == ("sdpa_math", "HEURISTIC")
        with use_backend(never=("sdpa_math", "native_cpu")):
            assert ran_on() == ("reference", "HEURISTIC")
        with use_backend("sdpa_flash"):
            assert ran_on() == ("sdpa_flash", "SCOPE")
    with use_backend("sdpa_flash", "sdpa_math"), use_backend(never="sdpa_flash"):
        assert ran_on() == ("sdpa_math", "SCOPE")


def test_never_inside_an_allow_list_leaves_nothing_rather_than_everything() -> None:
    outer, inner = use_backend("sdpa_math"), use_backend(never="sdpa_math")
    with outer, inner, pytest.raises(Unsupported, match="never"):
        attention(Q, Q, Q)


def test_never_holds_for_calls_that_only_torch_can_take() -> None:
    x = torch.randn(8, 16)
    with use_backend(never="sdpa_math"), pytest.raises(Unsupported, match="forbids sdpa_math"):
        sdpa(x, x, x)
    with use_backend(never="flex"):
        sdpa(x, x, x)


def test_never_bars_a_weaker_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYATTN_BACKEND", "sdpa_math")
    with use_backend(never="sdpa_math"), pytest.raises(Unsupported, match="never"):
        attention(Q, Q, Q)


def test_exceptions_restore() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("reference"):
        1 / 0  # noqa: B018
    assert ran_on() == ("sdpa_flash", "HEURISTIC")


def test_threads_do_not_see_each_other() -> None:
    seen: dict[str, tuple[str, str]] = {}
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        assert inside.wait(60)
        seen["other"] = ran_on()
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with use_backend("reference"):
        inside.set()
        assert done.wait(60)
        seen["this"] = ran_on()
    thread.join()
    assert seen == {"other": ("sdpa_flash", "HEURISTIC"), "this": ("reference", "SCOPE")}


def test_asyncio_tasks_do_not_see_each_other() -> None:
    async def task(name: str | None, first: asyncio.Event, second: asyncio.Event) -> list[str]:
        found = []
        if name is None:
            await first.wait()
            found.append(ran_on()[0])
            second.set()
            return found
        with use_backend(name):
            first.set()
            await second.wait()
            found.append(ran_on()[0])
        found.append(ran_on()[0])
        return found

    async def main() -> list[list[str]]:
        first, second = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(task("reference", first, second), task(None, first, second))

    assert asyncio.run(main()) == [["reference", "sdpa_flash"], ["sdpa_flash"]]


def test_decorators_of_functions_and_coroutines() -> None:
    scope = use_backend("reference")

    @scope
    def plain() -> str:
        return ran_on()[0]

    @scope
    async def awaited() -> str:
        await asyncio.sleep(0)
        return ran_on()[0]

    assert plain() == "reference"
    assert asyncio.run(awaited()) == "reference"
    assert ran_on()[0] == "sdpa_flash"


def test_one_instance_can_be_entered_again_and_by_several_threads() -> None:
    scope = use_backend("reference")
    with scope, scope:
        assert ran_on()[0] == "reference"
    found: list[str] = []

    def work() -> None:
        for _ in range(50):
            with scope:
                found.append(ran_on()[0])
            found.append(ran_on()[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count("reference") == found.count("sdpa_flash") == 200


def test_forcing_reaches_all_threads() -> None:
    found: list[str] = []
    with selector.global_force_attn_backend_context_manager("sdpa_math"):
        thread = threading.Thread(target=lambda: found.append(ran_on()[0]))
        thread.start()
        thread.join()
    assert found == ["sdpa_math"]
    assert scopes.state.forced is None


def test_empty_and_wrong_scopes() -> None:
    with pytest.raises(InvalidProblem):
        use_backend()
    with pytest.raises(UnknownBackend, match="Did you mean 'reference'"):
        use_backend("refrence")
    with pytest.raises(InvalidProblem, match="on_unsupported"):
        use_backend("flex", on_unsupported="warn")


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_module_policies_by_pattern() -> None:
    model = Model()
    policy = set_backend(
        model, {"blocks.0": "reference", r"blocks\.[12]": ["sdpa_cudnn", "sdpa_math"]}
    )
    with record_selections() as ran:
        model(Q)
    assert [r.backend for r in ran] == ["reference", "sdpa_math", "sdpa_math", "sdpa_flash"]
    policy.remove()
    with record_selections() as ran:
        model(Q)
    assert {r.backend for r in ran} == {"sdpa_flash"}
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_inner_module_policies_win_and_none_is_automatic_again() -> None:
    model = Model()
    policy = {"": "reference", "blocks.1": "sdpa_math", "head": None}
    with set_backend(model, policy), record_selections() as ran:
        model(Q)
    assert [r.backend for r in ran] == ["reference", "sdpa_math", "reference", "sdpa_flash"]


def test_module_policy_ends_with_an_exception_in_forward() -> None:
    class Broken(torch.nn.Module):
        def forward(self) -> None:
            raise ValueError("broken")

    broken = Broken()
    with set_backend(broken, "reference"):
        with pytest.raises(ValueError, match="broken"):
            broken()
        assert scopes.local.module is None


def test_pattern_that_matches_nothing() -> None:
    with pytest.raises(InvalidProblem, match=r"blocks\.0"):
        set_backend(Model(), {"blokcs.0": "reference"})


def test_recorders_nest_and_show_what_really_ran() -> None:
    with record_selections() as outer:
        attention(Q, Q, Q, mask=Causal())
        with record_selections() as inner:
            sdpa(Q, Q, Q)
            sdpa(Q, Q, Q, is_causal=True)
    assert len(inner) == 2 and len(outer) == 3
    assert outer[1].version.startswith("torch 2")
    assert outer[0].to_dict()["problem"]


def test_a_request_is_not_dropped_where_the_drop_in_would_ask_torch() -> None:
    x = torch.randn(8, 16)
    assert sdpa(x, x, x).shape == x.shape
    with record_selections() as ran:
        sdpa(x, x, x)
    assert ran[0].backend == "torch" and "2 dims" in ran[0].reason
    with use_backend("sdpa_math"), pytest.raises(Unsupported):
        sdpa(x, x, x)


def test_decorators_of_generators_cover_them_while_they_run() -> None:
    scope = use_backend("reference")

    @scope
    def items(log: list[Any]) -> Any:
        try:
            log.append((yield ran_on()[0]))
            yield ran_on()[0]
        except ValueError:
            yield ran_on()[0]
        finally:
            log.append(ran_on()[0])
        return "end"

    def all_of(log: list[Any]) -> Any:
        log.append((yield from items(log)))

    log: list[Any] = []
    found, between = [], []
    for item in all_of(log):
        found.append(item)
        between.append(ran_on()[0])
    assert found == ["reference"] * 2
    assert between == ["sdpa_flash"] * 2
    assert log == [None, "reference", "end"]

    log = []
    running = items(log)
    next(running)
    assert running.send("sent") == "reference"
    assert running.throw(ValueError()) == "reference"
    running.close()
    assert log == ["sent", "reference"]


def test_decorators_of_asynchronous_generators_cover_them_while_they_run() -> None:
    @use_backend("reference")
    async def items() -> Any:
        for _ in range(2):
            await asyncio.sleep(0)
            yield ran_on()[0]

    async def main() -> tuple[list[str], list[str]]:
        found, between = [], []
        async for item in items():
            found.append(item)
            between.append(ran_on()[0])
        return found, between

    assert asyncio.run(main()) == (["reference"] * 2, ["sdpa_flash"] * 2)


class Around(torch.nn.Module):
    """Says what its attention ran on before it calls what is in it, and after."""

    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, error: BaseException | None = None) -> list[str]:
        before = ran_on()[0]
        if self.inner is None and error is not None:
            raise error
        within = [] if self.inner is None else self.inner(error)
        return [before, *within, ran_on()[0]]


def test_an_interrupted_call_leaves_no_policy_behind() -> None:
    model = Around(Around(Around()))
    policy = set_backend(model, {"": "reference", "inner.inner": "sdpa_math"})
    expected = ["reference", "reference", "sdpa_math", "sdpa_math", "reference", "reference"]
    for error in (KeyboardInterrupt(), None, SystemExit(), ValueError()):
        if error is not None:
            with pytest.raises(type(error)):
                model(error)
        assert model() == expected
        assert ran_on()[0] == "sdpa_flash"
    with pytest.raises(KeyboardInterrupt):
        model(KeyboardInterrupt())
    policy.remove()
    assert ran_on()[0] == "sdpa_flash"
    assert model() == ["sdpa_flash"] * 6


def test_a_policy_ends_only_where_it_began() -> None:
    model = Around(Around())
    fails = [True]

    def hook(module: Any, args: Any) -> None:
        if fails.pop():
            raise ValueError("as a hook of the program's own may")

    model.inner.register_forward_pre_hook(hook)
    fallen: list[str] = []

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = model.inner, Around()

        def forward(self) -> list[str]:
            try:
                self.a()
            except ValueError:
                fallen.append("a")
            return self.b()

    outer = Outer()
    with set_backend(outer, {"": "reference", "a": "sdpa_math"}):
        assert outer() == ["reference"] * 2
    assert fallen == ["a"]
    assert ran_on()[0] == "sdpa_flash"

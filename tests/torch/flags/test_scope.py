"""A scope of knobs: entered any way, left any way, what was there comes back exactly."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from polyattn.errors import FlagsError
from polyattn.flags import stack
from polyattn.torch.flags import (
    deterministic,
    diff,
    fastest,
    flags,
    full_precision,
    sdpa_priority,
    snapshot,
)
from polyattn.torch.flags.tables import access
from tests.torch.flags.flag_programs import kept, stand

BENCHMARK = {"cudnn.benchmark": True}


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    before = stand()
    yield
    assert stand() == before


def benchmark() -> bool:
    return torch.backends.cudnn.benchmark


def test_scope_as_a_decorator_covers_each_call_and_not_the_definition() -> None:
    @flags(BENCHMARK)
    def function(depth: int) -> list[bool]:
        return [benchmark(), *(function(depth - 1) if depth else [])]

    assert not benchmark()
    assert function(2) == [True, True, True]
    assert not benchmark()
    with pytest.raises(TypeError):
        function("a")
    assert not benchmark()


def test_scope_as_a_decorator_covers_a_generator_or_refuses_it() -> None:
    def function() -> Iterator[bool]:
        yield benchmark()

    assert_covered(lambda decorated: list(decorated()), function)


def test_scope_as_a_decorator_covers_a_coroutine_or_refuses_it() -> None:
    async def function() -> list[bool]:
        await asyncio.sleep(0)
        return [benchmark()]

    assert_covered(lambda decorated: asyncio.run(decorated()), function)


def test_scope_as_a_decorator_covers_an_asynchronous_generator_or_refuses_it() -> None:
    async def function() -> Any:
        yield benchmark()

    async def collect(decorated: Any) -> list[bool]:
        return [found async for found in decorated()]

    assert_covered(lambda decorated: asyncio.run(collect(decorated)), function)


def assert_covered(run: Any, function: Any) -> None:
    """Either the body sees the knob, or decorating says that it would not."""
    try:
        decorated = flags(BENCHMARK)(function)
    except (FlagsError, TypeError):
        return
    assert run(decorated) == [True]


def test_decorator_keeps_the_function_s_name_and_signature() -> None:
    @flags(BENCHMARK)
    def function(a: int, *, b: str = "x") -> None:
        """Say something."""

    assert (function.__name__, function.__doc__) == ("function", "Say something.")
    assert list(inspect.signature(function).parameters) == ["a", "b"]


def test_one_object_can_be_entered_again_and_inside_itself() -> None:
    scope = flags(BENCHMARK)
    for _ in range(3):
        with scope:
            assert benchmark()
            with scope, scope:
                assert benchmark()
            assert benchmark()
        assert not benchmark()


def test_end_of_a_scope_that_was_not_entered_is_an_error() -> None:
    scope = flags(BENCHMARK)
    with pytest.raises(FlagsError, match="not entered"):
        scope.__exit__(None, None, None)
    with scope:
        pass
    with pytest.raises(FlagsError, match="not entered"):
        scope.__exit__(None, None, None)


def test_empty_scope_changes_nothing() -> None:
    before = snapshot()
    with flags(), flags({}):
        assert snapshot() == before


def test_scopes_of_one_thread_that_end_out_of_order() -> None:
    first, second = flags(BENCHMARK), flags({"cudnn.benchmark": False})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not benchmark()  # the later one is still in force
    second.__exit__(None, None, None)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_error_inside_ends_the_scope_and_goes_on(error: type[BaseException]) -> None:
    with pytest.raises(error), flags(BENCHMARK), deterministic():
        assert benchmark() is False
        raise error


def test_generator_that_is_dropped_inside_a_scope() -> None:
    def holder() -> Iterator[None]:
        with flags(BENCHMARK):
            yield

    held = holder()
    next(held)
    assert benchmark()
    del held


def test_setter_that_raises_half_way_undoes_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    one = access("flush_denormal")  # no rank: the last in the set below
    asked: list[Any] = []

    def refuse(value: Any) -> None:
        asked.append((value, benchmark(), torch.get_float32_matmul_precision()))
        raise RuntimeError("no such mode\nat 0x0")

    monkeypatch.setitem(vars(one), "write", refuse)
    before = stand()
    with pytest.raises(
        FlagsError, match=r"flush_denormal=True, which .* refuses: no such mode\. N"
    ):
        flags(float32_matmul_precision="high", **BENCHMARK, flush_denormal=True).__enter__()
    assert asked == [(True, True, "high")], "nothing was set before it"
    assert stand() == before


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupt_in_a_setter_undoes_those_before(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(value: Any) -> None:
        assert benchmark()
        raise error

    monkeypatch.setitem(vars(access("flush_denormal")), "write", interrupt)
    with pytest.raises((error, FlagsError)):
        flags(**BENCHMARK, flush_denormal=True).__enter__()


def test_setter_that_does_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(access("flush_denormal")), "write", lambda value: None)
    with pytest.raises(FlagsError, match="flush_denormal=True, but it is not in force"):
        flags(**BENCHMARK, flush_denormal=True).__enter__()


def lines_of(*functions: Any) -> set[types.CodeType]:
    """The code of functions and of those inside them."""
    found = {function.__code__ for function in functions}
    return found | {c for code in found for c in code.co_consts if isinstance(c, types.CodeType)}


LINES = lines_of(
    stack.Stack.enter,
    stack.Stack.leave,
    stack._perform,
    stack._put_back,
    stack._write,
    stack._write_one,
)


_LINES = sorted({n for _, _, n in stack.Stack.leave.__code__.co_lines() if n})
FIRST_LINE = f"leave:{_LINES[1]}"
"""Before it runs nothing of ours can catch the interrupt; no context manager can."""


class Interrupting:
    """Raises KeyboardInterrupt before the n-th line that runs in the scopes' own code."""

    def __init__(self, count: int) -> None:
        self.left, self.fired = count, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code not in LINES:
            return None
        if event == "line" and not self.fired:
            self.left -= 1
            if self.left == 0:
                self.fired = f"{frame.f_code.co_name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(count: int) -> tuple[str, Any]:
    """Where the interrupt came, and what the scope left."""
    before, tracer = stand(), Interrupting(count)
    with kept():
        sys.settrace(tracer)
        try:
            with flags(**BENCHMARK, float32_matmul_precision="high"):
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        left = diff(before["snapshot"], snapshot())
    stack_entries().clear()
    return tracer.fired, left


def stack_entries() -> list[Any]:
    from polyattn.torch.flags import scope

    return scope._stack._entries


def test_interrupt_on_any_line_of_entering_and_leaving_leaves_nothing() -> None:
    if sys.gettrace() is not None:
        pytest.skip("something else traces, coverage or a debugger")
    wrong = {}
    for count in range(1, 1000):
        fired, left = interrupted(count)
        if not fired:
            break
        if left and fired != FIRST_LINE:
            wrong[fired] = left
    assert count > 40, "the lines were not traced"
    assert not wrong


def test_names_may_be_aliases_and_full_paths_but_each_knob_once() -> None:
    with flags({"torch.backends.cuda.enable_flash_sdp": False}):
        assert not torch.backends.cuda.flash_sdp_enabled()
    with flags({"torch.set_warn_always": True}):
        assert torch.is_warn_always_enabled()
    with pytest.raises(FlagsError, match=r"cuda\.flash_sdp_enabled twice"):
        flags({"cuda.enable_flash_sdp": False, "cuda.flash_sdp_enabled": False})


def test_decorated_generator_does_not_hold_its_caller_inside() -> None:
    @flags(BENCHMARK)
    def function() -> Iterator[bool]:
        yield benchmark()
        yield benchmark()

    held = function()
    try:
        assert next(held)
        assert not benchmark()
    finally:
        held.close()


@pytest.mark.parametrize("value", ["ask", None, True])
def test_on_conflict_takes_three_words(value: Any) -> None:
    with pytest.raises(FlagsError, match="warn, refuse, allow"):
        flags(BENCHMARK, on_conflict=value)


CONTRADICTIONS: list[dict[str, Any]] = [
    {"cudnn.allow_tf32": True, "cudnn.conv.fp32_precision": "ieee"},
    {"float32_matmul_precision": "highest", "cuda.matmul.allow_tf32": True},
    {"float32_matmul_precision": "highest", "cuda.matmul.fp32_precision": "tf32"},
    {"deterministic_debug_mode": 0, "deterministic_algorithms": True},
    {"deterministic_debug_mode": 2, "deterministic_algorithms_warn_only": True},
    {"cuda.matmul.allow_fp16_reduced_precision_reduction": True,
     "cuda.matmul.allow_fp16_reduced_precision_reduction_split_k": False},
]  # fmt: skip


@pytest.mark.parametrize("changes", CONTRADICTIONS, ids=str)
def test_values_that_contradict_each_other_are_refused(changes: dict[str, Any]) -> None:
    if any(not access(name).touches for name in changes):
        pytest.skip("not all of them are in this version of torch")
    before = stand(later=True)
    for pairs in (list(changes.items()), list(changes.items())[::-1]):
        with pytest.raises(FlagsError) as caught:
            flags({**BENCHMARK, **dict(pairs)}).__enter__()
        assert any(name in str(caught.value) for name in changes)
        assert stand(later=True) == before


def test_direct_assignment_inside_to_what_is_not_named_stays() -> None:
    try:
        with flags(BENCHMARK), flags(float32_matmul_precision="high"):
            torch.backends.cudnn.deterministic = True
            torch.backends.cudnn.benchmark = False
        assert torch.backends.cudnn.deterministic is True
    finally:
        torch.backends.cudnn.deterministic = False


def test_torchs_own_scopes_inside_and_outside() -> None:
    with (
        warnings.catch_warnings(),
        torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=True),
    ):
        inside = snapshot()
        with flags({"cudnn.benchmark": False}), torch.backends.cudnn.flags(enabled=True):
            assert not benchmark()
        assert snapshot() == inside
    with (
        flags({"cuda.math_sdp_enabled": False}),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("preset", [deterministic, fastest, full_precision])
def test_preset_sets_what_it_prints(preset: Any) -> None:
    scope = preset()
    with scope:
        for name, value in scope.changes.items():
            assert access(name).read() == value, name
            assert f"{name} " in str(scope) and repr(value) in str(scope)
        for name, why in scope.left_out.items():
            assert name in str(scope) and why in str(scope)


def test_presets_nested_in_each_other_and_as_decorators() -> None:
    @deterministic()
    @full_precision()
    def function() -> str:
        return torch.get_float32_matmul_precision()

    with fastest(), full_precision(), fastest():
        assert torch.get_float32_matmul_precision() == "high"
        assert function() == "highest"
        assert torch.get_float32_matmul_precision() == "high"


def test_full_precision_computes_in_float32_whatever_was_mixed_before() -> None:
    with kept():
        torch.set_float32_matmul_precision("medium")
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.rnn.fp32_precision = "ieee"
        with full_precision():
            found = snapshot()
            precisions = {name: v for name, v in found.items() if name.endswith("fp32_precision")}
            assert set(precisions.values()) == {"ieee"}
            assert found["float32_matmul_precision"] == "highest"


def test_priority_leaves_the_others_as_they_are_when_it_is_entered() -> None:
    scope = sdpa_priority("cudnn")
    with sdpa_priority("math"), scope:
        assert sdpa_priority() == ["cudnn", "math", "flash", "efficient", "overrideable"]


def test_nested_priorities_end_exactly() -> None:
    before = sdpa_priority()
    with sdpa_priority("math"):
        outer = sdpa_priority()
        with sdpa_priority("overrideable", "cudnn"):
            assert sdpa_priority()[:3] == ["overrideable", "cudnn", "math"]
        assert sdpa_priority() == outer
    assert sdpa_priority() == before

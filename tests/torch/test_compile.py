"""torch.compile: traced whole, guarded, recompiled on change, never stale."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from polyattn import (
    Alibi,
    Causal,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    Full,
    LeftPadding,
    Not,
    Packed,
    Padding,
    PolyattnError,
    Segments,
    Window,
    record_selections,
    set_backend,
    use_backend,
)
from polyattn.integrations.fastvideo import selector
from polyattn.torch import attention
from polyattn.torch import scaled_dot_product_attention as sdpa

FLASH, MATH = "flash_attention_for_cpu", "attention_math"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Compiled:
    """A function compiled whole, and which attention operator its newest graph holds."""

    def __init__(self, function: Callable[..., torch.Tensor], **options: object) -> None:
        self.counter = CompileCounterWithBackend("eager")
        self.run = torch.compile(function, fullgraph=True, backend=self.counter, **options)
        self.function = function

    def __call__(self, *args: torch.Tensor) -> str:
        out = self.run(*args)
        torch.testing.assert_close(out, self.function(*args), rtol=1e-4, atol=1e-5)
        return self.ops()

    def ops(self) -> str:
        return " ".join(str(n.target) for n in self.counter.graphs[-1].graph.nodes)


def inputs(length: int = 8) -> torch.Tensor:
    return torch.randn(2, length, 2, 16)


def test_traced_whole_and_cached() -> None:
    f = Compiled(lambda q: attention(q * 2, q, q) + 1)
    assert FLASH in f(inputs())
    f(inputs())
    assert f.counter.frame_count == 1


def test_outer_scope_recompiles_and_comes_back() -> None:
    f = Compiled(lambda q: attention(q, q, q))
    q = inputs()
    assert FLASH in f(q)
    with use_backend("sdpa_math"):
        assert MATH in f(q)
        f(q)
    assert f.counter.frame_count == 2
    f.run(q)
    assert f.counter.frame_count == 2


def test_scope_inside_the_traced_function() -> None:
    def model(q: torch.Tensor) -> torch.Tensor:
        with use_backend("sdpa_math"):
            x = attention(q, q, q)
        return attention(x, x, x)

    f = Compiled(model)
    ops = f(inputs())
    assert MATH in ops and FLASH in ops
    with record_selections() as ran:
        attention(inputs(), inputs(), inputs())
    assert ran[0].backend == "sdpa_flash"


def test_forcing_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    f = Compiled(lambda q: attention(q, q, q))
    q = inputs()
    assert FLASH in f(q)
    with selector.global_force_attn_backend_context_manager("sdpa_math"):
        assert MATH in f(q)
    f.run(q)
    with record_selections() as ran:
        f.run(q)
    assert ran[0].backend == "sdpa_flash"


def test_module_policies_are_traced() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return attention(x, x, x)

    model = torch.nn.Sequential(Block(), Block())
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(model, fullgraph=True, backend=counter)
    with set_backend(model, {"0": "sdpa_math"}):
        run(inputs())
        ops = " ".join(str(n.target) for n in counter.graphs[-1].graph.nodes)
    assert MATH in ops and FLASH in ops


def test_threads_and_tasks_have_their_own_scope_in_compiled_code() -> None:
    f = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="eager")
    q = inputs()

    def ran() -> str:
        with record_selections() as found:
            f(q)
        return found[0].backend

    assert ran() == "sdpa_flash"
    seen: list[str] = []
    with use_backend("sdpa_math"):
        assert ran() == "sdpa_math"
        thread = threading.Thread(target=lambda: seen.append(ran()))
        thread.start()
        thread.join()

    async def task(name: str | None) -> str:
        if name is None:
            await asyncio.sleep(0)
            return ran()
        with use_backend(name):
            await asyncio.sleep(0.01)
            return ran()

    async def main() -> list[str]:
        return await asyncio.gather(task("sdpa_math"), task(None))

    assert seen == ["sdpa_flash"]
    assert asyncio.run(main()) == ["sdpa_math", "sdpa_flash"]


def test_every_run_of_a_graph_is_recorded() -> None:
    f = torch.compile(
        lambda q: attention(q, q, q) + attention(q, q, q, backend="sdpa_math"),
        fullgraph=True,
        backend="aot_eager",
    )
    f(inputs())
    with record_selections() as ran:
        f(inputs())
        f(inputs())
    assert [r.backend for r in ran] == ["sdpa_flash", "sdpa_math"] * 2
    with record_selections() as none:
        pass
    assert none == []


def test_lengths_stay_symbolic_within_a_power_of_two() -> None:
    f = Compiled(lambda q: attention(q, q, q, mask=Causal()), dynamic=True)
    for length in (17, 19, 23, 29, 31, 32):
        f(inputs(length))
    assert f.counter.frame_count <= 2


def test_lengths_that_differ_stay_right_when_symbolic() -> None:
    f = Compiled(lambda q, k: attention(q, k, k, mask=Causal()), dynamic=True)
    for t, s in ((5, 7), (6, 7), (7, 7), (7, 5), (3, 8), (20, 30), (30, 20)):
        f(inputs(t), inputs(s))


LENGTHS = torch.tensor([5, 8])
MASKS = [
    Causal() & Window(left=2),
    Padding(kv_lengths=LENGTHS),
    Padding(kv_lengths=[3, 0]) & Causal(),
    Segments(torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])),
    Dense(torch.rand(2, 1, 8, 8) > 0.5),
    Causal("top_left") | Segments(torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])),
    LeftPadding([0, 2], LENGTHS) & Chunked(3),
    Causal() & (Window(left=1) | FirstKeys(2)),
    ~(Causal() & Dilated(2)),
    ~Padding(kv_lengths=LENGTHS) | ~Full(),
]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("backend", ["sdpa_flash", "sdpa_math", "reference"])
def test_masks_in_traced_code(mask: object, backend: str) -> None:
    f = Compiled(lambda q: attention(q, q, q, mask=mask, backend=backend))
    f(inputs())


def test_complements_made_inside_traced_code() -> None:
    """By their class: Dynamo follows & and | of masks, and not ~."""
    f = Compiled(lambda q: attention(q, q, q, mask=Not(Causal()) | Not(FirstKeys(3)) & Chunked(4)))
    f(inputs())


def test_masks_made_inside_traced_code() -> None:
    def model(q: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        mask = Causal() & Padding(kv_lengths=lengths)
        return attention(q, q, q, mask=mask, bias=Alibi(torch.tensor([0.5, 0.25])), scale=0.3)

    f = Compiled(model)
    f(inputs(), torch.tensor([3, 8]))
    f(inputs(), torch.tensor([8, 1]))
    assert f.counter.frame_count == 1


def test_gradients_and_drop_in_through_aot() -> None:
    def model(q: torch.Tensor) -> torch.Tensor:
        return sdpa(q, q, q, is_causal=True).square().sum()

    q = torch.randn(2, 2, 8, 16, requires_grad=True)
    (expected,) = torch.autograd.grad(model(q), q)
    (got,) = torch.autograd.grad(torch.compile(model, fullgraph=True, backend="aot_eager")(q), q)
    torch.testing.assert_close(got, expected)


def test_backward_uses_the_choice_of_the_forward() -> None:
    q = torch.randn(2, 8, 2, 16, requires_grad=True)
    f = torch.compile(lambda q: attention(q, q, q).sum(), fullgraph=True, backend="aot_eager")
    with use_backend("sdpa_math"):
        loss = f(q)
    with use_backend("sdpa_flash"):
        loss.backward()
    assert q.grad is not None and q.grad.isfinite().all()


def test_lse_and_gqa_traced() -> None:
    k = torch.randn(2, 8, 1, 16)
    f = torch.compile(
        lambda q, k: attention(q, k, k, return_lse=True, mask=Causal()),
        fullgraph=True,
        backend="aot_eager",
    )
    q = inputs()
    for got, expected in zip(
        f(q, k), attention(q, k, k, return_lse=True, mask=Causal()), strict=True
    ):
        torch.testing.assert_close(got, expected)


@pytest.mark.slow
def test_inductor() -> None:
    f = torch.compile(lambda q: attention(q * 2, q, q, mask=Causal()), fullgraph=True)
    q = inputs(40)
    torch.testing.assert_close(f(q), attention(q * 2, q, q, mask=Causal()), rtol=1e-4, atol=1e-5)
    with use_backend("sdpa_math"), record_selections() as ran:
        torch.testing.assert_close(
            f(q), attention(q * 2, q, q, mask=Causal()), rtol=1e-4, atol=1e-5
        )
    assert [r.backend for r in ran] == ["sdpa_math", "sdpa_math"]


def test_the_drop_in_drops_no_request_in_traced_code() -> None:
    f = Compiled(lambda q: sdpa(q, q, q))
    with use_backend("sdpa_math"):
        assert MATH in f(torch.randn(2, 8, 16))
        assert MATH in f(torch.randn(2, 3, 2, 8, 16))
    g = torch.compile(lambda q: sdpa(q, q, q), fullgraph=True, backend="eager")
    flat = torch.randn(8, 16)
    g(flat)
    for scope in (use_backend("sdpa_math"), use_backend(never="sdpa_math")):
        with scope, pytest.raises(Exception, match="leave to torch's own"):
            g(flat)
    g(flat)


PACKED = torch.randn(7, 2, 16)


def test_packed_rows_in_traced_code() -> None:
    mask = Packed(torch.tensor([0, 3, 7], dtype=torch.int32)) & Causal()
    f = torch.compile(
        lambda q: attention(q, q, q, mask=mask, layout="packed"), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(
        f(PACKED), attention(PACKED, PACKED, PACKED, mask=mask, layout="packed")
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda q: attention(q, q[:1], q[:1]),
        lambda q: attention(q, q, q, mask=Padding(kv_lengths=torch.tensor([1, 2, 3]))),
        lambda q: attention(q, q, q, mask=Dense(torch.ones(3, 3, dtype=torch.bool))),
        lambda q: attention(q, q, q, layout="NTBH"),
        lambda q: attention(q, q, q, mask=Packed(torch.tensor([0, 8], dtype=torch.int32))),
        lambda q: attention(q, q, q, mask=torch.ones(8, 8, dtype=torch.bool)),
        lambda q: attention(q[0], q[0], q[0], layout="packed"),
        lambda q: attention(q, q, q, backend="sdpa_cudnn"),
        lambda q: attention(q, q, q, backend="no_such"),
    ],
)
def test_wrong_calls_fail_in_traced_code_as_they_do_outside(call: Callable[..., object]) -> None:
    q = inputs()
    with pytest.raises(PolyattnError):
        call(q)
    with pytest.raises(Exception, match=r"got|Unsupported|Unknown"):
        torch.compile(call, fullgraph=True, backend="eager")(q)

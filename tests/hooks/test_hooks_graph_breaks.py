"""torch.compile without fullgraph: hooks that break the graph are called once in each call."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import ForwardHook, ModuleHookManager
from polyattn.hooks.dispatch import Dispatcher

X = torch.linspace(-1, 1, 8).reshape(2, 4)


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def eager(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The model's answer without any compiled code."""
    with torch.compiler.set_stance("force_eager"):
        return model(x)


def test_hooks_that_break_the_graph_run_once_per_call() -> None:
    class Breaks(ForwardHook):
        def __init__(self, at: str) -> None:
            self.at, self.seen = at, []

        def write(self, event):
            if event in self.at:
                torch._dynamo.graph_break()
            self.remember(event)

        @torch.compiler.disable
        def remember(self, event):
            self.seen.append(event)

        def pre_forward(self, module, *args, **kwargs):
            if "pre" in self.at:
                self.write("pre")
            return args, kwargs

        def post_forward(self, module, output):
            if "post" in self.at:
                self.write("post")
            return output * 2

    for at in ("pre", "post", "pre post"):
        for inside in (False, True):
            torch.compiler.reset()

            class Body(nn.Module):
                def forward(self, x, inside=inside):
                    if inside:
                        torch._dynamo.graph_break()
                    return x + 1

            model = nn.Sequential(nn.Tanh(), Body(), nn.Tanh())
            hook = Breaks(at)
            manager = ModuleHookManager.of(model[1])
            manager.attach("breaks", hook)
            expected = eager(model, X)
            hook.seen.clear()
            run = torch.compile(model, backend="eager")
            for _ in range(4):
                assert run(X).equal(expected), (at, inside)
            assert hook.seen == at.split() * 4, (at, inside)
            assert not manager._running
            for method in (Dispatcher._before, Dispatcher._after):  # inlined, or run by Python
                assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(method.__code__)


def test_hooks_that_break_graphs_on_more_modules_than_the_recompile_limit() -> None:
    """Some pieces are compiled by then and some are not; each call still has both its ends."""

    class Breaks(ForwardHook):
        def __init__(self, number: int, at: str) -> None:
            self.number, self.at, self.seen = number, at, []

        @torch.compiler.disable
        def remember(self, event: str) -> None:
            self.seen.append(event)

        def pre_forward(self, module, *args, **kwargs):
            if self.at == "pre":
                self.remember("pre")
            return (args[0] + self.number, *args[1:]), kwargs

        def post_forward(self, module, output):
            if self.at == "post":
                self.remember("post")
            return output * 2

    class Body(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x):
            if self.number % 2:
                torch._dynamo.graph_break()
            return torch.tanh(x) + self.number

    for at in ("pre", "post"):
        torch.compiler.reset()
        model = nn.Sequential(*(Body(number) for number in range(12)))
        hooks = [Breaks(number, at) for number in range(12)]
        for body, hook in zip(model, hooks, strict=True):
            ModuleHookManager.of(body).attach("breaks", hook)
        expected = eager(model, X)
        run = torch.compile(model, backend="eager")
        for _ in range(3):
            torch.testing.assert_close(run(X), expected)
        for body, hook in zip(model, hooks, strict=True):
            assert hook.seen == [at] * 4
            assert not ModuleHookManager.of(body)._running

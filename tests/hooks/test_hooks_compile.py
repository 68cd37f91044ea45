"""torch.compile: hooks in the graph, and hooks that come and go after the first compiled call."""

import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import ForwardHook, ModuleHookManager, recomputing
from tests.hooks.recording import Scale, Shift

X = torch.linspace(-1, 1, 8).reshape(2, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.act = nn.Tanh()

    def forward(self, x):
        return x + self.act(self.linear(x))


class Net(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.GELU())

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Frames:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    torch.compiler.reset()


@pytest.fixture
def net() -> Net:
    return Net()


def whole(net: Net, **options) -> Callable:
    return torch.compile(net, fullgraph=True, **options)


def method(net: Net, **options) -> Callable:
    net.compile(fullgraph=True, **options)
    return net


def blocks(net: Net, **options) -> Callable:
    for block in net.blocks:
        block.compile(fullgraph=True, **options)
    return net


def function(net: Net, **options) -> Callable:
    return torch.compile(lambda x: net(x) * 1, fullgraph=True, **options)


WAYS = [whole, method, blocks, function]
TARGETS = ["", "blocks.1", "blocks.1.linear", "blocks.1.act", "head", "head.1"]


def eager(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The model's answer without any compiled code."""
    with torch.compiler.set_stance("force_eager"):
        return net(x)


@torch.library.custom_op("polyattn_tests::note", mutates_args={"into"})
def note(value: torch.Tensor, into: torch.Tensor, slot: int) -> None:
    into[slot] += value.abs().sum()


@note.register_fake
def _(value: torch.Tensor, into: torch.Tensor, slot: int) -> None:
    return None


class Note(ForwardHook):
    def __init__(self, into: torch.Tensor, slot: int) -> None:
        self.into, self.slot = into, slot

    def post_forward(self, module, output):
        note(output, self.into, self.slot)
        return output


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("way", WAYS)
def test_traceable_hooks_and_operators_under_fullgraph(way, backend: str, net: Net) -> None:
    into = torch.zeros(2)
    for target, hooks in {
        "": [Shift()],
        "blocks.0": [Scale(2.0), Note(into, 0)],
        "blocks.1.linear": [Shift(), Scale(0.5), Note(into, 1)],
    }.items():
        for number, hook in enumerate(hooks):
            ModuleHookManager.of(net.get_submodule(target)).attach(str(number), hook)
    with torch.no_grad():
        expected = eager(net, X)
        wanted = into.clone()
        run = way(net, backend=backend)
        for _ in range(3):
            into.zero_()
            torch.testing.assert_close(run(X), expected)
            torch.testing.assert_close(into, wanted)


def test_gradients_flow_through_compiled_hooks(net: Net) -> None:
    ModuleHookManager.of(net.blocks[1]).attach("scale", Scale(2.0))
    x, y = (X.clone().requires_grad_() for _ in range(2))
    eager(net, x).sum().backward()
    whole(net, backend="aot_eager")(y).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", WAYS)
def test_changes_after_the_first_compiled_call_take_effect(way, target: str, net: Net) -> None:
    run = way(net, backend="eager")
    manager = ModuleHookManager.of(net.get_submodule(target))
    with torch.no_grad():
        plain = run(X)
        handle = manager.attach("scale", Scale(2.0))
        scaled = run(X)
        assert scaled.equal(eager(net, X)) and not scaled.equal(plain)
        manager.attach("shift", Shift(), before="scale")
        both = run(X)
        assert both.equal(eager(net, X)) and not both.equal(scaled)
        handle.detach()
        shifted = run(X)
        assert shifted.equal(eager(net, X)) and not shifted.equal(both)
        manager.detach_all()
        assert run(X).equal(plain)


@pytest.mark.parametrize(
    "options",
    [
        "skip_guard_on_inbuilt_nn_modules_unsafe",
        "skip_guard_on_all_nn_modules_unsafe",
        "skip_all_guards_unsafe",
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_changes_take_effect_also_where_guards_are_left_out(
    options: str, target: str, net: Net
) -> None:
    keep = getattr(torch.compiler, options, None)
    if keep is None:
        pytest.skip("this version of torch has no such filter")
    run = torch._dynamo.optimize("eager", nopython=True, guard_filter_fn=keep)(net)
    with torch.no_grad():
        plain = run(X)
        with ModuleHookManager.of(net.get_submodule(target)) as manager:
            manager.attach("scale", Scale(2.0))
            scaled = run(X)
            assert scaled.equal(eager(net, X)) and not scaled.equal(plain)
        assert run(X).equal(plain)


def test_blocks_that_share_their_code_keep_their_own_hooks() -> None:
    """Torch would take the graph of a block without hooks for one with hooks."""
    net, frames = Net(12), Frames()
    for number, block in enumerate(net.blocks):
        if number % 3 == 1:
            ModuleHookManager.of(block.linear).attach("scale", Scale(2.0))
        if number % 3 == 2:
            ModuleHookManager.of(block).attach("shift", Shift())
    with torch.no_grad():
        expected = eager(net, X)
        run = blocks(net, backend=frames)
        assert run(X).equal(expected)
        assert frames.count <= 3  # one for each kind, not one for each block


def test_two_models_of_one_class_keep_their_own_hooks() -> None:
    one, two = Net(), Net()
    two.load_state_dict(one.state_dict())
    ModuleHookManager.of(one.blocks[1].linear).attach("scale", Scale(2.0))
    with torch.no_grad():
        expected_one, expected_two = eager(one, X), eager(two, X)
        run_one, run_two = whole(one, backend="eager"), whole(two, backend="eager")
        for _ in range(2):
            assert run_two(X).equal(expected_two)
            assert run_one(X).equal(expected_one)
        ModuleHookManager.of(one.blocks[1].linear).detach_all()
        ModuleHookManager.of(two.blocks[1].linear).attach("scale", Scale(2.0))
        assert run_two(X).equal(expected_one)
        assert run_one(X).equal(expected_two)


def test_what_cannot_have_the_module_in_it_is_not_compiled_again(net: Net) -> None:
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(x)

    frames = Frames()
    runs = [
        torch.compile(Other(), backend=frames),
        torch.compile(lambda x: (x * 2).sum(), backend=frames),
    ]
    with torch.no_grad():
        whole(net, backend="eager")(X)
        for run in runs:
            run(X)
        count = frames.count
        for part in net.modules():
            ModuleHookManager.of(part).attach("scale", Scale(2.0))
        for run in runs:
            run(X)
    assert frames.count == count


def test_hooks_attached_many_times_do_not_use_up_the_recompile_limit(net: Net) -> None:
    run = whole(net, backend="eager")
    manager = ModuleHookManager.of(net.blocks[0])
    with torch.no_grad():
        for number in range(20):
            with manager:
                manager.attach("scale", Scale(float(number)))
                assert run(X).equal(eager(net, X))


def test_attaching_inside_a_compiled_call_begins_with_the_next(net: Net) -> None:
    class Attaches(ForwardHook):
        @torch.compiler.disable
        def attach(self):
            manager = ModuleHookManager.of(net.blocks[2])
            if "late" not in manager:
                manager.attach("late", Scale(2.0))

        def post_forward(self, module, output):
            self.attach()
            return output

    run = torch.compile(net, backend="eager")
    with torch.no_grad():
        plain = run(X)
        ModuleHookManager.of(net.blocks[0]).attach("attaches", Attaches())
        run(X)
        assert "late" in ModuleHookManager.of(net.blocks[2])
        later = run(X)
        assert later.equal(eager(net, X)) and not later.equal(plain)


def test_copies_of_a_hooked_module_compile(net: Net) -> None:
    import copy

    ModuleHookManager.of(net.blocks[0]).attach("scale", Scale(2.0))
    other = copy.deepcopy(net)
    with torch.no_grad():
        expected = eager(other, X)
        assert not expected.equal(eager(net, X))
        assert whole(other, backend="eager")(X).equal(expected)


def test_recomputing_can_be_asked_in_a_graph() -> None:
    def ask(x):
        return x + 1 if recomputing() else x

    assert torch.compile(ask, fullgraph=True, backend="eager")(X).equal(X)


def in_new_process(code: str, folder: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_compiler_is_not_loaded_and_guards_on_hooks_once_it_is(tmp_path: Path) -> None:
    in_new_process(
        """
        import sys, torch
        from torch import nn
        loaded = "torch._dynamo" in sys.modules
        finders = list(sys.meta_path)
        from polyattn.hooks import ForwardHook, ModuleHookManager
        assert sys.meta_path == finders

        class Double(ForwardHook):
            def post_forward(self, module, output):
                return output * 2

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.act = nn.Tanh()

            def forward(self, x):
                return self.act(x)

        x, net = torch.ones(1, 2), nn.Sequential(Block(), Block(), Block())
        manager = ModuleHookManager.of(net[1].act)
        manager.attach("double", Double())
        expected = net(x)
        assert ("torch._dynamo" in sys.modules) == loaded
        for block in net:
            block.compile(backend="eager", fullgraph=True)
        assert net(x).equal(expected)
        manager.detach_all()
        assert not net(x).equal(expected)
        assert sys.meta_path == finders
        """,
        tmp_path,
    )

"""Many threads on one module, hooks that come and go meanwhile, and calls that are cut off."""

import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import ForwardHook, HookError, ModuleHookManager
from tests.hooks.recording import Recorder, calls, state_of

X = torch.ones(2, 3)


class Boom(Exception):
    pass


@pytest.fixture
def quick_switches():
    """Let threads interleave more often than every five milliseconds."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(usual)


def test_threads_on_one_module(quick_switches) -> None:
    """Many threads, some of whose calls fail, while hooks come and go."""

    class Body(nn.Module):
        def forward(self, x, fails):
            if fails:
                raise Boom
            return x * 2

    class Balanced(ForwardHook):
        def __init__(self):
            self.local, self.ended = threading.local(), []

        def pre_forward(self, module, x, fails):
            vars(self.local).setdefault("stack", []).append((x, fails))
            return (x, fails), {}

        def post_forward(self, module, output):
            x, fails = self.local.stack.pop()
            self.ended.append(not fails and output.equal(x * 2))

        def failed(self, module, exc):
            self.ended.append(self.local.stack.pop()[1] and isinstance(exc, Boom))

    module, hook, wrong = Body(), Balanced(), []
    before, manager = state_of(module), ModuleHookManager.of(module)
    manager.attach("balanced", hook)

    def work(number: int) -> None:
        for step in range(100):
            x, fails = torch.full((1,), float(number * 1000 + step)), step % 3 == 0
            try:
                if not module(x, fails).equal(x * 2) or fails:
                    wrong.append(x)
            except Boom:
                if not fails:
                    wrong.append(x)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    churn = 0
    while not churn or any(thread.is_alive() for thread in threads):
        with manager:
            manager.attach("churn", Recorder("churn", []))
        churn += 1
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(hook.ended) == 6 * 100
    assert all(hook.ended)
    assert not manager._running
    manager.detach_all()
    assert state_of(module) == before


def test_last_hook_comes_and_goes_while_threads_call(quick_switches) -> None:
    class Count(ForwardHook):
        def __init__(self):
            self.started, self.ended = [], []

        def pre_forward(self, module, *args, **kwargs):
            self.started.append(1)

        def post_forward(self, module, output):
            self.ended.append(1)

    module, hook, stop = nn.Identity(), Count(), threading.Event()
    before, manager = state_of(module), ModuleHookManager.of(module)

    def work() -> None:
        while not stop.is_set():
            module(X)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(200):
        handle = manager.attach("count", hook)
        time.sleep(0.0001 * (number % 2))  # every other time it stands only while others run anyway
        handle.detach()
    stop.set()
    for thread in threads:
        thread.join()
    assert len(hook.started) == len(hook.ended) > 0
    assert not manager._running
    assert state_of(module) == before


@pytest.mark.parametrize("cleaned_by", ["call", "detach", "other thread"])
def test_interrupt_is_reported_late_but_once(cleaned_by: str) -> None:
    """Torch tells no hook of a BaseException."""

    class Body(nn.Module):
        def forward(self, x, stop=False):
            if stop:
                raise KeyboardInterrupt
            return x

    seen: list = []
    module = Body()
    before, manager = state_of(module), ModuleHookManager.of(module)
    manager.attach("A", Recorder("A", seen))
    with pytest.raises(KeyboardInterrupt):
        module(X, stop=True)
    assert calls(seen) == ["pre A"]
    if cleaned_by == "call":
        module(X)
        assert calls(seen) == ["pre A", "failed A", "pre A", "post A"]
    elif cleaned_by == "other thread":
        thread = threading.Thread(target=manager.detach_all)
        thread.start()
        thread.join()
        assert calls(seen) == ["pre A", "failed A"]
    manager.detach_all()
    failures = [event[2] for event in seen if event[0] == "failed"]
    assert len(failures) == 1 and isinstance(failures[0], HookError)
    assert "cut off" in str(failures[0])
    assert state_of(module) == before


def test_a_call_that_torch_gives_no_keywords_runs_as_one_that_had_begun_before() -> None:
    """torch puts a hook into one table and then notes in another that it wants keywords."""

    class Refusing(ForwardHook):
        def pre_forward(self, module, *args, **kwargs):
            raise Boom

    module = nn.Linear(3, 3)
    ModuleHookManager.of(module).attach("refusing", Refusing())
    wants_keywords = module._forward_pre_hooks_with_kwargs
    noted = dict(wants_keywords)
    wants_keywords.clear()
    assert module(X).shape == X.shape
    wants_keywords.update(noted)
    with pytest.raises(Boom):
        module(X)

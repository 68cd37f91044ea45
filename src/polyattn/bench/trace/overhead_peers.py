"""What is timed around a forward: the trace, and what others would use in its place."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polyattn.hooks import ForwardHook, ModuleHookManager, trace
from polyattn.torch.internals import debug_mode

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A way to look into a model: a context in which its forwards are looked into.

    What the context yields is called once, in the end, and waits until everything is written.
    """

    name: str
    around: Callable[[nn.Module, Path], AbstractContextManager[Callable[[], None]]]
    ours: bool = False
    recording: bool = False


def _nothing_to_wait_for() -> None:
    pass


@contextlib.contextmanager
def _traced(model: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    with trace(model, Path(tempfile.mkdtemp(dir=folder), "run.jsonl")) as run:
        yield run.flush


class _Nothing(ForwardHook):
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Do nothing, but be called."""

    def post_forward(self, module: nn.Module, output: Any) -> None:
        """Do nothing, but be called."""


@contextlib.contextmanager
def _our_hooks(model: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    with contextlib.ExitStack() as attached:
        for module in model.modules():
            handle = ModuleHookManager.of(module).attach("nothing", _Nothing())
            attached.callback(handle.detach)
        yield _nothing_to_wait_for


@contextlib.contextmanager
def _torch_hooks(
    model: nn.Module, post: Callable[..., None], pre: Callable[..., None] | None = None
) -> Iterator[Callable[[], None]]:
    handles = [module.register_forward_hook(post) for module in model.modules()]
    if pre is not None:
        handles += [module.register_forward_pre_hook(pre) for module in model.modules()]
    try:
        yield _nothing_to_wait_for
    finally:
        for handle in handles:
            handle.remove()


def _empty_hooks(model: nn.Module, folder: Path) -> AbstractContextManager[Callable[[], None]]:
    return _torch_hooks(model, lambda *_: None, lambda *_: None)


def _two_numbers(model: nn.Module, folder: Path) -> AbstractContextManager[Callable[[], None]]:
    """Hooks as they are written by hand: mean and maximum of the absolute values of the outputs."""
    found: list[tuple[float, float]] = []

    def post(module: nn.Module, args: Any, output: Any) -> None:
        for one in output if isinstance(output, tuple) else (output,):
            if isinstance(one, Tensor):
                absolute = one.detach().abs()
                found.append((absolute.mean().item(), absolute.max().item()))

    return _torch_hooks(model, post)


@contextlib.contextmanager
def _debug_mode(model: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    with debug_mode()(record_nn_module=True):
        yield _nothing_to_wait_for


@contextlib.contextmanager
def _debug_hashes(model: nn.Module, folder: Path) -> Iterator[Callable[[], None]]:
    hashes = debug_mode().log_tensor_hashes(hash_inputs=True)
    with debug_mode()(record_nn_module=True), hashes:
        yield _nothing_to_wait_for


CASES = (
    Case("polyattn trace", _traced, ours=True, recording=True),
    Case("polyattn hooks that do nothing", _our_hooks, ours=True),
    Case("torch hooks that do nothing", _empty_hooks),
    Case("torch hooks, abs-mean and max of outputs", _two_numbers),
    Case("torch DebugMode", _debug_mode),
    Case("torch DebugMode, hashes of inputs and outputs", _debug_hashes),
)

"""Hooks that write down what they see, and a snapshot of all that a module holds."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.hooks import ForwardHook


class Recorder(ForwardHook):
    """Appends (event, own name) to a list that several hooks may share."""

    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name = name
        self.seen = seen

    def on_attach(self, module: nn.Module) -> None:
        self.seen.append(("attach", self.name))

    def on_detach(self, module: nn.Module) -> None:
        self.seen.append(("detach", self.name))

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(("pre", self.name))
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self.seen.append(("post", self.name))
        return output

    def failed(self, module: nn.Module, exc: BaseException) -> None:
        self.seen.append(("failed", self.name, exc))


class Scale(ForwardHook):
    """Multiplies the output; traceable."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * self.factor


class Shift(ForwardHook):
    """Adds to the first argument; traceable."""

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + 1, *args[1:]), kwargs


def state_of(module: nn.Module) -> dict[str, Any]:
    """All that a module holds, with tables as their contents, in order."""
    return {
        key: list(value.items()) if isinstance(value, dict) else value
        for key, value in vars(module).items()
    }


def calls(seen: list[Any]) -> list[str]:
    """The events as short texts, without attachments: ``pre A``."""
    return [f"{event[0]} {event[1]}" for event in seen if event[0] not in ("attach", "detach")]

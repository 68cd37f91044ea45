"""Side: one of two traces, with its calls and what is known of each of its modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from polyattn.trace.compare.frames import Frame, frames_of
from polyattn.trace.format.contents import Trace

__all__ = ["Module", "Side", "alike", "same_class"]


@dataclass(eq=False, slots=True)
class Module:
    """A module: its class, the fingerprints of its own parameters, its calls in order."""

    name: str
    cls: str = ""
    params: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    frames: list[Frame] = field(default_factory=list)

    @property
    def leaf(self) -> str:
        """The last part of its name."""
        return self.name.rpartition(".")[2]

    def sizes(self) -> tuple[int, ...]:
        """How many elements its first call returned, tensor by tensor."""
        return tuple(r.n for r in self.frames[0].outs) if self.frames else ()

    def idle(self) -> bool:
        """Whether it returned in every call the very tensor that it was given."""
        return bool(self.frames) and all(map(_passes, self.frames))


class Side:
    """A trace as the comparison sees it: `modules` by name, `frames` in order of their start."""

    def __init__(self, trace: Trace, name: str) -> None:
        self.trace, self.name = trace, name
        self.frames = frames_of(trace.records)
        self.modules: dict[str, Module] = {}
        for frame in self.frames:
            module = self._module(frame.module)
            module.cls = module.cls or frame.cls
            module.frames.append(frame)
        for one, cls in trace.header.modules.items():
            module = self._module(one)
            module.cls = module.cls or cls
        self.weights = {
            one: print_ for one, print_ in trace.header.weights.items() if _sound(print_)
        }
        for one, fingerprint in self.weights.items():
            owner, _, param = one.rpartition(".")
            self._module(owner).params[param] = fingerprint

    def _module(self, name: str) -> Module:
        return self.modules.setdefault(name, Module(name))

    def called(self) -> list[Module]:
        """The modules that were recorded, in the order of their first calls."""
        return list(dict.fromkeys(self.modules[frame.module] for frame in self.frames))

    def steps(self) -> list[int | None]:
        """The steps in which something was recorded, in order."""
        return list(dict.fromkeys(frame.step for frame in self.frames))


def _sound(fingerprint: Mapping[str, Any]) -> bool:
    """Whether it has a shape and a dtype; what else is amiss with it shows when it is read."""
    shape = fingerprint.get("shape")
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    return sizes and isinstance(fingerprint.get("dtype"), str)


def _passes(frame: Frame) -> bool:
    if not frame.ins or not frame.outs or frame.outs[0].sketch is None:
        return False
    out = frame.outs[0]
    return any(out.same == one.seq or _identical(one, out) for one in frame.ins)


def _identical(one: Any, other: Any) -> bool:
    names = ("n", "sketch", "min", "max", "l2")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def alike(a: str, b: str) -> bool:
    """Return whether two names of classes may be of the same kind of module.

    >>> alike("LlamaRMSNorm", "RMSNorm"), alike("GELU", "gelu_"), alike("Linear", "Dropout")
    (True, True, False)
    """
    one, other = ("".join(filter(str.isalnum, name)).lower() for name in (a, b))
    if one == other:
        return True
    short, long = sorted((one, other), key=len)
    return len(short) >= 4 and (long.startswith(short) or long.endswith(short))


def same_class(a: str, b: str) -> bool:
    """Return whether two names of classes are the same, but for who wrote them.

    >>> same_class("LlamaRMSNorm", "RMSNorm"), same_class("Attention", "AttentionWithNorm")
    (True, False)
    """
    one, other = ("".join(filter(str.isalnum, name)).lower() for name in (a, b))
    short, long = sorted((one, other), key=len)
    return long == short or (len(short) >= 4 and long.endswith(short))

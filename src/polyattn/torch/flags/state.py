"""Torch's state that needs more than a getter and a setter to be put back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from polyattn import settings
from polyattn.flags.cells import Cells
from polyattn.torch.internals import inductor_config, is_deterministic
from polyattn.torch.internals.switches import deterministic_warn_only, reductions, set_deterministic

__all__ = [
    "DETERMINISM", "OPT_EINSUM", "THREADS", "DeterminismCells", "OptEinsumCells", "ReductionCells",
    "ThreadCells", "inductor_deterministic", "put_inductor",
]  # fmt: skip


class ReductionCells(Cells):
    """Whether products of one 16-bit type may be summed in it, and whether in splits.

    One setter takes both, and refuses reductions without splits.
    """

    def __init__(self, dtype: str) -> None:
        self._get, self._set = reductions(dtype)

    def pair(self) -> tuple[bool, bool]:
        """Return (allowed, split); torch 2.9 has no second value and always splits."""
        found = self._get()
        return found if isinstance(found, tuple) else (found, True)

    def put(self, allow: bool, split: bool) -> None:
        """Set both."""
        if isinstance(self._get(), tuple):
            self._set(allow, split)
        else:
            self._set(allow)

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        found = dict(zip(("allow", "split"), self.pair(), strict=True))
        return {name: found[name] for name in names}

    def write(self, values: Mapping[str, Any]) -> None:
        self.put(**{**self.read(("allow", "split")), **values})


def inductor_deterministic() -> bool:
    """Return Inductor's own switch, which ``use_deterministic_algorithms`` sets too.

    Loading Inductor only to ask would take a second; unloaded, it will start as its variable says.
    """
    config = inductor_config(load=False)
    if config is None:
        return settings.variable("TORCHINDUCTOR_DETERMINISTIC") == "1"
    return bool(getattr(config, "deterministic", False))


def put_inductor(value: bool) -> None:
    """Set Inductor's own switch."""
    inductor_config().deterministic = value


class DeterminismCells(Cells):
    """Deterministic algorithms: on or off, warn or raise, and Inductor's own switch.

    Since torch 2.13 Inductor's configuration is that of a thread (and task).
    """

    per_thread = frozenset({"inductor"})

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        names = list(names)
        if "inductor" in names:
            inductor_config()  # the setter would load it and leave it set

        found = {
            "mode": is_deterministic(),
            "warn_only": deterministic_warn_only(),
            "inductor": inductor_deterministic(),
        }
        return {name: found[name] for name in names}

    def write(self, values: Mapping[str, Any]) -> None:
        now = {**self.read(("mode", "warn_only")), **values}
        set_deterministic(now["mode"], warn_only=now["warn_only"])
        if "inductor" in values:
            put_inductor(values["inductor"])


DETERMINISM = DeterminismCells()


class ThreadCells(Cells):
    """The number of threads: the calling thread's, and what threads that start later begin with.

    ``torch.set_num_threads`` sets both; a thread that has already used torch keeps its own.
    """

    per_thread = frozenset({"own"})

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        reads: dict[str, Callable[[], int]] = {
            "own": torch.get_num_threads,
            "later": lambda: _elsewhere(torch.get_num_threads),
        }
        return {name: reads[name]() for name in names}

    def write(self, values: Mapping[str, Any]) -> None:
        later = values["later"] if "later" in values else self.read(["later"])["later"]
        if "own" in values:
            torch.set_num_threads(values["own"])
        if values.get("own") != later:
            _elsewhere(lambda: torch.set_num_threads(later))


THREADS = ThreadCells()


def _elsewhere(call: Callable[[], Any]) -> Any:
    """Return what `call` returns in a thread that has not used torch."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), name="polyattn-flags")
    thread.start()
    thread.join()
    return found[0]


class OptEinsumCells(Cells):
    """``opt_einsum.enabled`` and ``strategy``.

    Torch's module object lost its properties, so that assigning an attribute to it hides the value
    that its own ``flags()`` and ``set_flags()`` go on changing. What hides is restored too.
    """

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        module = torch.backends.opt_einsum
        return {name: (name in vars(module), getattr(module, name)) for name in names}

    def write(self, values: Mapping[str, Any]) -> None:
        module = torch.backends.opt_einsum
        for name, (hides, value) in values.items():
            if hides:
                setattr(module, name, value)
            else:
                vars(module).pop(name, None)
                setattr(vars(module)["m"], name, value)  # the module that it stands before

    def put(self, name: str, value: Any) -> None:
        """Set where it counts: the value that ``torch.einsum`` reads."""
        hides = name in vars(torch.backends.opt_einsum)
        self.write({name: (hides, value)})


OPT_EINSUM = OptEinsumCells()

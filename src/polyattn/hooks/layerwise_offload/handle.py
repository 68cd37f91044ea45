"""An offloaded model's handle: its plan, its report, and the way back."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeAlias, TypeVar

from torch import nn

from polyattn.errors import OffloadError, near_matches
from polyattn.hooks.layerwise_offload.attach import Attached
from polyattn.hooks.layerwise_offload.compiled_blocks import AroundCompiled, is_compiled_alone
from polyattn.hooks.layerwise_offload.engine import Engine
from polyattn.hooks.layerwise_offload.hook import LayerwiseOffloadHook, PassHook
from polyattn.hooks.layerwise_offload.offload_plan import OffloadPlan
from polyattn.hooks.layerwise_offload.offload_report import OffloadReport, report_of
from polyattn.hooks.layerwise_offload.unit import Unit
from polyattn.hooks.manager import HookHandle, ModuleHookManager

__all__ = ["LayerwiseOffload"]

_HOOK, _PASS = "layerwise_offload", "layerwise_offload_pass"
_Found = TypeVar("_Found")
_Block: TypeAlias = tuple[nn.Module, LayerwiseOffloadHook, HookHandle | AroundCompiled]


class LayerwiseOffload:
    """What :func:`offload` returns. A context manager: leaving it detaches.

    `report()` is what came of its `plan`.

    >>> import tempfile, torch
    >>> from polyattn.hooks import offload
    >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
    >>> model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     handle = offload(model, device="cpu", disk=folder)
    ...     _ = model(torch.ones(1, 64))
    ...     print(handle.attached, handle.units, handle.report().passes)
    ...     handle.detach()
    True ('0', '1', '2', '3') 1
    >>> handle.attached
    False
    """

    def __init__(self, model: nn.Module, plan: OffloadPlan, attached: Attached | None) -> None:
        self._plan = plan
        self._model = weakref.ref(model)
        self._attached = attached
        self._engine: Engine | None = None
        self._blocks: list[_Block] = []
        self._passes: list[HookHandle] = []
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        state = "on" if self.attached else "off"
        return f"<{type(self).__name__} {state}: {str(self.plan).splitlines()[0]}>"

    @property
    def attached(self) -> bool:
        """Whether it is in force."""
        return self._attached is not None

    @property
    def plan(self) -> OffloadPlan:
        """What was planned, with units that were changed since where they live now.

        A unit of the model's own files that is changed lives in host memory, unless `disk=` has a
        folder for it; where the host is the device, that is so much more than was planned.
        """
        engine = self._engine
        if engine is None:
            return self._plan
        return self._plan.with_homes({u.name: u.home.tier for u in engine.units.values()})

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units that stream."""
        return () if self._engine is None else tuple(u.name for u in self._engine.units.values())

    def start(self, plan: OffloadPlan) -> None:
        """Follow a plan: bring what stays, hook what streams."""
        attached = self._attached
        if attached is None:
            return
        self._stop()
        self._plan = plan
        if plan.readers:
            attached.carrier.use_readers(plan.readers)
        staying = set(plan.resident)
        streamed = []
        for unit in attached.units:
            if unit.name in staying:
                attached.stay(unit)
            else:
                attached.go(unit)
                streamed.append(unit)
        if not streamed:
            return
        self._engine = Engine(attached.carrier, streamed, depth=plan.depth, rehome=attached.rehome)
        self._hook(streamed)

    def expect(self, plan: OffloadPlan) -> None:
        """Take a plan that says of the one that is followed what came of it."""
        self._plan = plan

    def measure(self, how: Callable[[Engine], _Found]) -> _Found:
        """Measure with what streams now."""
        if self._engine is None:
            raise OffloadError("got nothing that streams to measure, expected units that do")
        return how(self._engine)

    def _hook(self, streamed: Sequence[Unit]) -> None:
        model, engine = self._model(), self._engine
        assert model is not None
        assert engine is not None
        hooked = {}
        for unit in streamed:
            hook = LayerwiseOffloadHook(engine, unit)
            for module in unit.modules:
                hooked[id(module)] = module
                attached = ModuleHookManager.of(module).attach(_HOOK, hook)
                self._blocks.append((module, hook, attached))
        self._follow_compilation()
        for name, module in model.named_modules():
            if id(module) not in hooked and any(
                id(part) in hooked for part in module.modules() if part is not module
            ):
                around = PassHook([engine], name or "model", self._follow_compilation)
                self._passes.append(ModuleHookManager.of(module).attach(_PASS, around))

    def _follow_compilation(self) -> None:
        """Take the hooks off blocks that were compiled in place, and wrap their calls instead."""
        for place, (module, hook, attached) in enumerate(self._blocks):
            if is_compiled_alone(module):
                attached.detach()
                self._blocks[place] = module, hook, AroundCompiled(module, hook)

    def _stop(self) -> None:
        self._plan = self.plan
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()  # first: who calls a block without its hook needs slots that stay
        for _, _, attached in self._blocks:
            attached.detach()
        for handle in reversed(self._passes):
            handle.detach()
        self._blocks.clear()
        self._passes.clear()

    def report(self) -> OffloadReport:
        """Return what was measured since the start: copies, waits, computation, memory."""
        return report_of(self.plan, self._engine)

    @contextmanager
    def loaded(self, *names: str) -> Iterator[None]:
        """Units (all by default) are on the device within the scope, whoever uses them.

        For weights that are used outside their module's call, and to change weights in place:
        what is changed goes home at the end.
        """
        engine = self._engine
        if engine is None:
            yield
            return
        known = {unit.name: unit for unit in engine.units.values()}
        unknown = [name for name in names if name not in known and name not in self.plan.resident]
        if unknown:
            raise OffloadError(
                f"got the unit {unknown[0]!r}, expected one of those that stream "
                f"({', '.join(known)}).{near_matches(unknown[0], known)}"
            )
        chosen = [known[name] for name in names if name in known] if names else known.values()
        try:
            with ExitStack() as scopes:
                for unit in chosen:
                    scopes.enter_context(engine.using(unit))
                yield
        finally:
            engine.give_back_added()

    @contextmanager
    def mutate_params_scope(self) -> Iterator[None]:
        """Weights may be changed within the scope, all at home: on the host, or in mapped files.

        Nothing is loaded, so that it takes no memory of the device; at the end what was changed
        finds its new home, unit by unit. For changes by the device itself, and for less memory than
        all changed weights need: ``for name in handle.units: with handle.loaded(name): ...``.

        >>> import tempfile, torch
        >>> from polyattn.hooks import offload
        >>> blocks = [torch.nn.Linear(64, 64) for _ in range(4)]
        >>> model = torch.nn.Sequential(*blocks).eval().requires_grad_(False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with offload(model, device="cpu", disk=folder) as handle:
        ...         with handle.mutate_params_scope():
        ...             for parameter in model.parameters():
        ...                 _ = parameter.data.zero_()
        ...         print(model(torch.ones(64)).count_nonzero())
        tensor(0)
        """
        try:
            yield
        finally:
            if self._engine is not None:
                for unit in self._engine.units.values():
                    self._engine.settle(unit)

    def detach(self) -> None:
        """Give the model back as it was, with the values that its weights have now."""
        with self._lock:
            attached, self._attached = self._attached, None
            if attached is None:
                return
            self._stop()
            attached.restore()
            attached.carrier.close()

    def __enter__(self) -> LayerwiseOffload:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.detach()

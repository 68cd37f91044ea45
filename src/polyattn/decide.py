"""From a problem and everybody's wishes to a :class:`Selection`: a pure function.

Requests (``FORCED``, ``CALL``, ``SCOPE``, ``MODULE``, ``ENV``) are strict; preferences
(``TUNED``, ``HEURISTIC``) are soft. Each registered backend gets a decision in any case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from polyattn.capabilities import Reason
from polyattn.errors import Unsupported
from polyattn.facts import Facts
from polyattn.heuristics import preference
from polyattn.problem import Problem
from polyattn.registry import Backend, Missing, Registry
from polyattn.requests import Request
from polyattn.selection import Accepted, Decision, Rejected, Selection, Source

__all__ = ["Tuned", "Wishes", "decide", "select"]


@dataclass(frozen=True)
class Tuned:
    """A measured time of a backend on this class of problems."""

    backend: str
    config: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True)
class Wishes:
    """Everything that is asked for at one call."""

    forced: Request = field(default_factory=Request)
    call: Request = field(default_factory=Request)
    scope: Request = field(default_factory=Request)
    module: Request = field(default_factory=Request)
    env: Request = field(default_factory=Request)
    layer: frozenset[str] | None = None
    on_unsupported: str = "error"

    def ordered(self) -> tuple[tuple[Source, Request], ...]:
        """Return the requests that name a backend, strongest first."""
        every = (
            (Source.FORCED, self.forced), (Source.CALL, self.call), (Source.SCOPE, self.scope),
            (Source.MODULE, self.module), (Source.ENV, self.env),
        )  # fmt: skip
        return tuple((source, request) for source, request in every if request.names)


def decide(
    backend: Backend,
    problem: Problem,
    registry: Registry,
    *,
    layer: frozenset[str] | None = None,
    never: Iterable[str] = (),
    facts: Facts | None = None,
) -> Decision:
    """Decide about one backend: every reason that speaks against it."""
    reasons: list[Reason] = []
    if layer is not None and backend.name not in layer:
        takes = " or ".join(sorted(layer)) or "none"
        reasons.append(Reason("layer", backend.name, takes, "its supported_attention_backends"))
    if backend.name in never:
        reasons.append(Reason("scope", backend.name, "others", "use_backend(never=...)"))
    detail = _availability(backend, problem, registry, facts, reasons)
    reasons.extend(backend.check(problem))
    return Rejected(tuple(reasons)) if reasons else Accepted(detail)


def _availability(
    backend: Backend,
    problem: Problem,
    registry: Registry,
    facts: Facts | None,
    reasons: list[Reason],
) -> str:
    if facts is not None:
        if problem.device == "cuda" and facts.torch_build == "cpu":
            reasons.append(Reason("build", "a CPU build of torch", "a CUDA build"))
        package = backend.package
        if package is not None and facts.packages.get(package, "assumed") is None:
            fix = f"pip install {package}"
            reasons.append(Reason("package", f"no {package}", package, fix))
        return "as far as its capabilities tell"
    probed = registry.probe(backend.name)
    if isinstance(probed, Missing):
        reasons.append(Reason("available", probed.reason, "an install", probed.how_to_get_it))
        return ""
    if probed.devices is not None and problem.device not in probed.devices:
        present = " or ".join(sorted(probed.devices))
        if problem.device in backend.capabilities_for(problem.device).devices:
            reasons.append(Reason("machine", f"no {problem.device} device here", present))
    return probed.version


def select(
    problem: Problem,
    wishes: Wishes,
    registry: Registry,
    *,
    tuned: Iterable[Tuned] = (),
    facts: Facts | None = None,
) -> Selection:
    """Choose the backend; raise :class:`Unsupported` with every decision if nobody can or may."""
    requests = wishes.ordered()
    active = requests[0] if requests else None
    exempt = active[1].names if active and active[0] in (Source.FORCED, Source.CALL) else ()
    never = frozenset(wishes.scope.never) - frozenset(exempt)
    decisions = {
        name: decide(
            registry[name], problem, registry, layer=wishes.layer, never=never, facts=facts
        )
        for name in registry.names(problem.framework)
    }
    if active is None:
        return _automatic(problem, decisions, registry, tuned)
    source, request = active
    overridden = {str(s): ", ".join(r.names) for s, r in requests[1:]}
    for name in request.names:
        decision = decisions.get(name)
        if isinstance(decision, Accepted):
            weaker = {s: names for s, names in overridden.items() if names != name}
            reason = f"asked for by {_ASKED_BY[source]}"
            return Selection(
                name, source, {}, decisions, weaker, reason, decision.detail, problem=problem
            )
    policy = request.on_unsupported or wishes.scope.on_unsupported or wishes.on_unsupported
    refusal = _refusal(problem, source, request, decisions)
    if policy == "error":
        raise Unsupported(refusal, decisions)
    chosen = _automatic(problem, decisions, registry, tuned)
    fallback = f"{source} asked for {', '.join(request.names)}, which cannot run it"
    return Selection(
        chosen.backend, chosen.source, chosen.config, decisions, overridden, chosen.reason,
        chosen.version, fallback, problem,
    )  # fmt: skip


def _automatic(
    problem: Problem,
    decisions: Mapping[str, Decision],
    registry: Registry,
    tuned: Iterable[Tuned],
) -> Selection:
    able = {
        name: decision.detail
        for name, decision in decisions.items()
        if isinstance(decision, Accepted)
        and registry[name].capabilities_for(problem.device).exactness == "exact"
    }
    for row in tuned:
        if row.backend in able:
            reason = f"fastest of the measured ones, {row.seconds * 1e6:.1f} us"
            version = able[row.backend]
            return Selection(
                row.backend, Source.TUNED, dict(row.config), decisions, {}, reason, version,
                problem=problem,
            )  # fmt: skip
    order, reason = preference(problem, able)
    if not order:
        raise Unsupported(_nobody(problem, decisions), decisions)
    name = order[0]
    return Selection(name, Source.HEURISTIC, {}, decisions, {}, reason, able[name], problem=problem)


_ASKED_BY = {
    Source.FORCED: "global_force_attn_backend(...)",
    Source.CALL: "backend=",
    Source.SCOPE: "use_backend(...)",
    Source.MODULE: "set_backend(model, ...)",
    Source.ENV: "POLYATTN_BACKEND",
}


def _refusal(
    problem: Problem, source: Source, request: Request, decisions: Mapping[str, Decision]
) -> str:
    asked = f"{', '.join(request.names)} ({source}, {_ASKED_BY[source]})"
    lines = [f"got a request for {asked}, where this problem cannot run:", f"  {problem}"]
    for name in request.names:
        decision = decisions.get(name) or f"runs {problem.framework}'s arrays not at all"
        lines.append(f"  - {name}: {decision}")
    others = [n for n, d in decisions.items() if isinstance(d, Accepted)]
    able = f"These could: {', '.join(others)}." if others else "No other backend could either."
    lines.append(
        f'{able} Ask for one of them, or allow it with on_unsupported="fallback" in use_backend '
        "(or POLYATTN_ON_UNSUPPORTED=fallback)."
    )
    return "\n".join(lines)


def _nobody(problem: Problem, decisions: Mapping[str, Decision]) -> str:
    lines = ["got a problem that no backend can or may run:", f"  {problem}"]
    lines += [f"  - {name}: {decision}" for name, decision in decisions.items()]
    return "\n".join(
        [*lines, "Change what the reasons name; `polyattn doctor` lists what is here."]
    )

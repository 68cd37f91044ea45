"""From a problem and everybody's wishes to a :class:`Selection`: a pure function.

Requests (``FORCED``, ``CALL``, ``SCOPE``, ``MODULE``, ``ENV``) are strict; preferences
(``TUNED``, ``HEURISTIC``) are soft. Each registered backend gets a decision in any case.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.errors import Unsupported
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.problem.processor import instruction_sets
from polyattn.selection import Accepted, Decision, Rejected, Selection, Source
from polyattn.selection.capabilities import Reason
from polyattn.selection.evidence.figures import UNMEASURED, Evidence
from polyattn.selection.heuristics import EXPORTED, preference
from polyattn.selection.registry import Backend, Missing, Registry
from polyattn.selection.requests import Request
from polyattn.selection.wishes import Wishes

__all__ = ["Tuned", "decision_on", "select"]


@dataclass(frozen=True)
class Tuned:
    """A measured time of a backend on this class of problems."""

    backend: str
    config: Mapping[str, Any]
    seconds: float


def decision_on(
    backend: Backend,
    problem: Problem,
    registry: Registry,
    *,
    layer: frozenset[str] | None = None,
    never: Iterable[str] = (),
    facts: Facts | None = None,
) -> Decision:
    """Return the decision on one backend: every reason that speaks against it."""
    if layer is None and facts is None and not never:
        detail, absent = _here(backend, problem, registry)
        refused = backend.check(problem)
        return Rejected((*absent, *refused)) if absent or refused else _accepted(detail)
    reasons: list[Reason] = []
    if layer is not None and backend.name not in layer:
        takes = " or ".join(sorted(layer)) or "none"
        reasons.append(Reason("layer", backend.name, takes, "its supported_attention_backends"))
    if backend.name in never:
        reasons.append(Reason("scope", backend.name, "others", "use_backend(never=...)"))
    if facts is None:
        detail, absent = _here(backend, problem, registry)
    else:
        detail, absent = _there(backend, problem, registry, facts)
    reasons += (*absent, *backend.check(problem))
    return Rejected(tuple(reasons)) if reasons else _accepted(detail)


@functools.lru_cache(maxsize=256)
def _accepted(detail: str) -> Accepted:
    return Accepted(detail)


def _here(backend: Backend, problem: Problem, registry: Registry) -> tuple[str, list[Reason]]:
    """Return the version of what is installed here, and every reason why it cannot be had."""
    probed = registry.probe(backend)
    if isinstance(probed, Missing):
        return "", [Reason("available", probed.reason, "an install", probed.how_to_get_it)]
    declared = backend.capabilities_for(problem.device)
    reasons = []
    if (
        probed.devices is not None
        and problem.device not in probed.devices
        and problem.device in declared.devices
    ):
        present = " or ".join(sorted(probed.devices))
        reasons.append(Reason("machine", f"no {problem.device} device here", present))
    if declared.instructions and problem.device == "cpu":
        reasons += declared.check_processor(instruction_sets())
    return probed.version, reasons


def _there(
    backend: Backend, problem: Problem, registry: Registry, facts: Facts
) -> tuple[str, list[Reason]]:
    """Return what is known of a machine that one does not have, and every reason against it."""
    reasons = []
    if (build := facts.lacks_build(backend.framework)) is not None:
        had = f"a {build.upper()} build of {backend.framework}"
        reasons.append(Reason("build", had, f"a {facts.device.upper()} build"))
    for package in dict.fromkeys((backend.framework, backend.package)):
        if package is not None and facts.packages.get(package, "assumed") is None:
            fix = f"pip install {package}"
            reasons.append(Reason("package", f"no {package}", package, fix))
    if problem.device == "cpu":
        declared = backend.capabilities_for(problem.device)
        reasons += declared.check_processor(facts.instructions)
    foretold = registry.foretell(backend, facts)
    if isinstance(foretold, Missing):
        reasons.append(Reason("available", foretold.reason, "it", foretold.how_to_get_it))
    elif foretold is not None and foretold.detail:
        return foretold.detail, reasons
    return "as far as its capabilities tell", reasons


def select(
    problem: Problem,
    wishes: Wishes,
    registry: Registry,
    *,
    tuned: Iterable[Tuned] = (),
    facts: Facts | None = None,
    evidence: Evidence = UNMEASURED,
) -> Selection:
    """Select the backend; raise :class:`Unsupported` with every decision if nobody can or may.

    `evidence`: what is known of the speed of kernels on the machine that is chosen for.
    """
    requests = wishes.ordered()
    active = requests[0] if requests else None
    exempt = active[1].names if active and active[0] in (Source.FORCED, Source.CALL) else ()
    never = frozenset(wishes.scope.never) - frozenset(exempt)
    backends = {backend.name: backend for backend in registry.backends(problem.framework)}
    decisions = {
        name: decision_on(backend, problem, registry, layer=wishes.layer, never=never, facts=facts)
        for name, backend in backends.items()
    }
    if active is None:
        return _chosen(problem, wishes, decisions, backends, tuned, evidence)
    source, request = active
    decisions |= _of_other_frameworks(problem, request.names, decisions, registry)
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
    chosen = _chosen(problem, wishes, decisions, backends, tuned, evidence)
    fallback = f"{source} asked for {', '.join(request.names)}, which cannot run it"
    return Selection(
        chosen.backend,
        chosen.source,
        chosen.config,
        chosen.decisions,
        overridden,
        chosen.reason,
        chosen.version,
        fallback,
        problem,
    )


def _chosen(
    problem: Problem,
    wishes: Wishes,
    decisions: dict[str, Decision],
    backends: Mapping[str, Backend],
    tuned: Iterable[Tuned],
    evidence: Evidence,
) -> Selection:
    """Choose by itself: for a program that is exported what it can hold, else the fastest."""
    held = decisions.get(EXPORTED.prefer[0])
    if wishes.exporting and isinstance(held, Accepted):
        name, reason, version = EXPORTED.prefer[0], EXPORTED.reason, held.detail
        return Selection(
            name, Source.HEURISTIC, {}, decisions, {}, reason, version, problem=problem
        )
    return _automatic(problem, _within(wishes.left, decisions), backends, tuned, evidence)


def _within(left: frozenset[str] | None, decisions: dict[str, Decision]) -> dict[str, Decision]:
    """Keep an automatic choice to the kernels that torch's own switches leave.

    A program that turns kernels off, as ``torch.nn.attention.sdpa_kernel`` does, has said what is
    to run: what is left, and nothing else, unless the call is none of torch's function.
    """
    if left is None:
        return decisions
    kept = left | _beyond_torch(left, decisions)
    why = Reason(
        "switches",
        "torch's own switches set",
        " or ".join(sorted(left)) or "none",
        "leave sdpa_kernel(...), see torch.backends.cuda.enable_*_sdp, or ask for a backend",
    )
    return {
        name: decision
        if name in kept
        else Rejected((why, *(decision.reasons if isinstance(decision, Rejected) else ())))
        for name, decision in decisions.items()
    }


def _beyond_torch(left: frozenset[str], decisions: Mapping[str, Decision]) -> frozenset[str]:
    """Return what else may run a call that torch's function has no words for, as of soft caps.

    The math path is what torch leaves on for whatever its other kernels cannot do. So where it is
    left, and cannot: alone it stands for scores that are written out, as the reference does; beside
    others it is no wish of a kind, and every backend may run the call but what is switched off.
    """
    able = any(isinstance(decisions.get(name), Accepted) for name in left)
    if able or "sdpa_math" not in left:
        return frozenset()
    if len(left) == 1:
        return frozenset({"reference"})
    return frozenset(name for name in decisions if not name.startswith("sdpa_"))


def _of_other_frameworks(
    problem: Problem, names: Iterable[str], decisions: Mapping[str, Decision], registry: Registry
) -> dict[str, Decision]:
    """Refuse what was asked for by a name that only other frameworks have."""
    found: dict[str, Decision] = {}
    for name in names:
        if name not in decisions:
            runs = " and ".join(b.framework for b in registry.backends() if b.name == name)
            why = Reason("framework", f"arrays of {problem.framework}", f"arrays of {runs}")
            gone = Reason("name", "one that was registered no longer", "one that is")
            found[name] = Rejected((why if runs else gone,))
    return found


def _automatic(
    problem: Problem,
    decisions: Mapping[str, Decision],
    backends: Mapping[str, Backend],
    tuned: Iterable[Tuned],
    evidence: Evidence,
) -> Selection:
    able = {
        name: decision.detail
        for name, decision in decisions.items()
        if isinstance(decision, Accepted)
        and backends[name].capabilities_for(problem.device).exactness == "exact"
    }
    for row in tuned:
        if row.backend in able:
            reason = f"fastest of the measured ones, {row.seconds * 1e6:.1f} us"
            version = able[row.backend]
            return Selection(
                row.backend,
                Source.TUNED,
                dict(row.config),
                decisions,
                {},
                reason,
                version,
                problem=problem,
            )
    order, reason = preference(problem, able, evidence)
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
        lines.append(f"  - {name}: {decisions[name]}")
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

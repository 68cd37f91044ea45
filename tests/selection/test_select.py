"""Selection as a pure function: tables of facts to results, with backends that need no machine."""

from __future__ import annotations

import json

import pytest

from polyattn import Facts, Problem, Unsupported
from polyattn.errors import PolyattnError, UnknownBackend
from polyattn.problem import MaskFacts
from polyattn.selection import Accepted, Rejected, Source
from polyattn.selection.capabilities import Capabilities
from polyattn.selection.registry import Available, Backend, Missing, Registry
from polyattn.selection.requests import Request
from polyattn.selection.select import Tuned, select
from polyattn.selection.wishes import Wishes

SMALL = Problem(batch=1, q_len=8, kv_len=8, heads=2, kv_heads=2, head_dim=16)


def backend(name: str, probe: object = Available("1"), **can: object) -> Backend:
    declared = {"devices": {"cpu"}, "dtypes": {"float32"}, "head_dims": (1, 64, 1), **can}
    return Backend(
        name, "torch", Capabilities(**declared), lambda: probe, lambda: None, package=name
    )


@pytest.fixture
def registry() -> Registry:
    table = Registry(in_tree=(), plugins=False)
    table.register(backend("plain"))
    table.register(backend("able", backward=True, lse=True, masks={"Causal"}))
    table.register(backend("absent", Missing("not installed", "pip install absent")))
    table.register(backend("rough", exactness="int8"))
    return table


def names(*wanted: str) -> Request:
    return Request(wanted)


@pytest.mark.parametrize(
    ("wishes", "chosen", "source"),
    [
        (Wishes(), "plain", Source.HEURISTIC),
        (Wishes(env=names("able")), "able", Source.ENV),
        (Wishes(env=names("plain"), module=names("able")), "able", Source.MODULE),
        (Wishes(module=names("plain"), scope=names("able")), "able", Source.SCOPE),
        (Wishes(scope=names("plain"), call=names("able")), "able", Source.CALL),
        (Wishes(call=names("plain"), forced=names("able")), "able", Source.FORCED),
        (Wishes(scope=names("absent", "able")), "able", Source.SCOPE),
        (Wishes(scope=Request(never=("plain",))), "able", Source.HEURISTIC),
        (Wishes(call=names("plain"), scope=Request(never=("plain",))), "plain", Source.CALL),
        (Wishes(layer=frozenset({"able"})), "able", Source.HEURISTIC),
        (Wishes(call=names("rough")), "rough", Source.CALL),
        (Wishes(call=names("absent"), on_unsupported="fallback"), "plain", Source.HEURISTIC),
    ],
)
def test_who_wins(registry: Registry, wishes: Wishes, chosen: str, source: Source) -> None:
    found = select(SMALL, wishes, registry)
    assert (found.backend, found.source) == (chosen, source)
    assert set(found.decisions) == set(registry.names())
    json.dumps(found.to_dict())


@pytest.mark.parametrize(
    "wishes",
    [
        Wishes(call=names("absent")),
        Wishes(env=names("plain"), scope=Request(never=("plain",))),
        Wishes(env=names("plain"), layer=frozenset({"able"})),
        Wishes(layer=frozenset()),
        Wishes(scope=Request(never=("plain", "able"))),
    ],
)
def test_who_is_refused(registry: Registry, wishes: Wishes) -> None:
    with pytest.raises(Unsupported) as caught:
        select(SMALL, wishes, registry)
    assert set(caught.value.decisions) == set(registry.names())
    assert all(isinstance(d, (Accepted, Rejected)) for d in caught.value.decisions.values())


def test_quantised_backends_are_never_chosen_automatically(registry: Registry) -> None:
    with pytest.raises(Unsupported):
        select(SMALL, Wishes(layer=frozenset({"rough"})), registry)


def test_overridden_requests_are_kept(registry: Registry) -> None:
    found = select(
        SMALL, Wishes(forced=names("able"), call=names("plain"), env=names("able")), registry
    )
    assert found.overridden == {"CALL": "plain"}


def test_tuned_is_a_preference_and_never_overrides_a_request(registry: Registry) -> None:
    tuned = [Tuned("rough", {}, 1e-9), Tuned("absent", {}, 1e-8), Tuned("able", {"x": 1}, 1e-6)]
    found = select(SMALL, Wishes(), registry, tuned=tuned)
    assert (found.backend, found.source, found.config) == ("able", Source.TUNED, {"x": 1})
    assert select(SMALL, Wishes(env=names("plain")), registry, tuned=tuned).backend == "plain"
    gone = [Tuned("no_longer_registered", {}, 1e-9)]
    assert select(SMALL, Wishes(), registry, tuned=gone).source is Source.HEURISTIC


def test_every_reason_is_given_with_the_offending_values(registry: Registry) -> None:
    hard = SMALL.with_(
        dtype="float64",
        head_dim=128,
        value_dim=128,
        lse=True,
        grad=True,
        device="cuda",
        mask=MaskFacts.parse("Window(left=1, right=None)", None),
    )
    with pytest.raises(Unsupported) as caught:
        select(hard, Wishes(), registry)
    text = str(caught.value.decisions["plain"])
    for part in ("cuda", "float64", "128", "Window(left=1", "return_lse", "gradients"):
        assert part in text


def test_a_dry_run_asks_no_probe(registry: Registry) -> None:
    def explode() -> Available:
        raise AssertionError("probed")

    can_do = Capabilities(
        devices={"cuda"}, dtypes={"float32"}, head_dims=(1, 64, 1), archs=(80, 90)
    )
    registry.register(Backend("gpu", "torch", can_do, explode, lambda: None, package="gpu"))
    on = SMALL.with_(device="cuda", arch="sm_90")
    assert select(on, Wishes(), registry, facts=Facts.parse("h100")).backend == "gpu"
    with pytest.raises(Unsupported, match="sm_75"):
        select(
            SMALL.with_(device="cuda", arch="sm_75"), Wishes(), registry, facts=Facts.parse("t4")
        )
    with pytest.raises(Unsupported, match="pip install gpu"):
        select(on, Wishes(), registry, facts=Facts.parse("h100", {"gpu": None}))
    with pytest.raises(Unsupported, match="CPU build"):
        select(on, Wishes(), registry, facts=Facts("cuda", "sm_90", builds={"torch": "cpu"}))


def test_probes_that_raise_or_answer_nonsense_are_missing(registry: Registry) -> None:
    def broken() -> Available:
        raise RuntimeError("no driver")

    caps = Capabilities(devices={"cpu"}, dtypes={"float32"}, head_dims=(1, 64, 1))
    registry.register(Backend("broken", "torch", caps, broken, lambda: None))
    registry.register(Backend("odd", "torch", caps, lambda: True, lambda: None))
    found = select(SMALL, Wishes(), registry)
    assert "no driver" in str(found.decisions["broken"])
    assert "True" in str(found.decisions["odd"])


def test_names_are_unique_and_well_formed(registry: Registry) -> None:
    for wrong in ("plain", "Plain", "1st", "a-b", ""):
        with pytest.raises(PolyattnError):
            registry.register(backend(wrong))
    with pytest.raises(PolyattnError, match="expected a polyattn"):
        registry.register("plain")  # type: ignore[arg-type]
    with pytest.raises(UnknownBackend, match="Did you mean 'plain'"):
        registry["plian"]


def test_problems_survive_json_and_reject_nonsense() -> None:
    mask = MaskFacts.parse("Causal() & Window(left=3, right=None)", "bottom_right")
    p = SMALL.with_(mask=mask, scale=0.5, device="cuda:sm_90")
    assert p.arch == "sm_90" and Problem.from_json(p.to_json()) == p
    for text in ("", "[]", "{}", '{"batch": -1}', "nonsense", '{"unknown": 1}'):
        with pytest.raises(PolyattnError):
            Problem.from_json(text)

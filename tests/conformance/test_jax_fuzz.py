"""The fuzzer finds nothing in JAX's backends, and finds what lies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
jax = pytest.importorskip("jax")

from polyattn import settings
from polyattn.backends.reference import jax as reference
from polyattn.cli.fuzz import main
from polyattn.conformance.cases import Case
from polyattn.conformance.check import Verdict, examine, subject
from polyattn.conformance.fuzz import run
from polyattn.selection.backend import Available, Backend
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import registry

OTHERS = {"jax_paged_decode", "jax_ring", "jax_ulysses", "jax_hybrid"}
"""Backends of problems that no case is: with pages, or over many devices; tests/jax has theirs."""
EXACT = [
    name
    for name in registry.names("jax")
    if name not in OTHERS and hasattr(registry.probe(("jax", name)), "version")
]


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Kernels for GPUs and TPUs are run here too."""
    with settings.within({"POLYATTN_PALLAS_INTERPRET": "1"}):
        yield


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_found(name: str) -> None:
    report = run(24, seed=11, backend=name, framework="jax", time_limit=6)
    assert report.ok, [failure.reproduce for failure in report.failures]
    assert report.tested or not registry["jax", name].capabilities_for("cpu").devices >= {"cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_found_in_many(name: str) -> None:
    report = run(120, seed=12, backend=name, framework="jax", time_limit=9)
    assert report.ok, [failure.reproduce for failure in report.failures]


@pytest.fixture
def liar() -> Iterator[Callable[..., None]]:
    """Register a backend that is the definition but for one thing that it does wrong."""
    made = []

    def add(kernel: Callable[..., Any], **can: Any) -> None:
        able = {
            "devices": {"cpu"}, "dtypes": {"float32"}, "head_dims": (1, 1 << 16, 1),
            "layouts": {"BTNH", "BNTH", "packed"}, "masks": ALL_MASKS, "gqa": True, "scale": True,
            "lse": True, "backward": True, "strided": True, "value_dim": True, **can,
        }  # fmt: skip

        def prepare(problem: Any, config: Any) -> Any:
            exact = reference.load()(problem, config)
            return lambda *given: kernel(problem, exact, *given)

        backend = Backend(
            "liar", "jax", Capabilities(**able), lambda: Available("1"), lambda: prepare
        )
        made.append(registry.register(backend))

    yield add
    for backend in made:
        registry.unregister(backend.name, backend.framework)


def case(**facts: Any) -> Case:
    return Case.from_spec(json.dumps({"seed": 8, "b": 2, "t": 5, "s": 7, "h": 8, "v": 8, **facts}))


def verdict(**facts: Any) -> Verdict:
    return examine(subject(case(**facts)), registry["jax", "liar"])


def test_a_dropped_mask_is_found(liar: Callable[..., None]) -> None:
    liar(lambda problem, exact, q, k, v, mask, *rest: exact(q, k, v, None, *rest))
    assert verdict(mask=["Causal", "bottom_right"]).outcome == "wrong"
    assert verdict().outcome == "right"


def test_gradients_that_are_dropped_are_found(liar: Callable[..., None]) -> None:
    liar(lambda problem, exact, q, k, *rest: exact(q, jax.lax.stop_gradient(k), *rest))
    found = verdict(grad="qkv")
    assert found.outcome == "wrong" and "key" in found.detail


def test_a_leak_is_found(liar: Callable[..., None]) -> None:
    def kernel(problem: Any, exact: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        return exact(q, k, v, *rest) + 0 * v.sum()

    liar(kernel)
    found = verdict(mask=["Padding", False, True], poison=True)
    assert found.outcome == "wrong" and "masked entries" in found.detail


def test_a_refusal_without_need_is_told(liar: Callable[..., None]) -> None:
    liar(lambda problem, exact, *given: exact(*given), softcap=False)
    found = verdict(softcap=2.0)
    assert (found.outcome, found.able) == ("refused_alone", True)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--framework", "jax", "--backend", "jax_reference", "--problems", "4"]) == 0
    assert "4 problems" in capsys.readouterr().out
    assert main(["--framework", "jax", "--compiled"]) == 2
    assert main(["--framework", "jax", "--device", "tpu"]) == 2  # there is none
    assert main(["--framework", "jax", "--backend", "sdpa_flash"]) == 2

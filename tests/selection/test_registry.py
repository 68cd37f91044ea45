"""The registry: one name for several frameworks, in-tree names first, and faults of plugins."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from polyattn import Problem, UnknownBackend, Unsupported
from polyattn.errors import PolyattnError
from polyattn.selection import Accepted, Rejected
from polyattn.selection.capabilities import Capabilities, Reason
from polyattn.selection.registry import Available, Backend, Missing, Registry
from polyattn.selection.requests import Request
from polyattn.selection.select import select
from polyattn.selection.wishes import Wishes

TORCH = Problem(batch=1, q_len=8, kv_len=8, heads=2, kv_heads=2, head_dim=16)
JAX = TORCH.with_(framework="jax")
CAN = Capabilities(devices={"cpu"}, dtypes={"float32"}, head_dims=(1, 64, 1))


def backend(name: str, framework: str = "torch", **parts: Any) -> Backend:
    given: dict[str, Any] = {
        "capabilities": CAN,
        "probe": lambda: Available(framework),
        "load": lambda: None,
        **parts,
    }
    return Backend(name, framework, **given)


@pytest.fixture
def registry() -> Registry:
    """A table with `both` for torch and for JAX, and one name for each alone."""
    table = Registry(in_tree=(), plugins=False)
    for made in (backend("ours"), backend("both"), backend("both", "jax"), backend("tpu", "jax")):
        table.register(made)
    table.group("fused", ("ours", "both"), framework="torch")
    table.group("fused", ("tpu",), framework="jax")
    return table


def test_a_name_may_serve_several_frameworks(registry: Registry) -> None:
    assert registry.names() == ("ours", "both", "tpu")
    assert registry.names("torch") == ("ours", "both")
    assert registry.names("jax") == ("both", "tpu")
    assert registry.names("numpy") == ()
    assert [b.key for b in registry] == [
        ("torch", "ours"),
        ("torch", "both"),
        ("jax", "both"),
        ("jax", "tpu"),
    ]
    assert registry["jax", "both"].framework == "jax"
    assert registry.get("both", framework="torch").framework == "torch"
    assert registry["tpu"].framework == "jax" and registry.get("OURS").framework == "torch"
    with pytest.raises(UnknownBackend, match=r"torch and jax have.*registry\['torch', 'both'\]"):
        registry["both"]
    with pytest.raises(UnknownBackend, match=r"runs jax's arrays.*torch's: ours, both"):
        registry.get("tpu", framework="torch")
    with pytest.raises(UnknownBackend, match="Did you mean 'both'"):
        registry.get("bth", framework="torch")


def test_a_second_backend_of_one_framework_is_an_error(registry: Registry) -> None:
    for name, framework in (("both", "jax"), ("ours", "torch"), ("fused", "torch")):
        with pytest.raises(PolyattnError, match=f"second backend called '{name}' for {framework}"):
            registry.register(backend(name, framework))
    registry.unregister("both", "jax")
    assert registry["both"].framework == "torch"
    registry.register(backend("both", "jax"))


def test_groups_are_each_framework_s(registry: Registry) -> None:
    assert registry.groups("torch") == {"fused": ("ours", "both")}
    assert registry.groups("jax") == {"fused": ("tpu",)}
    assert registry.groups() == {"fused": ("ours", "both", "tpu")}
    assert registry.expand("fused", asked_by="x", framework="jax") == ("tpu",)
    for framework in (None, "torch"):
        with pytest.raises(UnknownBackend, match="stands for"):
            registry.known("fused", asked_by="x", framework=framework)


def test_probes_and_distrust_are_each_framework_s(registry: Registry) -> None:
    assert registry.probe(("torch", "both")) == Available("torch")
    assert registry.probe(registry["jax", "both"]) == Available("jax")
    registry.distrust(("jax", "both"), "it broke")
    assert isinstance(registry.probe(("jax", "both")), Missing)
    assert registry.probe(("torch", "both")) == Available("torch")


def test_a_request_means_the_problem_s_framework(registry: Registry) -> None:
    for problem in (TORCH, JAX):
        found = select(problem, Wishes(call=Request(("both",))), registry)
        assert (found.backend, found.version) == ("both", problem.framework)
        assert set(found.decisions) == set(registry.names(problem.framework))
    fused = Wishes(call=Request(registry.expand("fused", asked_by="x")))
    assert select(TORCH, fused, registry).backend == "ours"
    registry.unregister("both", "jax")
    assert select(JAX, fused, registry).backend == "tpu"


def test_a_name_of_another_framework_is_refused_in_those_words(registry: Registry) -> None:
    with pytest.raises(Unsupported, match="got arrays of jax, takes arrays of torch") as caught:
        select(JAX, Wishes(scope=Request(("ours",))), registry)
    assert isinstance(caught.value.decisions["ours"], Rejected)
    found = select(JAX, Wishes(scope=Request(("ours",)), on_unsupported="fallback"), registry)
    assert found.backend == "both" and "ours" in (found.fallback or "")
    assert select(JAX, Wishes(scope=Request(never=("ours",))), registry).backend == "both"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"framework": "pytorch"}, "Did you mean 'torch'"),
        ({"capabilities": None}, "capabilities of the backend"),
        ({"capabilities": ()}, "capabilities of the backend"),
        ({"probe": None}, "the probe of the backend"),
        ({"load": 3}, "the load of the backend"),
        ({"extra": [Reason("a", "b", "c")]}, "the extra of the backend"),
    ],
)
def test_what_cannot_be_a_backend_is_refused_when_it_registers(
    registry: Registry, parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolyattnError, match=message):
        registry.register(backend("wrong", **{"framework": "torch", **parts}))
    assert "wrong" not in registry.names()


@pytest.mark.parametrize(
    "wrong", [{"devices": "cpu"}, {"dtypes": None}, {"head_dims": 64}, {"archs": "sm_90"}]
)
def test_capabilities_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(PolyattnError, match="expected"):
        Capabilities(**{"devices": {"cpu"}, "dtypes": {"float32"}, **wrong})


def in_new_process(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_nobody_takes_an_in_tree_name_before_the_first_call() -> None:
    said = in_new_process(
        """
        import sys
        from polyattn.selection.capabilities import Capabilities
        from polyattn.errors import PolyattnError
        from polyattn.selection.registry import Available, Backend, register, registry

        can = Capabilities(devices={"cpu"}, dtypes={"float32"})
        for name in ("native_cpu", "torch_sdpa"):
            try:
                register(Backend(name, "torch", can, lambda: Available("1"), lambda: None))
            except PolyattnError as error:
                print(str(error).partition(",")[0])
        register(Backend("sdpa_math", "jax", can, lambda: Available("1"), lambda: None))
        assert registry.is_in_tree(registry["torch", "sdpa_math"])
        assert not registry.is_in_tree(registry["jax", "sdpa_math"])
        print(*registry.names("torch"))
        print({"torch", "jax", "numpy"} & set(sys.modules))
        """
    )
    assert said.splitlines() == [
        "got a second backend called 'native_cpu' for torch",
        "got a second backend called 'torch_sdpa' for torch",
        "sdpa_flash sdpa_efficient sdpa_cudnn sdpa_math portable native_cpu flex reference",
        "set()",
    ]


def test_an_interrupt_while_declaring_leaves_nothing_half_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from polyattn.backends.flex import declared

    table = Registry(plugins=False)
    with monkeypatch.context() as patch:
        patch.setattr(declared, "_flex", _raising(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            table.names()
    assert {"flex", "native_cpu", "reference"} <= set(table.names("torch"))


# Faults ------------------------------------------------------------------------------------------


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


FAULTS = [RuntimeError("boom"), SystemExit(3), RecursionError("deep")]


@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_an_extra_that_raises_is_a_reason_against_that_backend_only(
    registry: Registry, error: BaseException
) -> None:
    registry.register(backend("odd", extra=_raising(error)))
    found = select(TORCH, Wishes(), registry)
    assert found.backend == "ours" and isinstance(found.decisions["both"], Accepted)
    assert type(error).__name__ in str(found.decisions["odd"])
    assert "extra" in str(found.decisions["odd"]) and "odd" in str(found.decisions["odd"])
    with pytest.raises(Unsupported, match=type(error).__name__):
        select(TORCH, Wishes(call=Request(("odd",))), registry)


@pytest.mark.parametrize("answer", [None, ["no"], 7])
def test_an_extra_that_answers_nonsense_is_a_reason(registry: Registry, answer: Any) -> None:
    registry.register(backend("odd", extra=lambda problem: answer))
    found = select(TORCH, Wishes(), registry)
    assert "from its extra" in str(found.decisions["odd"])
    assert found.to_dict()["decisions"]["odd"]["accepted"] is False


def test_capabilities_that_raise_are_a_reason(registry: Registry) -> None:
    class Broken(Capabilities):
        def check(self, problem: Problem) -> tuple[Reason, ...]:
            raise ZeroDivisionError("over zero")

    can = Broken(devices={"cpu"}, dtypes={"float32"})
    registry.register(backend("odd", capabilities=can))
    found = select(TORCH, Wishes(), registry)
    assert "ZeroDivisionError: over zero from its capabilities" in str(found.decisions["odd"])


def test_what_raises_is_asked_again_but_an_interrupt_is_one(registry: Registry) -> None:
    registry.register(backend("odd", extra=_raising(KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        select(TORCH, Wishes(), registry)


class Unheard(BaseException):
    """What no ``except Exception`` sees."""


@pytest.mark.parametrize("error", [*FAULTS, Unheard("x"), GeneratorExit()], ids=repr)
def test_a_probe_that_exits_or_raises_anything_is_missing(
    registry: Registry, error: BaseException
) -> None:
    registry.register(backend("odd", probe=_raising(error)))
    found = select(TORCH, Wishes(), registry)
    assert f"its probe raised {type(error).__name__}" in str(found.decisions["odd"])


def test_a_probe_may_list_its_devices_and_may_not_talk_nonsense(registry: Registry) -> None:
    registry.register(backend("lists", probe=lambda: Available("1", "", ["cpu"])))
    registry.register(backend("odd", probe=lambda: Available("1", "", 7)))
    found = select(TORCH, Wishes(), registry)
    assert isinstance(found.decisions["lists"], Accepted)
    assert "its probe raised TypeError" in str(found.decisions["odd"])


def test_configs_that_raise_are_noted(registry: Registry) -> None:
    odd = registry.register(backend("odd", configs=_raising(RuntimeError("boom"))))
    fine = registry.register(backend("fine", configs=lambda p: [{"tile": 8}]))
    assert registry.configurations(odd, TORCH) == [{}]
    assert registry.configurations(fine, TORCH) == [{}, {"tile": 8}]
    assert registry.faults == {"odd (torch)": "RuntimeError: boom from its configs"}

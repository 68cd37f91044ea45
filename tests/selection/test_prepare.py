"""From a problem to a kernel: what is asked for around a call, and what becomes of a bad plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from polyattn import (
    Causal,
    MissingDependency,
    PolyattnError,
    Problem,
    Unsupported,
    set_backend,
    use_backend,
)
from polyattn.selection import Rejected, Source, platforms
from polyattn.selection.capabilities import Capabilities
from polyattn.selection.first_result import FirstResult
from polyattn.selection.platforms import Platform, find_platform, platform_of, register_platform
from polyattn.selection.prepare import Plan, kernel_of, prepare, select_here
from polyattn.selection.registry import Available, Backend, registry
from polyattn.selection.requests import Request
from polyattn.selection.wishes import Wishes, current_wishes
from polyattn.torch import attention, explain
from polyattn.torch import plan as plan_of_call
from polyattn.tuning import Measurement, lookup

PROBLEM = Problem(batch=1, q_len=4, kv_len=4, heads=2, kv_heads=2, head_dim=8)
ASKED = Wishes(call=Request(("odd",)))
Q = torch.randn(1, 4, 2, 8)
FAULTS = [RuntimeError("boom"), SystemExit(3), ValueError("v"), ImportError("i"), OSError("o")]


@pytest.fixture
def plug_in() -> Iterator[Callable[..., Backend]]:
    """Register backends for a test, called `odd` where no name is given."""
    made = []

    def add(load: Callable[..., Any], name: str = "odd", **can: Any) -> Backend:
        declared = {
            "devices": {"cpu"}, "dtypes": {"float32", "bfloat16"}, "head_dims": (1, 64, 1),
            "lse": True, "value_dim": True, "layouts": {"BTNH", "BNTH", "packed"},
            "masks": {"Causal", "Packed", "And"}, "gqa": True, **can,
        }  # fmt: skip
        framework = declared.pop("framework", "torch")
        parts = {name: declared.pop(name, None) for name in ("extra", "configs")}
        backend = Backend(
            name, framework, Capabilities(**declared), lambda: Available("1"), load, **parts
        )
        made.append(registry.register(backend))
        return backend

    yield add
    for backend in made:
        registry.unregister(backend.name, backend.framework)


def giving(result: Callable[..., Any]) -> Callable[[], Any]:
    """Return the `load` of a backend whose kernel is `result`."""
    return lambda: lambda problem, config: result


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


@pytest.fixture
def odd_is_fastest() -> Iterator[None]:
    """Let an automatic choice take `odd` first, by a measured time."""
    here = platform_of("torch")
    key = lookup.key_for(PROBLEM, here.device_description("cpu"), here.versions())
    row = Measurement("odd", "{}", 2e-9, 1e-9, 3e-9, 9, 0.0, 1.0, True)
    lookup.table().record(key, [row])
    yield
    lookup.table().forget()


# What is asked for -------------------------------------------------------------------------------


def test_current_wishes_are_those_in_force_here() -> None:
    seen: list[Wishes] = []

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(current_wishes("reference", frozenset({"flex"})))
            return x

    layer = Layer()
    with use_backend("sdpa_math", never="flex"), set_backend(layer, "sdpa_flash"):
        layer(Q)
    (found,) = seen
    assert found.call.names == ("reference",) and found.layer == {"flex"}
    assert found.scope == Request(("sdpa_math",), ("flex",)) and found.module.names == (
        "sdpa_flash",
    )
    assert current_wishes().ordered() == ()


def test_a_platform_is_registered_by_its_front() -> None:
    torchs = platform_of("torch")
    assert find_platform("torch") is torchs and torchs.attention is attention
    assert torchs.present_device()[0] in ("cpu", "cuda")
    assert torchs.described(Q) == ((1, 4, 2, 8), "float32", "cpu")
    assert torchs.described([1]) is None
    assert find_platform("numpy") is None
    with pytest.raises(PolyattnError, match=r"'pytorch'.*Did you mean 'torch'"):
        platform_of("pytorch")


def test_a_backend_of_another_framework_is_refused_at_the_call(
    plug_in: Callable[..., Backend],
) -> None:
    plug_in(giving(lambda q, *_: q), name="only_jax", framework="jax")
    plug_in(giving(lambda q, *_: q), name="sdpa_math", framework="jax")
    with pytest.raises(Unsupported, match="got arrays of torch, takes arrays of jax"):
        attention(Q, Q, Q, backend="only_jax")
    with use_backend("only_jax"), pytest.raises(Unsupported, match="arrays of jax"):
        attention(Q, Q, Q)
    jaxs = PROBLEM.with_(framework="jax")
    plan = prepare(jaxs, Wishes(call=Request(("sdpa_math",))))
    assert plan.selection.problem == jaxs  # jax's, though torch has one of that name
    assert plan.selection.backend == "sdpa_math"
    assert explain(Q, Q, Q, backend="sdpa_math").decisions["sdpa_math"]
    with pytest.raises(Unsupported, match="got arrays of jax, takes arrays of torch"):
        select_here(jaxs, Wishes(call=Request(("flex",))))


@pytest.fixture
def jaxs_front() -> Iterator[Platform]:
    """A front for JAX in place of its own, which needs no JAX."""
    before = platforms._registered.get("jax")
    front = Platform(
        framework="jax",
        versions=lambda: "jax=0",
        device_description=lambda kind: f"{kind}:any",
        present_device=lambda: ("cpu", None),
        described=lambda x: None,
        attention=len,
    )
    register_platform(front)
    yield front
    del platforms._registered["jax"]
    if before is not None:
        platforms._registered["jax"] = before
    lookup.table().forget()


def test_measured_times_are_those_of_the_problem_s_framework(
    plug_in: Callable[..., Backend], jaxs_front: Platform
) -> None:
    for name in ("first", "sdpa_math"):
        plug_in(giving(lambda q, *_: q), name=name, framework="jax")
    jaxs = PROBLEM.with_(framework="jax")
    assert select_here(jaxs, Wishes()).source == Source.HEURISTIC
    torchs = explain(PROBLEM).backend
    key = lookup.key_for(jaxs, jaxs_front.device_description("cpu"), jaxs_front.versions())
    row = Measurement("sdpa_math", "{}", 2e-9, 1e-9, 3e-9, 9, 0.0, 1.0, True)
    lookup.table().record(key, [row])
    found = select_here(jaxs, Wishes())
    assert (found.backend, found.source) == ("sdpa_math", Source.TUNED)
    assert (explain(PROBLEM).backend, explain(PROBLEM).source) == (torchs, Source.HEURISTIC)


@pytest.mark.parametrize("name", ["odd", "flex", "of another machine"])
def test_a_measured_configuration_that_the_backend_does_not_offer_is_left_alone(
    plug_in: Callable[..., Backend], name: str
) -> None:
    told: list[Any] = []

    def load() -> Callable[..., Any]:
        return lambda problem, config: told.append(config) or (lambda q, *_: q)

    plug_in(load, configs=lambda problem: [{"tile": 8}])
    here = platform_of("torch")
    key = lookup.key_for(PROBLEM, here.device_description("cpu"), here.versions())
    rows = [
        Measurement(name, '{"bogus":1}', 2e-9, 1e-9, 3e-9, 9, 0.0, 1.0, True),
        Measurement("odd", '{"tile":8}', 4e-9, 1e-9, 5e-9, 9, 0.0, 1.0, True),
    ]
    lookup.table().record(key, rows)
    try:
        found = prepare(PROBLEM, Wishes()).selection
        assert (found.backend, found.source, found.config) == ("odd", Source.TUNED, {"tile": 8})
        assert told == [{"tile": 8}]
        lookup.table().forget()
        lookup.table().record(key, rows[:1])
        assert select_here(PROBLEM, Wishes()).source is Source.HEURISTIC
    finally:
        lookup.table().forget()


# Plugins at fault --------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["load", "prepare"])
@pytest.mark.parametrize("error", FAULTS, ids=repr)
def test_what_raises_while_it_is_loaded_is_distrusted(
    plug_in: Callable[..., Backend], part: str, error: BaseException
) -> None:
    fail = raising(error)
    plug_in(fail if part == "load" else lambda: fail)
    kind = PolyattnError if isinstance(error, SystemExit) else MissingDependency
    with pytest.raises(kind, match=f"odd.*{type(error).__name__}: {error}"):
        attention(Q, Q, Q, backend="odd")
    with pytest.raises(Unsupported, match=type(error).__name__):  # known by now
        attention(Q, Q, Q, backend="odd")


def test_a_second_import_of_the_package_says_what_to_do(plug_in: Callable[..., Backend]) -> None:
    def load() -> None:
        for _ in range(2):  # as after `del sys.modules[...]` of polyattn's modules
            library = torch.library.Library("polyattn", "FRAGMENT")
            kept.append(library)
            library.define("of_a_test(Tensor x) -> Tensor")

    kept: list[torch.library.Library] = []
    plug_in(load)
    with pytest.raises(MissingDependency, match=r"imported anew in this .*start a new process"):
        attention(Q, Q, Q, backend="odd")


@pytest.mark.parametrize("part", ["load", "prepare"])
@pytest.mark.parametrize("error", FAULTS, ids=repr)
@pytest.mark.usefixtures("odd_is_fastest")
def test_an_automatic_choice_goes_to_the_next(
    plug_in: Callable[..., Backend], part: str, error: BaseException
) -> None:
    fail = raising(error)
    plug_in(fail if part == "load" else lambda: fail)
    assert select_here(PROBLEM, Wishes()).source is Source.TUNED
    plan = prepare(PROBLEM, Wishes())
    assert plan.selection.backend == "sdpa_flash"
    assert type(error).__name__ in str(plan.selection.decisions["odd"])


@pytest.mark.parametrize(
    ("load", "said"),
    [
        (lambda: None, r"its load\(\) gave NoneType"),
        (lambda: 3, r"its load\(\) gave int"),
        (lambda: lambda problem, config: None, r"prepare\(problem, config\) gave NoneType"),
    ],
)
@pytest.mark.usefixtures("odd_is_fastest")
def test_what_gives_nothing_to_call_is_told(
    plug_in: Callable[..., Backend], load: Any, said: str
) -> None:
    odd = plug_in(load)
    with pytest.raises(PolyattnError, match=rf"request for odd \(CALL\).*{said}") as caught:
        attention(Q, Q, Q, backend="odd")
    assert not isinstance(caught.value, MissingDependency)
    registry.unregister("odd")
    registry.register(replace(odd))  # another one of the same name
    plan = prepare(PROBLEM, Wishes())
    assert plan.selection.backend == "sdpa_flash"
    assert "gave" in str(plan.selection.decisions["odd"])


def test_a_setting_that_cannot_be_met_is_not_taken_for_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if isinstance(explain(PROBLEM).decisions["native_cpu"], Rejected):
        pytest.skip("native_cpu is not built here")
    monkeypatch.setenv(
        "POLYATTN_NATIVE_ISA",
        "neon" if torch.backends.cpu.get_cpu_capability().startswith("AVX") else "avx2",
    )
    with pytest.raises(PolyattnError, match="POLYATTN_NATIVE_ISA"):
        attention(Q, Q, Q, backend="native_cpu")
    monkeypatch.delenv("POLYATTN_NATIVE_ISA")
    assert attention(Q, Q, Q, backend="native_cpu").shape == Q.shape


def test_an_extra_that_raises_breaks_no_call_that_did_not_ask(
    plug_in: Callable[..., Backend],
) -> None:
    odd = plug_in(giving(lambda q, *_: q))
    registry.unregister("odd")
    registry.register(replace(odd, extra=raising(RuntimeError("boom"))))
    assert attention(Q[:, :3], Q[:, :3], Q[:, :3]).shape == (1, 3, 2, 8)
    assert "RuntimeError: boom from its extra" in str(explain(Q, Q, Q).decisions["odd"])
    with pytest.raises(Unsupported, match="boom"):
        attention(Q, Q, Q, backend="odd")


# First results -----------------------------------------------------------------------------------

WRONG = {
    "shape": (lambda q, k, v, *_: q[:, :2], r"got \(1, 2, 2, 8\) float32 on cpu"),
    "transposed": (lambda q, k, v, *_: q.transpose(1, 2), r"got \(1, 2, 4, 8\) float32 on cpu"),
    "dtype": (lambda q, k, v, *_: q.double(), "got .* float64 on cpu"),
    "device": (lambda q, k, v, *_: q.to("meta"), "on meta"),
    "nothing": (lambda q, k, v, *_: None, "got NoneType"),
    "an array of another library": (lambda q, k, v, *_: q.numpy(), "got ndarray"),
    "a pair": (lambda q, k, v, *_: (q, q[..., 0]), "got tuple"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_result_that_cannot_be_one_does_not_reach_the_caller(
    plug_in: Callable[..., Backend], fault: str
) -> None:
    kernel, said = WRONG[fault]
    plug_in(giving(kernel))
    expected = r"from the backend 'odd', expected \(1, 4, 2, 8\) float32 on cpu"
    for _ in range(2):  # each time, as long as it is wrong
        with pytest.raises(PolyattnError, match=f"{said} {expected}"):
            attention(Q, Q, Q, backend="odd")
    with pytest.raises(PolyattnError, match=expected):
        plan_of_call(Q, Q, Q, backend="odd")(Q, Q, Q)


@pytest.mark.parametrize(
    "kernel",
    [
        lambda q, k, v, *_: q,
        lambda q, k, v, *_: (q,),
        lambda q, k, v, *_: (q, q[..., 0]),  # (B, T, N)
        lambda q, k, v, *_: (q, q[..., 0].transpose(1, 2).double()),
        lambda q, k, v, *_: (q, q[..., 0].transpose(1, 2), None),
    ],
)
def test_an_lse_that_lacks_or_does_not_fit_does_not_reach_the_caller(
    plug_in: Callable[..., Backend], kernel: Any
) -> None:
    plug_in(giving(kernel))
    said = r"expected a pair \(out, lse\): .* and \(1, 2, 4\) float32 on cpu"
    with pytest.raises(PolyattnError, match=said):
        attention(Q, Q, Q, backend="odd", return_lse=True)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_right_results_are_those_of_the_reference(
    plug_in: Callable[..., Backend], layout: str, dtype: torch.dtype
) -> None:
    from polyattn import Packed

    reference = registry["reference"]
    plug_in(reference.load, dtypes={"float32", "float64", "bfloat16"}, scale=True, strided=True)
    shape = {"BTNH": (2, 5, 4, 8), "BNTH": (2, 4, 5, 8), "packed": (10, 4, 8)}[layout]
    q = torch.randn(shape, dtype=dtype)
    v = torch.randn(*shape[:-1], 3, dtype=dtype)
    mask = Packed([0, 4, 10], [0, 4, 10]) if layout == "packed" else Causal()
    options = {"mask": mask, "layout": layout}
    for lse in (False, True):
        ours = attention(q, q, v, backend="odd", return_lse=lse, **options)
        same = attention(q, q, v, backend="reference", return_lse=lse, **options)
        for a, b in zip(ours if lse else [ours], same if lse else [same], strict=True):
            assert torch.equal(a, b)


def test_after_one_right_result_the_kernel_is_bare(plug_in: Callable[..., Backend]) -> None:
    def kernel(q: Any, k: Any, v: Any, *_: Any) -> Any:
        return q

    odd = plug_in(giving(kernel))
    plan = prepare(PROBLEM, ASKED)
    assert not plan.is_final and isinstance(plan.kernel, FirstResult)
    assert prepare(PROBLEM, ASKED).kernel is not kernel  # nothing was seen yet
    assert plan.kernel(Q, Q, Q) is Q
    again = prepare(PROBLEM, ASKED)
    assert again.is_final and again.kernel is kernel
    assert not prepare(PROBLEM.with_(lse=True), ASKED).is_final  # another plan
    registry.unregister("odd")
    registry.register(replace(odd))
    assert not prepare(PROBLEM, ASKED).is_final  # another backend of that name


def test_a_wrong_result_is_not_taken_for_a_right_one_later(plug_in: Callable[..., Backend]) -> None:
    results = [Q[:, :1], Q, Q[:, :1]]
    plug_in(giving(lambda *_: results.pop(0)))
    plan = prepare(PROBLEM, ASKED)
    with pytest.raises(PolyattnError):
        plan.kernel(Q, Q, Q)
    assert not prepare(PROBLEM, ASKED).is_final
    assert plan.kernel(Q, Q, Q) is Q
    assert prepare(PROBLEM, ASKED).is_final
    assert plan.kernel(Q, Q, Q).shape == (1, 1, 2, 8)  # once a plan, not at every call


def test_in_tree_kernels_are_bare_from_the_first_call_on() -> None:
    plan = prepare(PROBLEM, Wishes(call=Request(("reference",))))
    assert isinstance(plan, Plan) and plan.is_final
    assert callable(kernel_of(plan.selection, PROBLEM))

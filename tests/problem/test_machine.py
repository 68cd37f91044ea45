"""Facts of machines that one does not have, and what backends make of them."""

from __future__ import annotations

import pytest

from polyattn import Facts, InvalidProblem, Problem, Unsupported
from polyattn.native import instructions, module
from polyattn.problem.processor import instruction_sets
from polyattn.selection import Accepted
from polyattn.selection.capabilities import Capabilities
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import Available, Backend, Missing, Registry
from polyattn.selection.registry import registry as ours
from polyattn.selection.requests import Request
from polyattn.selection.select import select
from polyattn.selection.wishes import Wishes

PROBLEM = Problem(batch=1, q_len=1024, kv_len=1024, heads=8, kv_heads=8, head_dim=64)


@pytest.mark.parametrize(
    ("text", "device", "arch"),
    [
        ("cuda:sm_90", "cuda", "sm_90"), ("CUDA:SM_90A", "cuda", "sm_90a"),
        ("H100", "cuda", "sm_90"), ("rtx 4090", "cuda", "sm_89"), ("cuda", "cuda", None),
        ("rocm:gfx942", "rocm", "gfx942"), ("MI300X", "rocm", "gfx942"),
        ("tpu:v5e", "tpu", "v5e"), ("mps", "mps", None), ("mps:m3", "mps", "m3"),
        ("xpu:pvc", "xpu", "pvc"), ("cpu", "cpu", None),
    ],
)  # fmt: skip
def test_every_platform_can_be_named(text: str, device: str, arch: str | None) -> None:
    facts = Facts.parse(text)
    assert (facts.device, facts.arch, facts.instructions) == (device, arch, None)
    assert PROBLEM.with_(device=facts.device, arch=facts.arch).arch == arch


def test_processors_are_named_by_their_instruction_sets() -> None:
    amx = Facts.parse("cpu:amx_bf16").instructions
    assert amx is not None and {"amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "fma"} <= amx
    both = Facts.parse("cpu:sve+bf16").instructions
    assert both == {"sve", "bf16", "neon"}
    assert Facts.parse("zen4").instructions == Facts.parse("cpu:avx512_bf16").instructions
    five = Facts.parse("Zen 5")
    assert five.family == 26 and five.instructions == Facts.parse("zen4").instructions | {
        "avx_vnni"
    }
    assert Facts.parse("Sapphire Rapids").instructions > amx
    assert Facts("cpu", instructions=["avx2"]).instructions == {"avx2"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h10", "Did you mean 'h100'"), ("cuad:sm_90", "Did you mean 'cuda'"),
        ("", "expected cpu, cuda"), ("cuda:90", "expected sm_XX"), ("rocm:sm_90", "gfx942"),
        ("cpu:avx512bf16", "Did you mean 'avx512_bf16'"), ("cpu:avx2+", "instruction set ''"),
        ("tpu:sm_90", "v5e"),
    ],
)  # fmt: skip
def test_what_is_no_machine_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidProblem, match=said):
        Facts.parse(text)


def test_facts_are_checked_however_they_are_made() -> None:
    for make in (
        lambda: Facts("gpu"),
        lambda: Facts("cpu", "sm_90"),
        lambda: Facts.parse(90),
        lambda: Facts("cpu", instructions={"avx3"}),
    ):
        with pytest.raises(InvalidProblem, match="expected"):
            make()


@pytest.fixture
def registry() -> Registry:
    return Registry(in_tree=(), plugins=False)


def add(registry: Registry, name: str, framework: str = "torch", **parts: object) -> Backend:
    can = {"dtypes": {"float32"}, "head_dims": (1, 64, 1), "devices": {"cpu"}}
    declared = Capabilities(**{**can, **parts.pop("can", {})})
    made = Backend(name, framework, declared, lambda: Available("1"), lambda: None, **parts)
    return registry.register(made)


def reasons(problem: Problem, registry: Registry, name: str, facts: Facts) -> str:
    problem = problem.with_(device=facts.device, arch=facts.arch)
    try:
        return str(select(problem, Wishes(), registry, facts=facts).decisions[name])
    except Unsupported as error:
        return str(error.decisions[name])


def test_architectures_of_any_platform_are_reasons(registry: Registry) -> None:
    add(registry, "amd", can={"devices": {"rocm"}, "archs": {"gfx90a", "gfx942"}})
    add(registry, "nvidia", can={"devices": {"cuda"}, "archs": (80, 90)})
    assert "can run it" in reasons(PROBLEM, registry, "amd", Facts.parse("mi300x"))
    other = reasons(PROBLEM, registry, "amd", Facts.parse("rocm:gfx1100"))
    assert "got gfx1100, takes gfx90a or gfx942" in other
    assert "got rocm, takes cuda" in reasons(PROBLEM, registry, "nvidia", Facts.parse("mi300x"))
    assert "sm_80 to sm_90" in reasons(PROBLEM, registry, "nvidia", Facts.parse("b200"))


def test_instruction_sets_are_reasons_there_and_here(registry: Registry) -> None:
    add(registry, "tiles", can={"instructions": {"amx_bf16", "avx512f"}})
    assert "can run it" in reasons(PROBLEM, registry, "tiles", Facts.parse("cpu:amx_bf16"))
    assert "can run it" in reasons(PROBLEM, registry, "tiles", Facts.parse("cpu"))  # not known
    said = reasons(PROBLEM, registry, "tiles", Facts.parse("zen4"))
    assert "instruction sets: got none of amx_bf16, takes a processor with amx_bf16" in said
    here = instruction_sets()
    if here is None:
        pytest.skip("nothing tells this processor's instruction sets")
    add(registry, "here", can={"instructions": here})
    add(registry, "nowhere", can={"instructions": {"avx512f", "sve"}})  # x86 and Arm at once
    assert select(PROBLEM, Wishes(call=Request(("here",))), registry).backend == "here"
    with pytest.raises(Unsupported, match="instruction sets"):
        select(PROBLEM, Wishes(call=Request(("nowhere",))), registry)


def test_builds_and_packages_of_any_framework_are_reasons(registry: Registry) -> None:
    add(registry, "ours", can={"devices": {"cuda"}}, package="polyattn-x")
    add(registry, "theirs", "jax", can={"devices": {"cuda"}})
    theirs = PROBLEM.with_(framework="jax")
    cpu_torch = Facts.parse("h100", builds={"torch": "cpu"})
    said = reasons(PROBLEM, registry, "ours", cpu_torch)
    assert "got a CPU build of torch, takes a CUDA build" in said
    assert "can run it" in reasons(theirs, registry, "theirs", cpu_torch)
    said = reasons(theirs, registry, "theirs", Facts.parse("h100", builds={"jax": "tpu"}))
    assert "a TPU build of jax" in said
    for absent, fix in (("polyattn-x", "pip install polyattn-x"), ("torch", "pip install torch")):
        assert fix in reasons(PROBLEM, registry, "ours", Facts.parse("h100", {absent: None}))


def test_a_backend_foretells_its_probe(registry: Registry) -> None:
    def foretell(facts: Facts) -> Available | Missing:
        version = facts.packages.get("tiles")
        return Missing("too old", "upgrade") if version == "1.0" else Available("", "new enough")

    add(registry, "tiles", foretell=foretell)
    assert "new enough" in reasons(PROBLEM, registry, "tiles", Facts.parse("cpu"))
    assert "too old" in reasons(PROBLEM, registry, "tiles", Facts.parse("cpu", {"tiles": "1.0"}))
    add(registry, "odd", foretell=lambda facts: 1 / 0)
    assert "ZeroDivisionError" in reasons(PROBLEM, registry, "odd", Facts.parse("cpu"))


def test_native_cpu_answers_for_the_processor_it_is_told_of() -> None:
    for text, form in (("cpu:avx2", "avx2"), ("zen4", "avx512bf16"), ("graviton2", "neon")):
        found = select_here(PROBLEM, Wishes(), Facts.parse(text))
        assert form in str(found.decisions["native_cpu"])
    old = select_here(PROBLEM, Wishes(), Facts("cpu", instructions=frozenset({"avx"})))
    assert old.backend == "sdpa_flash"
    assert "vector instruction sets" in str(old.decisions["native_cpu"])
    somewhere = select_here(PROBLEM, Wishes(), Facts.parse("cpu"))
    assert isinstance(somewhere.decisions["native_cpu"], Accepted)


def test_the_rule_for_dry_runs_is_that_of_the_extension() -> None:
    here = instruction_sets()
    if here is None or isinstance(ours.probe(("torch", "native_cpu")), Missing):
        pytest.skip("no extension, or nothing tells this processor's instruction sets")
    compiled = {*module.build_info().compiled, "generic"}
    assert [f for f in instructions.forms(here) if f in compiled] == list(module.isas())


def test_nobody_in_tree_promises_a_platform_it_does_not_know() -> None:
    for text in ("mi300x", "tpu:v5e", "mps:m3", "xpu:pvc"):
        facts = Facts.parse(text)
        with pytest.raises(Unsupported) as caught:
            select_here(PROBLEM.with_(device=facts.device, arch=facts.arch), Wishes(), facts)
        assert set(caught.value.decisions) == set(ours.names("torch"))

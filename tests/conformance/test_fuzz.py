"""The hunter is hunted: planted liars are caught, lines reproduce, Ctrl-C keeps what was done."""

import itertools
import json
import shlex
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from polyattn.cli.fuzz import main
from polyattn.conformance import Case, Report, random_case, run
from polyattn.conformance.fuzz import run_case
from polyattn.conformance.inputs import build
from polyattn.conformance.shrink import shrink
from polyattn.conformance.tolerance import Yardstick, measure
from polyattn.errors import InvalidProblem, UnknownBackend
from polyattn.masks import LEAVES, Packed
from polyattn.problem import Problem
from polyattn.selection.registry import Available, Backend, registry

Spoil = Callable[[Problem, Any, tuple[Any, ...]], Any]
Plant = Callable[..., str]
_numbers = itertools.count()  # names are not used twice in a process


@pytest.fixture
def plant() -> Iterator[Plant]:
    """Register a copy of the reference whose result is spoilt, or whose declaration is."""
    planted = []

    def make(spoil: Spoil | None = None, **declared: Any) -> str:
        reference = registry["reference"]

        def load() -> Any:
            prepare = reference.load()

            def prepare_spoilt(problem: Problem, config: Any) -> Any:
                kernel = prepare(problem, config)

                def spoilt(*args: Any) -> Any:
                    result = kernel(*args)
                    return result if spoil is None else spoil(problem, result, args)

                return spoilt

            return prepare_spoilt

        name = f"planted_{next(_numbers)}"
        can = replace(reference.capabilities, **declared)
        registry.register(Backend(name, "torch", can, lambda: Available("1"), load))
        planted.append(name)
        return name

    yield make
    for name in planted:
        registry.unregister(name)


def _spoil_out(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return (change(result[0]), result[1]) if isinstance(result, tuple) else change(result)


def _kinds(report: Report, name: str) -> set[str]:
    return {failure.kind for failure in report.failures if failure.backend == name}


def test_an_honest_backend_is_left_alone(plant: Plant) -> None:
    name = plant()
    report = run(60, seed=1, backend=name)
    assert report.ok
    assert report.problems == 60
    assert report.count("right") == 60


def test_a_wrong_backend_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        causal = problem.mask is not None and "Causal" in problem.mask.kinds
        return _spoil_out(result, lambda out: out * 1.001) if causal else result

    name = plant(spoil)
    report = run(60, seed=1, backend=name)
    assert _kinds(report, name) == {"wrong"}
    assert all("Causal" in failure.spec for failure in report.failures[:5])


def test_a_wrong_lse_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        return (result[0], result[1] / 0.6931) if problem.lse else result

    assert "wrong" in _kinds(run(40, seed=2, backend=(name := plant(spoil))), name)


def test_a_gradient_that_is_lost_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        return _spoil_out(result, torch.Tensor.detach) if problem.bias_grad else result

    report = run(400, seed=3, backend=(name := plant(spoil)))
    assert _kinds(report, name) == {"wrong"}
    assert all("b" in Case.from_spec(failure.spec).grad for failure in report.failures)


def test_calls_on_codes_are_drawn_and_lies_about_them_are_caught(plant: Plant) -> None:
    rng = Random(3)
    drawn = [case for case in (random_case(rng) for _ in range(3000)) if case.quantized]
    assert 60 < len(drawn) < 150
    assert {case.quantized[0] for case in drawn if case.quantized} == {"int8", "float8_e4m3fn"}
    assert all(Case.from_spec(case.spec) == case for case in drawn)

    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        return _spoil_out(result, lambda out: out * 1.001) if problem.quantized else result

    report = run(400, seed=3, backend=(name := plant(spoil)))
    assert _kinds(report, name) == {"wrong"}
    assert all(Case.from_spec(failure.spec).quantized for failure in report.failures)
    report = run(400, seed=3, backend=(name := plant(quantized=False)))
    assert _kinds(report, name) == {"false_refusal"}
    assert all("its quantized keys alone" in failure.detail for failure in report.failures)


def test_a_backend_that_leaks_masked_values_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        return _spoil_out(result, lambda out: out + 0 * args[2].float().sum())

    report = run(60, seed=4, backend=(name := plant(spoil)))
    assert _kinds(report, name) == {"wrong"}
    assert all("NaN" in failure.detail for failure in report.failures)


def test_a_backend_that_modifies_its_inputs_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        with torch.no_grad():
            if args[0].is_contiguous():
                args[0].data.view(-1)[:1].add_(1)
        return result

    report = run(30, seed=5, backend=(name := plant(spoil)))
    assert any("modified" in failure.detail for failure in report.failures), _kinds(report, name)


def test_a_backend_that_never_gives_the_same_twice_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        jitter = 1 + torch.finfo(args[0].dtype).eps * torch.randint(0, 2, (1,))
        return _spoil_out(result, lambda out: out * jitter.to(out.dtype))

    report = run(30, seed=6, backend=(name := plant(spoil)))
    assert any("twice" in failure.detail for failure in report.failures), _kinds(report, name)


def test_a_liar_that_raises_is_a_false_acceptance(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        if problem.softcap is not None:
            raise NotImplementedError("no soft cap here")
        return result

    report = run(80, seed=7, backend=(name := plant(spoil)))
    assert _kinds(report, name) == {"false_acceptance"}
    assert "no soft cap here" in report.failures[0].detail


def test_what_is_refused_although_it_can_is_a_false_refusal(plant: Plant) -> None:
    name = plant(scale=False)
    report = run(150, seed=8, backend=name)
    assert _kinds(report, name) == {"false_refusal"}
    assert "scale" in report.failures[0].detail


def test_a_justified_refusal_is_none(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        assert problem.softcap is None
        return result

    name = plant(spoil, softcap=False)
    report = run(150, seed=9, backend=name)
    assert report.ok
    assert report.tallies[name].alone["soft cap"][0] >= 5


def test_a_run_that_tested_nothing_says_so(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    name = plant(dtypes=frozenset(), layouts=frozenset())  # it refuses everything
    assert main(["--backend", name, "--problems", "30"]) == 2
    said = capsys.readouterr()
    assert f"{name}: refused every problem" in said.out
    assert f"got no problem that {name} takes among 30" in said.err
    assert main(["--backend", name, "--problems", "30", "--json"]) == 2
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert (report["problems"], report["tested"]) == (30, 0)
    assert "got no problem" in said.err
    case = Case(seed=1).spec
    assert main(["--backend", name, "--case", case]) == 2
    assert main(["--backend", "reference", "--case", case]) == 0


def test_one_that_tested_nothing_is_named_among_others(plant: Plant) -> None:
    name = plant(dtypes=frozenset(), layouts=frozenset())
    report = run(3, seed=1)
    assert name in report.untested
    assert "reference" not in report.untested
    assert report.tested > 0


def test_a_gradient_that_is_none_is_caught(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        if not problem.grad or not args[0].requires_grad:
            return result
        return _spoil_out(result, lambda out: out.detach() + 0 * args[0].sum())

    report = run(40, seed=3, backend=(name := plant(spoil)))
    assert any("is None" in failure.detail for failure in report.failures), _kinds(report, name)


def test_the_line_of_a_failure_reproduces_it(
    plant: Plant, capsys: pytest.CaptureFixture[str]
) -> None:
    name = plant(lambda problem, result, args: _spoil_out(result, lambda out: out + 0.1))
    failure = run(3, seed=10, backend=name).failures[-1]
    words = shlex.split(failure.reproduce)
    assert words[:2] == ["polyattn", "fuzz"]
    assert main(words[2:]) == 1
    said = capsys.readouterr().out
    assert "wrong" in said
    assert main([*words[2:], "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdicts"][name]["detail"] == failure.detail


class TestCompiled:
    """What `--compiled` examines is the compiled call; eager calls of these are right."""

    def test_an_honest_backend_is_left_alone(self, plant: Plant) -> None:
        report = run(8, seed=1, backend=plant(), compiled=True)
        assert report.ok
        assert report.count("right") == 8

    def test_a_backend_that_is_wrong_only_there_is_caught(
        self, plant: Plant, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def spoil(problem: Problem, result: Any, args: Any) -> Any:
            return _spoil_out(result, lambda out: out + 0.1) if problem.compiled else result

        name = plant(spoil)
        assert run(3, seed=10, backend=name).ok
        failure = run(1, seed=10, backend=name, compiled=True).failures[-1]
        words = shlex.split(failure.reproduce)
        assert "--compiled" in words
        assert main(words[2:]) == 1
        assert "wrong" in capsys.readouterr().out

    @pytest.mark.parametrize("promised", [True, False])
    def test_isolation_of_rows_is_held_to_the_declaration(
        self, plant: Plant, promised: bool
    ) -> None:
        def spoil(problem: Problem, result: Any, args: Any) -> Any:
            return _spoil_out(result, lambda out: out + 0 * args[2].float().sum())

        name = plant(spoil, isolates_compiled=promised)
        case = Case(t=4, s=4, mask=("Causal", "top_left"), poison=True)
        assert run_case(case, name, compiled=True)[name].fails == promised
        assert run_case(case, name)[name].fails

    def test_who_cannot_be_compiled_is_not_asked(self) -> None:
        report = run(1, seed=1, compiled=True)
        assert "torch.compile" in report.absent["flex"]
        assert "flex" not in report.tallies


def test_a_case_is_made_smaller_while_it_fails() -> None:
    case = Case(t=17, s=33, n=4, k=2, mask=("and", ("Causal", "top_left"), ("PrefixLM",)), sinks=2)
    small = shrink(case, lambda c: c.sinks > 0 and c.t > 3)
    assert small == Case(t=4, s=1, h=1, v=1, layout="BNTH", sinks=2)


def test_the_same_seed_gives_the_same_problems() -> None:
    def draw() -> list[Case]:
        rng = Random(11)
        return [random_case(rng) for _ in range(200)]

    assert draw() == draw()


def test_specs_are_read_as_they_were_written() -> None:
    rng = Random(12)
    for _ in range(300):
        case = random_case(rng)
        assert Case.from_spec(case.spec) == case
        assert "\n" not in case.spec


def test_a_case_gives_the_same_arrays_each_time() -> None:
    case = Case(
        seed=13, t=9, s=7, strides="tso", mask=("Dense", "ts"), bias=("dense", "s", "own", True)
    )
    one, two = build(case), build(case)
    assert torch.equal(one.q, two.q)
    assert one.mask == two.mask
    assert one.bias == two.bias
    assert one.k.stride(-1) == 2
    assert one.q.stride() == two.q.stride()


@pytest.mark.parametrize(
    "text", ["", "7", "[1]", '{"b":"two"}', '{"dtype":"int8"}', '{"x":1}', "{"]
)
def test_a_line_that_is_no_case_is_an_error(text: str) -> None:
    with pytest.raises(InvalidProblem, match="polyattn fuzz"):
        Case.from_spec(text)


def test_an_unknown_mask_is_told_from_the_known() -> None:
    with pytest.raises(InvalidProblem, match=r"got a case with the mask 'Casual'.*'Causal'"):
        build(Case.from_spec('{"mask":["and",["Full"],["Casual","top_left"]]}'))


def test_random_cases_cover_the_ground() -> None:
    rng = Random(14)
    drawn = [random_case(rng) for _ in range(3000)]
    kinds = {word for case in drawn for word in _words(case.mask)}
    assert kinds >= {kind.__name__ for kind in LEAVES if kind is not Packed}
    assert kinds >= {"and", "or", "not", "bottom_right", "top_left"}
    assert {case.dtype for case in drawn} == {"float16", "bfloat16", "float32", "float64"}
    assert {case.layout for case in drawn} == {"BTNH", "BNTH", "packed"}
    assert {letter for case in drawn for letter in case.strides} == set("cteso")
    assert {0, 1} <= {case.t for case in drawn} & {case.s for case in drawn}
    for what in ("b", "bias", "sinks", "softcap", "scale", "lse", "poison", "deterministic"):
        assert len({getattr(case, what) for case in drawn}) > 1
    assert any(case.k < case.n for case in drawn)
    assert any(case.v != case.h for case in drawn)
    assert any("b" in case.grad for case in drawn)
    assert any("s" in case.grad for case in drawn)


def _words(tree: Any) -> Iterator[Any]:
    for part in tree or ():
        yield from _words(part) if isinstance(part, tuple) else (part,)


def test_probabilities_that_underflow_may_be_zero_and_no_others() -> None:
    """As found on AVX2, where the kernels' exponential ends at the smallest normal number."""
    exact = torch.tensor([6.1e-39], dtype=torch.float64)
    truth = Yardstick("key", exact, exact * 25, 0.1, lambda: exact.float(), terms=490)
    assert measure(torch.zeros(1), truth) is None
    larger = Yardstick("key", exact * 1e3, exact * 25e3, 0.1, lambda: exact.float() * 1e3, 490)
    assert measure(torch.zeros(1), larger) is not None


def test_some_random_cases_have_many_keys() -> None:
    rng = Random(0)
    cases = [random_case(rng) for _ in range(20_000)]
    long = [case for case in cases if case.s > 80]
    assert 200 < len(long) < 800
    assert max(case.s for case in long) > 4000 and any(case.b * case.k >= 32 for case in long)
    assert all(case.b * case.n * case.t * case.s <= 160_000 for case in long)
    assert any(case.quantized for case in long)


def test_a_failure_of_dropout_has_a_command_too(plant: Plant) -> None:
    def spoil(problem: Problem, result: Any, args: Any) -> Any:
        return _spoil_out(result, lambda out: out * 1.2) if problem.dropout_p else result

    failure = run(1, backend=(name := plant(spoil))).failures[0]
    assert failure.detail.startswith("dropout: p = 0.1 changes the mean")
    assert failure.reproduce == f"polyattn fuzz --backend {name} --problems 1"


def test_ctrl_c_keeps_what_was_done() -> None:
    def press(done: int, report: Report) -> None:
        if done == 5:
            signal.raise_signal(signal.SIGINT)

    report = run(1000, seed=15, backend="reference", progress=press)
    assert report.interrupted
    assert report.problems == 5
    assert report.count("right") == 5


def test_ctrl_c_prints_and_exits_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left = iter(range(4))

    def draw(rng: Random) -> Case:
        if next(left, None) is None:
            signal.raise_signal(signal.SIGINT)
        return random_case(rng)

    monkeypatch.setattr("polyattn.conformance.fuzz.random_case", draw)
    assert main(["--problems", "1000", "--backend", "reference"]) == 130
    assert "4 problems of 1000 (interrupted)" in capsys.readouterr().out


def test_the_command_prints_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--problems", "20", "--seed", "1", "--backend", "torch_sdpa"]) == 0
    said = capsys.readouterr().out
    assert "0 wrong, 0 false acceptances, 0 false refusals" in said
    assert "sdpa_cudnn" in said


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--problems", "12", "--seed", "1", "--backend", "reference", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == 12
    assert report["backends"]["reference"]["right"] == 12
    assert (report["wrong"], report["false_acceptance"], report["false_refusal"]) == (0, 0, 0)


@pytest.mark.parametrize(
    "argv",
    [
        ["--problems", "none"],
        ["--backend", "sdpa_flsh"],
        ["--case", "nonsense"],
        ["--problems", "²"],
        ["--time-limit", "nan"],
        ["--device", "tpu"],
        ["--device", "meta"],
        ["--device", "mps"],
        ["--device", "meta", "--case", "{}"],
    ],
    ids=["count", "backend", "case", "digit", "limit", "device", "meta", "absent", "meta case"],
)
def test_wrong_use_exits_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "got" in capsys.readouterr().err


def test_unknown_backends_are_named_with_near_matches() -> None:
    with pytest.raises(UnknownBackend, match="sdpa_flash"):
        run(1, backend="sdpa_flsh")


def test_a_time_limit_ends_the_run() -> None:
    report = run(100_000, seed=16, backend="reference", time_limit=0.2)
    assert 0 < report.problems < 100_000
    assert not report.interrupted

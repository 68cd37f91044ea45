import json

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F

from polyattn import Problem, use_backend
from polyattn import flags as knobs
from polyattn.integrations.recording import Case, Recorder
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.measure.candidates import candidates
from polyattn.measure.inputs import build
from polyattn.measure.results import TuningResult
from polyattn.measure.timing import time_interleaved
from polyattn.measure.tune import Bounds, tune
from polyattn.problem import MaskFacts
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import Available, Backend, registry
from polyattn.torch import explain
from polyattn.torch.flags import snapshot
from polyattn.tuning import digest, lookup

QUICK = Bounds(prepare_s=20.0, prepare_total_s=0.0, again=0)
P = Problem(batch=2, q_len=16, kv_len=16, heads=4, kv_heads=4, head_dim=8, layout="BNTH")


def case(**changes):
    problem = P.with_(**changes)
    return Case(problem, None, (problem.grad,) * 3, None, calls=1)


@pytest.fixture(autouse=True)
def _clean_table():
    lookup.table().forget()
    yield
    lookup.table().forget()


@pytest.fixture
def without_flex(monkeypatch):
    """Leave out FlexAttention, which compiles for ten seconds, where nothing is asked about it."""
    monkeypatch.setattr(
        "polyattn.measure.tune.candidates",
        lambda problem: [c for c in candidates(problem) if c.backend != "flex"],
    )


@pytest.fixture
def backend():
    """Register a backend for a test: ``backend(name, kernel)``."""
    made = []

    def register(name, kernel, seconds=None):
        can = Capabilities(
            devices={"cpu"},
            dtypes={"float32"},
            head_dims=(1, 64, 1),
            masks=ALL_MASKS,
            scale=True,
            strided=True,
        )
        registry.register(
            Backend(name, "torch", can, lambda: Available("1"), lambda: lambda p, c: kernel, None)
        )
        made.append(name)

    yield register
    for name in made:
        registry.unregister(name)


def stock(q, k, v, mask=None, bias=None, sinks=None):
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def test_the_fastest_right_backend_is_stored_and_chosen(without_flex):
    result = tune([case()], bounds=QUICK)
    assert not result.interrupted
    rows = lookup.table().rows()
    assert {row.backend for _, row in rows} >= {"sdpa_flash", "sdpa_math"}
    assert all(row.verified and row.repeats >= 5 for _, row in rows)
    chosen = explain(P)
    assert chosen.source == "TUNED"
    assert chosen.backend == min((row for _, row in rows), key=lambda row: row.median_s).backend
    assert result.cases[0].regret >= 1.0
    json.dumps(result.to_dict(), allow_nan=False)


def test_rows_say_under_which_flags_they_were_measured(without_flex):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        result = tune([case()], bounds=QUICK)
        in_force = snapshot()
    finally:
        torch.set_num_threads(before)
    ((name, kept),) = lookup.table().flags().items()
    assert knobs.diff(kept, in_force) == {}
    assert knobs.diff(kept, snapshot())  # the threads, at least
    assert {row.flags for _, row in lookup.table().rows()} == {name}
    assert {row.flags for row in result.classes[0].rows} == {name}
    plain = result.to_dict()
    assert set(plain["flags"]) == {name}
    assert {row["flags"] for row in plain["classes"][0]["rows"]} == {name}
    again = tune([case(head_dim=16, value_dim=16)], bounds=QUICK)
    assert len(lookup.table().flags()) == 2
    assert {row.flags for row in again.classes[0].rows} == {digest(snapshot())}


def test_a_tuned_choice_never_overrides_a_request(without_flex):
    tune([case()], bounds=QUICK)
    with use_backend("reference"):
        assert (explain(P).backend, explain(P).source) == ("reference", "SCOPE")
    assert explain(P, backend="sdpa_math").source == "CALL"
    with use_backend(never=("sdpa_flash",)):
        assert explain(P).backend != "sdpa_flash"


def test_a_fast_but_wrong_backend_is_never_chosen(backend, without_flex):
    backend("fast_but_wrong", lambda q, k, v, mask=None, bias=None, sinks=None: v.clone())
    result = tune([case()], bounds=QUICK)
    wrong = result.cases[0].of("fast_but_wrong")
    assert wrong.status == "wrong"
    assert wrong.median_s is None
    stored = [row for _, row in lookup.table().rows() if row.backend == "fast_but_wrong"]
    assert [row.verified for row in stored] == [False]
    assert explain(P).backend != "fast_but_wrong"


def test_slightly_wrong_is_wrong_and_right_is_right(backend, without_flex):
    backend("slightly_wrong", lambda q, k, v, *rest: stock(q, k, v) * (1 + 1e-4))
    backend("right_backend", stock)
    found = tune([case()], bounds=QUICK).cases[0]
    assert found.of("slightly_wrong").status == "wrong"
    assert found.of("right_backend").status == "ok"


def test_failing_and_slow_candidates_do_not_stop_the_run(backend):
    def failing(*args):
        raise RuntimeError("no such kernel")

    def endless(*args):
        while True:
            pass

    backend("failing_backend", failing)
    backend("endless_backend", endless)
    found = tune([case()], bounds=Bounds(prepare_s=1.5, prepare_total_s=0.0, again=0)).cases[0]
    assert "no such kernel" in found.of("failing_backend").note
    assert found.of("endless_backend").status == "too slow"
    assert found.chosen


def test_an_interrupt_keeps_what_is_done(without_flex):
    result = TuningResult()

    def report(done, total, what):
        if done == 1 and what:
            raise KeyboardInterrupt

    tune([case(), case(head_dim=16, value_dim=16)], bounds=QUICK, progress=report, result=result)
    assert result.interrupted
    assert len(result.classes) == 1
    assert lookup.table().rows()


@pytest.mark.parametrize(
    "changes",
    [
        {"mask": MaskFacts.parse("Causal('top_left') & Window(left=3, right=None)", "top_left")},
        {"mask": MaskFacts.parse("Padding(q=None, kv=2)", None), "lse": True},
        {
            "mask": MaskFacts.parse(
                "(Segments(q=2x16, kv=2x16) & Causal()) | PrefixLM(2)", "bottom_right"
            )
        },
        {"mask": MaskFacts.parse("BlockMap(4, 4, 1x1x4x4)", None)},
        {
            "mask": MaskFacts.parse(
                "~(LeftPadding(q=2, kv=None) & Dilated(3)) & (Chunked(8) | ~FirstKeys(2))", None
            )
        },
        {"mask": MaskFacts.parse("Dense(2x1x16x16)", None), "grad": True},
        {"bias": "DenseBias(4x16x16, float32)", "bias_grad": True, "grad": True},
        {"bias": "Alibi(4, float32)", "dtype": "bfloat16"},
        {"kv_heads": 2, "grad": True},
        {
            "layout": "packed",
            "mask": MaskFacts.parse("Packed(q=3, kv=3) & Causal()", None),
            "lse": True,
        },
        {"softcap": 5.0, "value_dim": 4},
        {"dropout_p": 0.25},
        {"sinks": 2, "scale": -0.5},
        {"compiled": True},
    ],
)
def test_every_kind_of_problem_is_rebuilt_and_verified(changes, request):
    if not ({"kv_heads", "softcap"} & {*changes}):  # two kinds with what must compile are enough
        request.getfixturevalue("without_flex")
    one = case(**changes)
    made = build(one)
    assert (made.problem.mask is None) == (one.problem.mask is None)
    found = tune([one], bounds=QUICK).cases[0]
    assert not found.skipped
    assert all(t.status in ("ok", "too slow") for t in found.timed), found.timed
    assert any(t.verified and t.median_s for t in found.timed)


def test_large_problems_are_checked_on_some_rows():
    big = case(q_len=3000, kv_len=3000, heads=2, kv_heads=2, grad=True)
    from polyattn.measure.verify import Truth

    truth = Truth(build(big))
    assert 16 <= len(truth.rows) < 3000


def test_the_record_of_a_program_tunes_with_its_real_mask(without_flex):
    recorder = Recorder()
    q = torch.randn(2, 4, 16, 8)
    mask = torch.rand(2, 1, 16, 16) < 0.5
    with route_sdpa(recorder):
        F.scaled_dot_product_attention(q, q, q, mask)
    one = recorder.record().cases[0]
    assert torch.equal(build(one).mask.mask, mask)
    assert tune([one], bounds=QUICK).cases[0].source == "TUNED"


def test_interleaved_times_tell_fast_from_slow():
    a = torch.randn(64, 64)
    b = torch.randn(256, 256)
    times = time_interleaved({"a": lambda: a @ a, "b": lambda: b @ b}, lambda: None, rounds=5)
    assert times["a"].median < times["b"].median
    assert len(times["a"].seconds) == 5


@pytest.fixture
def short_compilation():
    """Keep XLA's compiling short where it is most of a test's time and none of its subject."""
    jax = pytest.importorskip("jax")
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
def test_problems_of_jax_are_tuned_with_backends_of_jax(short_compilation):
    from polyattn.jax import explain as explain_in_jax

    mask = MaskFacts.parse("Causal() & Padding(q=None, kv=2)", "bottom_right")
    bias = "DenseBias(4x16x16, float32)"
    plain = P.with_(framework="jax", layout="BTNH", kv_heads=2)
    problems = [
        plain.with_(lse=True, mask=mask, softcap=2.0, dtype="bfloat16"),
        plain.with_(bias=bias, bias_grad=True, grad=True, sinks=1, layout="BNTH"),
    ]
    patient = Bounds(prepare_s=600.0, prepare_total_s=1e6, call_s=600.0, again=0, rounds=1)
    cases = [Case(p, None, (p.grad,) * 3, None, calls=1) for p in problems]
    result = tune(cases, bounds=patient)
    assert [one.skipped for one in result.cases] == [""] * len(problems)
    for problem, one in zip(problems, result.cases, strict=True):
        names = {timed.backend for timed in one.timed}
        assert names <= {*registry.names("jax")} and "jax_blockwise" in names
        assert all(t.verified for t in one.timed if t.status == "ok"), one.timed
        chosen = explain_in_jax(problem)
        assert chosen.source == "TUNED" and chosen.backend in names
        assert explain(problem.with_(framework="torch")).source != "TUNED"
    json.dumps(result.to_dict(), allow_nan=False)


def test_a_problem_of_jax_that_cannot_be_had_here_is_passed_over_by_name():
    pytest.importorskip("jax")
    for changes, message in (
        ({"device": "tpu", "arch": "v5e"}, "on tpu"), ({"dtype": "float64"}, "float64"),
    ):  # fmt: skip
        result = tune([case(framework="jax", layout="BTNH", **changes)], bounds=QUICK)
        assert message in result.cases[0].skipped

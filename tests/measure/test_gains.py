"""What a recorded program would take with stock torch: the same calls, right first, then timed."""

from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F

from polyattn import Alibi, Causal, Padding, Problem, TuningError, Window
from polyattn.integrations.program.asked import Case, Process, Ran
from polyattn.integrations.recording import Recorder
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.measure.gains import gains_of, machine
from polyattn.measure.inputs import build
from polyattn.measure.stock_calls import as_recorded, as_stock
from polyattn.measure.verify import Truth
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import Available, Backend, registry
from polyattn.torch import attention


def ran(backend="sdpa_math", process=0):
    return Ran(backend, "1", "HEURISTIC", "why", None, process)


def case(calls=2, backend="sdpa_math", **changes):
    problem = Problem(batch=2, q_len=16, kv_len=16, heads=4, kv_heads=4, head_dim=8, layout="BNTH")
    on = Counter({ran(backend): calls})
    return Case(problem.with_(**changes), None, (False,) * 3, None, calls, on)


def sdpa(q, k, v, **options):
    F.scaled_dot_product_attention(q, k, v, **options)


def asked(*calls):
    """Record what these calls ask, each a function of query, key and value."""
    recorder = Recorder()
    q = torch.randn(2, 4, 16, 8)
    k = torch.randn(2, 4, 24, 8)
    with route_sdpa(recorder):
        for call in calls:
            call(q, k, torch.randn(2, 4, 24, 8))
    return recorder.record().cases


CALLS = {
    "causal": lambda q, k, v: sdpa(q, k, v, is_causal=True),
    "boolean": lambda q, k, v: sdpa(q, k, v, attn_mask=torch.rand(2, 1, 16, 24) > 0.3),
    "additive": lambda q, k, v: sdpa(q, k, v, attn_mask=torch.randn(4, 16, 24)),
    "grouped": lambda q, k, v: sdpa(q, k[:, :2], v[:, :2], enable_gqa=True),
    "scaled": lambda q, k, v: sdpa(q, k, v, scale=0.5),
    "dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=0.1),
    "training": lambda q, k, v: sdpa(q.requires_grad_(), k.requires_grad_(), v),
    "half": lambda q, k, v: sdpa(*(x.bfloat16() for x in (q, k, v))),
    "last rows": lambda q, k, v: attention(q, k, v, mask=Causal(), layout="BNTH"),
    "square": lambda q, k, v: attention(k, k, v, mask=Causal(), layout="BNTH"),
    "window": lambda q, k, v: attention(
        *(x.transpose(1, 2) for x in (q, k, v)), mask=Causal() & Window(left=3)
    ),
    "padding": lambda q, k, v: attention(
        q, k, v, mask=Padding(kv_lengths=torch.tensor([5, 24])), layout="BNTH"
    ),
    "slopes": lambda q, k, v: attention(
        q, k, v, mask=Causal(), bias=Alibi(torch.rand(4)), layout="BNTH"
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_both_ways_are_the_recorded_call(name):
    (recorded,) = asked(CALLS[name])
    inputs = build(recorded)
    truth = Truth(inputs)
    for way in (as_recorded, as_stock):
        with torch.set_grad_enabled(inputs.trains):
            out = way(inputs)(0.0)
        found = truth.check({"out": out.detach()})
        assert found.verified, (way, found)


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"softcap": 5.0}, "soft caps"), ({"sinks": 1}, "sinks"), ({"lse": True}, "log-sum-exp")],
)
def test_what_torch_has_no_call_for_is_said(changes, what):
    with pytest.raises(TuningError, match=what):
        as_stock(build(case(**changes)))
    (gain,) = gains_of([case(**changes, backend="reference")], [], limit_s=60)
    assert what in gain.note
    assert gain.seconds == ()


def test_the_most_called_case_of_each_class_is_timed_the_most_work_first():
    cases = [case(1), case(5, q_len=15), case(4, q_len=64, kv_len=64), case(3, grad=True)]
    seen = []
    found = list(gains_of(cases, [], limit_s=600, progress=lambda *said: seen.append(said)))
    assert [gain.case for gain in found] == [2, 3, 1]
    for gain in found:
        assert gain.note == ""
        assert len(gain.seconds) == len(gain.stock_seconds) >= 3
        assert min(gain.seconds + gain.stock_seconds) > 0
        assert gain.threads == torch.get_num_threads()
    assert seen[0][:2] == (0, 3)
    assert seen[-1] == (3, 3, "")


def test_with_the_threads_of_the_process_that_asked():
    before = torch.get_num_threads()
    one = case()
    one.ran = Counter({ran(process=1): 2})
    processes = [Process("a", "a", 1, 0, threads=1), Process("b", "b", 2, 0, threads=3)]
    (gain,) = gains_of([one], processes, limit_s=600)
    assert gain.threads == 3
    assert torch.get_num_threads() == before


def test_what_is_not_measured_has_its_reason():
    late = case(q_len=7)
    cases = {
        "there is nothing": case(q_len=0),
        "no sizes are known": case(compiled=True),
        "cuda": case(device="cuda"),
        "not_there": case(backend="not_there"),
        "paged": replace(late, problem=late.problem.with_(paged=16)),
    }
    for said, one in cases.items():
        if said == "cuda" and torch.cuda.is_available():
            continue
        (gain,) = gains_of([one], [], limit_s=60)
        assert said in gain.note or said == "paged", (said, gain)
        assert gain.note.startswith("not measured")
        assert gain.seconds == ()
    (gain,) = gains_of([late], [], limit_s=0)
    assert "0 s were used up" in gain.note


def test_a_wrong_result_is_never_timed():
    can = Capabilities(
        devices={"cpu"}, dtypes={"float32"}, head_dims=(1, 64, 1), masks=ALL_MASKS, strided=True
    )

    def kernel(q, k, v, mask=None, bias=None, sinks=None):
        return v.clone()

    made = Backend(
        "wrong_one", "torch", can, lambda: Available("1"), lambda: lambda p, c: kernel, None
    )
    registry.register(made)
    try:
        (gain,) = gains_of([case(backend="wrong_one")], [], limit_s=60)
    finally:
        registry.unregister("wrong_one")
    assert gain.note.startswith("WRONG: ")
    assert gain.seconds == ()


def test_the_machine_is_described():
    assert f"torch={torch.__version__}" in machine()

"""The real kernels tried on this machine: that nothing of the caller's is touched, and when not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from polyattn.native import forms
from polyattn.selection.evidence import KINDS
from polyattn.selection.evidence.problem_kinds import DTYPES, UNCALIBRATED, kind_of
from polyattn.selection.registry import Available, registry
from polyattn.torch.calibration_problems import TorchProber
from polyattn.torch.flags import snapshot

PROBER = TorchProber()
pytestmark = pytest.mark.skipif(
    not isinstance(registry.probe(("torch", "native_cpu")), Available),
    reason="native_cpu is not built here",
)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in (*UNCALIBRATED, "small train")]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_probe_is_of_its_kind_and_both_kernels_agree(dtype: str, kind: str) -> None:
    with PROBER.quiet():
        probe = PROBER.probe(dtype, kind)
        probe.native()
        probe.theirs()
    assert kind_of(probe.problem) == kind and probe.problem.dtype == dtype
    assert 0 <= probe.error <= probe.tolerance


def test_this_machine_is_told_with_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    here = PROBER.machine()
    assert here.threads == torch.get_num_threads() and torch.__version__.startswith(here.torch)
    assert here.isa in ("avx2", "avx512", "avx512bf16", "neon")
    assert here.bfloat16 == forms.for_bfloat16().name
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "generic")
    assert PROBER.machine().isa == "generic"
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "neon" if here.isa != "neon" else "avx2")
    assert PROBER.machine().isa is None  # the call says what is wrong with it


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_of_the_caller_s_state_is_touched(inference: bool) -> None:
    torch.manual_seed(3)
    with torch.inference_mode(inference), torch.autocast("cpu", dtype=torch.bfloat16):
        before = snapshot(), torch.get_rng_state(), torch.is_grad_enabled()
        with PROBER.quiet():
            for kind in ("dense", "train"):
                PROBER.probe("float32", kind).native()
        after = snapshot(), torch.get_rng_state(), torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled() is inference
    assert before[0] == after[0] and before[2] is after[2]
    assert torch.equal(before[1], after[1])


class Told(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def in_a_backward_pass(ask: Callable[[], None]) -> None:
    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            ask()
            return grad

    Asked.apply(torch.ones(2, requires_grad=True)).sum().backward()


def in_vmap(ask: Callable[[], None]) -> None:
    torch.func.vmap(lambda x: (ask(), x)[1])(torch.ones(2))


def in_a_trace(ask: Callable[[], None]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    make_fx(lambda x: (ask(), x + 1)[1])(torch.ones(2))


def under_a_mode(ask: Callable[[], None]) -> None:
    with Told():
        ask()


def under_hooks(ask: Callable[[], None]) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        ask()


def under_forward_mode(ask: Callable[[], None]) -> None:
    with torch.autograd.forward_ad.dual_level():
        ask()


@pytest.mark.parametrize(
    "within",
    [in_a_backward_pass, in_vmap, in_a_trace, under_a_mode, under_hooks, under_forward_mode],
)
def test_nothing_is_tried_in_the_middle_of_something(within: Callable[[Any], None]) -> None:
    said: list[str | None] = []
    within(lambda: said.append(PROBER.refusal()))
    assert said and said[0] is not None
    assert PROBER.refusal() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="nothing forks here")
def test_nothing_is_tried_in_a_forked_child(tmp_path: Path) -> None:
    code = """
    import os, torch
    from polyattn.torch.calibration_problems import TorchProber
    torch.randn(512, 512) @ torch.randn(512, 512)
    child = os.fork()
    if child == 0:  # where torch would wait for threads that stayed behind, for ever
        os._exit(0 if TorchProber().refusal() else 1)
    print(os.waitpid(child, 0)[1], TorchProber().refusal())
    """
    assert run(code, tmp_path).strip() == "0 None"


def run(code: str, cache: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "POLYATTN_CACHE_DIR": str(cache),
            "POLYATTN_CALIBRATION": "on",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return done.stdout


CALL = """
import json, torch
from polyattn import record_selections
from polyattn.torch import attention, explain
torch.manual_seed(5)
q = torch.randn(1, 512, 8, 64)
state = torch.get_rng_state()
with record_selections() as ran:
    out = attention(q, q, q)
assert torch.equal(state, torch.get_rng_state())
assert explain(q, q, q).backend == ran[0].backend or "not calibrated" in ran[0].reason
print(ran[0].backend, "|", ran[0].reason)
"""


def expected(said: str) -> bool:
    """Whether a process has said what it may: what was measured, a record, or that it was busy."""
    backend, _, reason = said.strip().partition(" | ")
    measured = "measured here (calibration)" in reason or " by " in reason
    return backend in ("native_cpu", "sdpa_flash") and (measured or "not calibrated" in reason)


def test_a_process_calibrates_and_the_next_one_reads(tmp_path: Path) -> None:
    first = run(CALL, tmp_path)
    assert expected(first)
    if "measured here" in first and (tmp_path / "tuning.sqlite3").exists():
        assert run(CALL, tmp_path) == first


def test_two_processes_at_once(tmp_path: Path) -> None:
    made = [
        subprocess.Popen(
            [sys.executable, "-c", CALL],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "POLYATTN_CACHE_DIR": str(tmp_path), "POLYATTN_CALIBRATION": "on"},
        )
        for _ in range(2)
    ]
    for one in made:
        out, err = one.communicate(timeout=300)
        assert one.returncode == 0 and err == "" and expected(out), err


def test_switched_off_a_process_makes_no_table(tmp_path: Path) -> None:
    said = run(CALL, tmp_path, POLYATTN_CALIBRATION="off")
    assert "calibration" not in said and list(tmp_path.iterdir()) == []


def test_compiled_code_never_waits_for_it(tmp_path: Path) -> None:
    code = """
    import torch
    from polyattn.selection.evidence import calibration
    from polyattn.torch import attention
    q = torch.randn(1, 512, 8, 64)
    tried = []
    real = calibration._calibrated
    calibration._calibrated = lambda *a: tried.append(a) or real(*a)
    torch.compile(lambda q: attention(q, q, q), backend="eager", fullgraph=True)(q)
    assert not tried
    attention(q, q, q)
    print(len(tried))
    """
    assert run(code, tmp_path).strip() in ("0", "1")

"""torch's own switches (`sdpa_kernel`, `enable_*_sdp`) around polyattn's calls: obeyed, or refused.

They restrict what is chosen by itself, as they do for torch's own function; requests to polyattn
outrank them; where they leave nothing that can do the call, that is an error that names them. What
torch's function has no words for they cannot mean, as long as its math path is on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyattn import Causal, Unsupported, record_selections, set_backend, use_backend
from polyattn.integrations.fastvideo.selector import global_force_attn_backend_context_manager
from polyattn.torch import attention, explain
from polyattn.torch import scaled_dot_product_attention as drop_in

Q = torch.randn(1, 2, 8, 16)
FLASH, MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH


def ran_on(call: Callable[..., object] = attention, **options: object) -> str:
    with record_selections() as ran:
        call(Q, Q, Q, **options)
    return ran[0].backend


def bnth(*tensors: torch.Tensor, **options: object) -> object:
    return attention(*tensors, layout="BNTH", **options)


@pytest.mark.parametrize("call", [attention, bnth, drop_in])
def test_a_scope_restricts_the_choice_and_ends(call: Callable[..., object]) -> None:
    free = ran_on(call)
    for _ in range(3):  # what was chosen before is remembered, and not mixed up
        with sdpa_kernel(MATH):
            assert [ran_on(call), ran_on(call)] == ["sdpa_math", "sdpa_math"]
        with sdpa_kernel(FLASH):
            assert ran_on(call) == "sdpa_flash"
        assert ran_on(call) == free


@pytest.mark.parametrize("set_priority", [False, True])
@pytest.mark.parametrize("order", [[FLASH, MATH], [MATH, FLASH]])
def test_a_list_leaves_those_and_no_others(order: list[SDPBackend], set_priority: bool) -> None:
    with sdpa_kernel(order, set_priority=set_priority):
        assert ran_on() == ran_on(drop_in) in ("sdpa_flash", "sdpa_math")


def test_all_of_them_is_no_restriction() -> None:
    # a soft cap is what no kernel of torch takes
    free = ran_on(softcap=20.0)
    every = [FLASH, MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(every):
        assert ran_on(softcap=20.0) == free


def test_switches_set_by_hand_are_the_same() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert ran_on() not in ("sdpa_flash", "native_cpu", "flex", "reference")
        picked = explain(Q, Q, Q)
        assert "sdpa_flash" in str(picked) and "torch.backends.cuda" in str(picked)
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert ran_on() == "sdpa_flash"


def test_where_the_switches_leave_nothing_the_call_is_refused_and_they_are_named() -> None:
    with sdpa_kernel(FLASH), pytest.raises(Unsupported, match="sdpa_kernel"):
        attention(Q, Q, Q, softcap=20.0)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), pytest.raises(Unsupported, match="sdpa_kernel"):
        attention(Q, Q, Q)


@pytest.mark.parametrize("options", [{"softcap": 20.0}, {"softcap": 20.0, "return_lse": True}])
def test_a_call_that_is_none_of_torchs_runs_where_the_math_path_is_left(
    options: dict[str, object],
) -> None:
    free = ran_on(**options)
    with sdpa_kernel(MATH):
        assert ran_on(**options) == "reference"
        written_out = attention(Q, Q, Q, **options)
    with sdpa_kernel([FLASH, SDPBackend.EFFICIENT_ATTENTION, MATH]):
        assert ran_on(**options) == free
        torch.testing.assert_close(attention(Q, Q, Q, **options), written_out)
    with sdpa_kernel([FLASH, MATH]):
        assert ran_on(**options) == free
    with sdpa_kernel([FLASH, SDPBackend.EFFICIENT_ATTENTION]), pytest.raises(Unsupported):
        attention(Q, Q, Q, **options)


@pytest.mark.parametrize("backend", ["sdpa_flash", "reference"])
def test_requests_outrank_the_switches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer()
    with sdpa_kernel(MATH):
        assert ran_on(backend=backend) == backend
        with use_backend(backend):
            assert ran_on() == ran_on(drop_in) == backend
        with global_force_attn_backend_context_manager(backend):
            assert ran_on() == backend
        with set_backend(layer, backend):
            assert layer() == backend
        monkeypatch.setenv("POLYATTN_BACKEND", backend)
        assert ran_on() == backend
        monkeypatch.delenv("POLYATTN_BACKEND")
        assert ran_on() == "sdpa_math"


class Layer(torch.nn.Module):
    def forward(self) -> str:
        return ran_on()


def test_a_fallback_stays_within_the_switches() -> None:
    with (
        sdpa_kernel(MATH),
        use_backend("sdpa_cudnn", on_unsupported="fallback"),
        record_selections() as ran,
    ):
        attention(Q, Q, Q)
    assert ran[0].backend == "sdpa_math" and ran[0].fallback


def test_threads_see_them_as_they_are_torchs_for_the_whole_process() -> None:
    found: list[str] = []
    with sdpa_kernel(MATH):
        thread = threading.Thread(target=lambda: found.append(ran_on()))
        thread.start()
        thread.join()
    assert found == ["sdpa_math"]


def test_compiled_calls_are_restricted_by_what_stands_when_they_are_traced() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q, mask=Causal())

    torch.compiler.reset()
    with sdpa_kernel(MATH), record_selections() as ran:
        found = torch.compile(call, backend="eager", fullgraph=True)(Q)
    assert [one.backend for one in ran] == ["sdpa_math"]
    torch.testing.assert_close(found, call(Q))

    def scoped(q: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(MATH):
            return call(q)

    torch.compiler.reset()
    with record_selections() as ran:
        torch.compile(scoped, backend="eager", fullgraph=True)(Q)
    assert [one.backend for one in ran] == ["sdpa_math"]


def test_results_are_those_of_the_kernel_that_was_left() -> None:
    with sdpa_kernel(MATH):
        ours, stock = (
            attention(Q, Q, Q, layout="BNTH"),
            torch.nn.functional.scaled_dot_product_attention(Q, Q, Q),
        )
    assert torch.equal(ours, stock)

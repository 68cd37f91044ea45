"""Backends by torch's SDPBackend, wherever a name is accepted, eager and compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from polyattn import UnknownBackend, record_selections, set_backend, use_backend
from polyattn.integrations.fastvideo.selector import (
    AttentionBackendEnum,
    get_attn_backend,
    get_global_forced_attn_backend,
    global_force_attn_backend_context_manager,
)
from polyattn.selection.registry import registry
from polyattn.torch import attention, explain

Q = torch.randn(1, 8, 2, 16)
MEMBERS = {
    SDPBackend.MATH: "sdpa_math",
    SDPBackend.FLASH_ATTENTION: "sdpa_flash",
    SDPBackend.EFFICIENT_ATTENTION: "sdpa_efficient",
    SDPBackend.CUDNN_ATTENTION: "sdpa_cudnn",
}
NO_KERNEL = [SDPBackend.ERROR, SDPBackend.OVERRIDEABLE]


def test_every_member_of_torch_is_known() -> None:
    assert {*MEMBERS, *NO_KERNEL} == set(SDPBackend.__members__.values())


@pytest.mark.parametrize("member", MEMBERS)
def test_members_name_backends(member: SDPBackend) -> None:
    name = MEMBERS[member]
    assert registry.expand(member, asked_by="test") == (name,)
    assert registry.known(member, asked_by="test") == name
    with use_backend(member):
        assert use_backend.current().names == (name,)
    with use_backend([member, "reference"]):
        assert use_backend.current().names == (name, "reference")
    with use_backend(never=member):
        assert use_backend.current().never == (name,)
    with global_force_attn_backend_context_manager(member):  # type: ignore[arg-type]
        assert get_global_forced_attn_backend() is AttentionBackendEnum(name)


def test_members_in_a_call_a_policy_and_a_layer() -> None:
    math, flash = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION
    assert explain(Q, Q, Q, backend=math).backend == "sdpa_math"
    assert explain(Q, Q, Q, supported_attention_backends=[math]).backend == "sdpa_math"
    assert get_attn_backend(64, torch.float32, [math]).get_name() == "SDPA_MATH"
    assert get_attn_backend(64, torch.float32, requested=math).get_name() == "SDPA_MATH"
    chosen = get_attn_backend(64, torch.float32, default_backend=flash)
    assert chosen.get_name() == "SDPA_FLASH"

    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = attention(x, x, x)
            return out

    model = Block()
    with set_backend(model, {"": math}), record_selections() as ran:  # type: ignore[dict-item]
        model(Q)
    with record_selections() as called:
        attention(Q, Q, Q, backend=math)
        attention(Q, Q, Q, backend=[math, flash])
    assert [s.backend for s in (*ran, *called)] == ["sdpa_math"] * 3


@pytest.mark.parametrize("member", NO_KERNEL)
def test_members_that_name_no_kernel_are_refused(member: SDPBackend) -> None:
    for ask in (
        lambda: use_backend(member),
        lambda: attention(Q, Q, Q, backend=member),
        lambda: get_attn_backend(64, torch.float32, [member, SDPBackend.MATH]),
    ):
        with pytest.raises(UnknownBackend, match=f"{member.name}.*names no kernel.*SDPBackend.M"):
            ask()


def _in_a_scope(q: torch.Tensor) -> Any:
    with use_backend(SDPBackend.MATH):
        return attention(q, q, q)


def _in_two_scopes(q: torch.Tensor) -> Any:
    flash = SDPBackend.FLASH_ATTENTION
    with use_backend(flash, SDPBackend.MATH), use_backend(never=flash):
        return attention(q, q, q)


def _by_call(q: torch.Tensor) -> Any:
    return attention(q, q, q, backend=SDPBackend.MATH)


@pytest.mark.parametrize("program", [_in_a_scope, _in_two_scopes, _by_call])
def test_members_in_compiled_code(program: Callable[[torch.Tensor], Any]) -> None:
    compiled = torch.compile(program, fullgraph=True, backend="eager")
    with record_selections() as ran:
        out = compiled(Q)
    assert [s.backend for s in ran] == ["sdpa_math"]
    torch.testing.assert_close(out, attention(Q, Q, Q))


def test_compiled_code_sees_members_around_it() -> None:
    compiled = torch.compile(lambda q: attention(q, q, q), fullgraph=True, backend="eager")
    with record_selections() as ran:
        for member in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
            with use_backend(member):
                compiled(Q)
    assert [s.backend for s in ran] == ["sdpa_math", "sdpa_flash", "sdpa_math"]


def test_the_core_spells_without_torch() -> None:
    program = (
        "import sys\nfrom polyattn import use_backend\n"
        "from polyattn.integrations.fastvideo.selector import AttentionBackendEnum as E\n"
        "with use_backend(E.TORCH_SDPA): print(*use_backend.current().names)\n"
        "assert 'torch' not in sys.modules\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert "sdpa_math" in ran.stdout.split()

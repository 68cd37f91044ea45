"""Backward and activation checkpointing use the forward's choice."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from polyattn import record_selections, set_backend, use_backend
from polyattn.integrations.fastvideo import selector
from polyattn.torch import attention

BOTH = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


def q() -> torch.Tensor:
    return torch.randn(1, 8, 2, 16, requires_grad=True)


def two_calls(x: torch.Tensor) -> torch.Tensor:
    return attention(attention(x, x, x), x, x)


def backends(run: Callable[[], object]) -> list[str]:
    with record_selections() as ran:
        run()
    return [r.backend for r in ran]


@BOTH
def test_forward_in_a_scope_backward_outside(reentrant: bool) -> None:
    x = q()
    with use_backend("sdpa_math"):
        out = checkpoint(two_calls, x, use_reentrant=reentrant)
    assert backends(out.sum().backward) == ["sdpa_math", "sdpa_math"]


@BOTH
def test_forward_outside_backward_in_a_scope(reentrant: bool) -> None:
    x = q()
    with use_backend("reference"):
        attention(x, x, x)
    out = checkpoint(two_calls, x, use_reentrant=reentrant)

    def backward() -> None:
        with use_backend("sdpa_math"):
            out.sum().backward()

    assert backends(backward) == ["sdpa_flash", "sdpa_flash"]


@BOTH
def test_forward_forced_backward_not(reentrant: bool) -> None:
    x = q()
    with selector.global_force_attn_backend_context_manager("sdpa_math"):
        out = checkpoint(two_calls, x, use_reentrant=reentrant)
    assert backends(out.sum().backward) == ["sdpa_math", "sdpa_math"]


@BOTH
def test_forward_not_forced_backward_forced(reentrant: bool) -> None:
    x = q()
    out = checkpoint(two_calls, x, use_reentrant=reentrant)

    def backward() -> None:
        with selector.global_force_attn_backend_context_manager("reference"):
            out.sum().backward()

    assert backends(backward) == ["sdpa_flash", "sdpa_flash"]


@BOTH
def test_scopes_inside_the_region_are_entered_again(reentrant: bool) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        x = attention(x, x, x)
        with use_backend("reference"):
            return attention(x, x, x)

    x = q()
    with use_backend("sdpa_math"):
        out = checkpoint(region, x, use_reentrant=reentrant)
    assert backends(out.sum().backward) == ["sdpa_math", "reference"]


@BOTH
def test_each_region_keeps_its_own_choice_and_backward_may_run_twice(reentrant: bool) -> None:
    x = q()
    with use_backend("sdpa_math"):
        y = checkpoint(lambda x: attention(x, x, x), x, use_reentrant=reentrant)
    with use_backend("reference"):
        out = checkpoint(lambda x: attention(x, x, x), y, use_reentrant=reentrant).sum()
    assert backends(lambda: out.backward(retain_graph=True)) == ["reference", "sdpa_math"]
    if not reentrant:
        assert backends(out.backward) == ["reference", "sdpa_math"]


@BOTH
def test_nested_regions(reentrant: bool) -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return attention(x, x, x)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(inner, attention(x, x, x), use_reentrant=reentrant) * 2

    x = q()
    with use_backend("sdpa_math"):
        out = checkpoint(outer, x, use_reentrant=reentrant)
    found = backends(out.sum().backward)
    assert set(found) == {"sdpa_math"} and len(found) >= 2
    assert x.grad is not None


@BOTH
def test_module_policy_outside_the_region(reentrant: bool) -> None:
    class Block(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(two_calls, x, use_reentrant=reentrant)

    block, x = Block(), q()
    with set_backend(block, "sdpa_math"):
        out = block(x)
    assert backends(out.sum().backward) == ["sdpa_math", "sdpa_math"]


@BOTH
def test_backward_in_another_thread(reentrant: bool) -> None:
    x = q()
    with use_backend("sdpa_math"):
        out = checkpoint(two_calls, x, use_reentrant=reentrant).sum()
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(backends(out.backward)))
    thread.start()
    thread.join()
    assert found == ["sdpa_math", "sdpa_math"]


@BOTH
def test_gradients_are_those_without_checkpointing(reentrant: bool) -> None:
    x = q()
    with use_backend("sdpa_math"):
        (expected,) = torch.autograd.grad(two_calls(x).square().sum(), x)
        out = checkpoint(two_calls, x, use_reentrant=reentrant).square().sum()
    with use_backend("sdpa_flash"):
        out.backward()
    assert torch.equal(x.grad, expected)


@BOTH
@pytest.mark.parametrize("backend", ["sdpa_flash", "flex", "reference"])
def test_gradients_through_the_lse_survive_recomputation(backend: str, reentrant: bool) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        out, lse = attention(x, x, x, return_lse=True)
        return out.sum() + lse.square().sum()

    x = q()
    with use_backend(backend):
        (expected,) = torch.autograd.grad(region(x), x)
        out = checkpoint(region, x, use_reentrant=reentrant)
    found = backends(out.backward)
    assert found == [backend]
    torch.testing.assert_close(x.grad, expected)


def test_checkpoint_sequential() -> None:
    x = q()
    parts = [lambda x: attention(x, x, x) for _ in range(4)]
    with use_backend("sdpa_math"):
        out = checkpoint_sequential(parts, 2, x, use_reentrant=False)
    found = backends(out.sum().backward)
    assert set(found) == {"sdpa_math"}


def test_plain_backward_runs_the_kernel_of_the_forward() -> None:
    x = q()
    with use_backend("sdpa_math"):
        out = attention(x, x, x)
    names = set()
    todo = [out.grad_fn]
    while todo:
        node = todo.pop()
        names.add(node.name())
        todo += [n for n, _ in node.next_functions if n is not None]
    assert not any("Flash" in name for name in names)
    with use_backend("sdpa_flash"):
        out.sum().backward()


@BOTH
def test_forcing_for_the_first_time_between_forward_and_backward(reentrant: bool) -> None:
    """In a process of its own: nothing was ever asked for when the forward pass ran."""
    code = f"""
import torch
from torch.utils.checkpoint import checkpoint
from polyattn import record_selections, selector
from polyattn.torch import attention
x = torch.randn(1, 8, 2, 16, requires_grad=True)
out = checkpoint(lambda x: attention(x, x, x), x, use_reentrant={reentrant})
with selector.global_force_attn_backend_context_manager("sdpa_math"), record_selections() as ran:
    out.sum().backward()
print([r.backend for r in ran])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['sdpa_flash']"

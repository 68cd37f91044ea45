"""diffusers' ring and Ulysses around polyattn's kernels, on some ranks, forward and backward."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("diffusers")

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyattn import Unsupported, record_selections, set_backend, use_backend
from polyattn.integrations.diffusers import context_parallel
from polyattn.integrations.diffusers.context_parallel import attend_over_ranks
from polyattn.torch import attention
from tests.integrations.diffusers.context_parallel_ranks import whole

RANKS = Path(__file__).with_name("context_parallel_ranks.py")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "world"), [("ring", 2), ("ring", 3), ("ulysses", 3)])
def test_ranks_compute_what_one_process_does(kind: str, world: int, tmp_path: Path) -> None:
    port, files = _free_port(), [tmp_path / f"{rank}.pt" for rank in range(world)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), str(world), str(port), kind, str(file)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank, file in enumerate(files)
    ]  # fmt: skip
    told = []
    try:
        told = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), told
    parts = [torch.load(file, weights_only=True) for file in files]
    *inputs, grad = whole()
    arrays = [x.double().requires_grad_() for x in inputs]
    truth = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in arrays)
    ).transpose(1, 2)
    truth.backward(grad.double())
    for number, want in enumerate([truth.detach(), *(x.grad for x in arrays)]):
        got = torch.cat([part[number] for part in parts], 1)
        assert want is not None
        torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def _over(ring: int = 1, ulysses: int = 1) -> Any:
    degrees = SimpleNamespace(ring_degree=ring, ulysses_degree=ulysses, ulysses_anything=False)
    return SimpleNamespace(context_parallel_config=degrees)


@pytest.mark.parametrize(
    ("changed", "ring", "text"),
    [
        ({"attn_mask": torch.ones(1, 1, 1, 8) > 0}, True, "ulysses_degree in place of ring_degree"),
        ({"dropout_p": 0.1}, True, r"got dropout_p=0\.1"),
        ({"is_causal": True}, True, "got is_causal=True"),
        ({"enable_gqa": True, "key": torch.ones(1, 8, 1, 16)}, True, "key heads repeated"),
        ({"attn_mask": torch.ones(8, 8, requires_grad=True)}, False, "wants a gradient"),
        ({"attn_mask": torch.ones(1, 3, 8, 8) > 0}, False, "an attn_mask of 3 heads"),
        ({"query": torch.ones(1, 8, 3, 16)}, False, "got 3 heads under ulysses_degree=2"),
    ],
    ids=str,
)
def test_what_the_templates_would_get_wrong_is_refused(
    changed: dict[str, Any], ring: bool, text: str
) -> None:
    q = torch.randn(1, 8, 2, 16)
    given = {
        "query": q, "key": q, "value": q, "attn_mask": None, "dropout_p": 0.0, "is_causal": False,
        "scale": None, "enable_gqa": False, "return_lse": False,
    }  # fmt: skip
    over = _over(ring=2) if ring else _over(ulysses=2)
    with pytest.raises(Unsupported, match=text):
        attend_over_ranks(**{**given, **changed}, parallel_config=over)


class _Template(torch.autograd.Function):
    """The library's ring over one rank: what was saved is read once and handed on."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = context_parallel._forward(ctx, q, k, v, return_lse=True)
        ctx.merged = out.detach(), lse.detach().unsqueeze(-1).squeeze(-1)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v = ctx.saved_tensors
        out, lse = ctx.merged
        return context_parallel._backward(ctx, grads[0], query=q, key=k, value=v, out=out, lse=lse)


class _Layer(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _Template.apply(x, x, x)  # type: ignore[no-any-return]


def test_the_backward_pass_runs_on_what_the_forward_pass_was_asked_for() -> None:
    q, layer = torch.randn(1, 8, 2, 16, requires_grad=True), _Layer()
    with use_backend("reference"):
        scoped = layer(q)
    with set_backend(layer, "portable"):
        by_policy = layer(q)
    plain = layer(q)
    for out, ran_on in ((scoped, {"reference"}), (by_policy, {"portable"})):
        with record_selections() as ran, use_backend("flex"):
            out.sum().backward()
            assert use_backend.current().names == ("flex",)
        assert {one.backend for one in ran} == ran_on
    with record_selections() as ran, use_backend("reference"):
        plain.sum().backward()
    assert str(ran[0].source) not in ("SCOPE", "MODULE")


def test_checkpoints_hand_out_what_was_saved_once() -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    checkpoint(_Template.apply, q, q, q, use_reentrant=False).square().sum().backward()
    want = attention(x := q.detach().clone().requires_grad_(), x, x)
    want.square().sum().backward()
    torch.testing.assert_close(q.grad, x.grad)


def test_a_ring_whose_template_hands_no_keys_on_is_refused() -> None:
    q = torch.randn(1, 8, 2, 16)
    ctx = SimpleNamespace(save_for_backward=lambda *arrays: None)
    context_parallel._forward(ctx, q, q, q, _parallel_config=_over(ring=2))
    with torch.no_grad(), pytest.raises(Unsupported, match="or ulysses_degree"):
        context_parallel._backward(ctx, q)


def test_a_ring_s_gradients_are_all_in_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 8, 2, 16)
    over = _over(ring=3)
    over.context_parallel_config._ring_mesh = SimpleNamespace(get_group=lambda: None)
    ctx = SimpleNamespace(save_for_backward=lambda *arrays: None)
    out, lse = context_parallel._forward(ctx, q, q, q, return_lse=True, _parallel_config=over)
    fails = iter([True, False, False])

    def found(*arguments: Any) -> tuple[Tensor, ...]:
        if next(fails):
            raise RuntimeError("amid a pass")
        return (q, q, q)

    monkeypatch.setattr(context_parallel, "ring_gradients", found)

    def step() -> float:
        grads = context_parallel._backward(ctx, q, query=q, key=q, value=q, out=out, lse=lse)
        return float(grads[1].abs().sum())

    with torch.no_grad():
        with pytest.raises(RuntimeError, match="amid a pass"):
            step()
        assert [step() > 0 for _ in range(6)] == [True, False, False] * 2


def test_gradients_that_the_templates_would_leave_out_are_refused() -> None:
    q = torch.randn(1, 8, 2, 16, requires_grad=True)
    with pytest.raises(Unsupported, match="a gradient of a gradient"):
        torch.autograd.grad(_Template.apply(q, q, q).sum(), q, create_graph=True)
    lse = context_parallel._WithoutGradient.apply(q.sum(-1))
    with pytest.raises(Unsupported, match="gradient of the log-sum-exp"):
        lse.sum().backward()

"""diffusers' ring and Ulysses around polyattn's kernels, on two ranks, forward and backward."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

import torch

from polyattn import Unsupported
from polyattn.integrations.diffusers.context_parallel import attend_over_ranks
from tests.integrations.diffusers.context_parallel_ranks import whole

RANKS = Path(__file__).with_name("context_parallel_ranks.py")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_two_ranks_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    port, files = _free_port(), [tmp_path / f"{rank}.pt" for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), "2", str(port), kind, str(file)],
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


def test_what_the_templates_would_get_wrong_is_refused() -> None:
    class _Ring:
        class context_parallel_config:
            ring_degree, ulysses_degree = 2, 1

    q = torch.randn(1, 8, 2, 16)
    mask = torch.ones(1, 1, 1, 8, dtype=torch.bool)
    with pytest.raises(Unsupported, match="ulysses_degree in place of ring_degree"):
        attend_over_ranks(q, q, q, mask, 0.0, False, None, False, False, _Ring)
    with pytest.raises(Unsupported, match=r"got dropout_p=0\.1"):
        attend_over_ranks(q, q, q, None, 0.1, False, None, False, False, _Ring)

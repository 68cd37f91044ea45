"""DTensors in attention: on two ranks the parts are what the whole call is."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from polyattn import Causal, LeftPadding, Padding, PrefixLM, Segments
from polyattn.torch import attention

RANKS = Path(__file__).with_name("sharded_ranks.py")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.slow
def test_two_ranks_compute_what_one_does() -> None:
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), "2", str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = []
    try:
        told = [rank.communicate(timeout=900)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(told)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two ranks, of which this process is the first and the other is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def test_a_rank_that_the_mesh_leaves_out_holds_nothing_and_goes_on(mesh: Any) -> None:
    others = dist.device_mesh.DeviceMesh("cpu", [1], _init_backend=False)
    shape, strides = torch.Size((4, 6, 2, 8)), (96, 16, 8, 1)
    q = DTensor.from_local(
        torch.empty(0), others, [Shard(2)], run_check=False, shape=shape, stride=strides
    ).requires_grad_()
    out, lse = attention(q, q, q, mask=Causal(), return_lse=True)
    assert out.shape == shape and lse.shape == (4, 2, 6)
    assert out.to_local().numel() == lse.to_local().numel() == 0
    assert lse.placements == (Replicate(),)  # a mesh of one
    out.sum().backward()
    assert q.grad.shape == shape and q.grad.to_local().numel() == 0


@pytest.mark.parametrize(
    "mask",
    [
        Padding(kv_lengths=[1, 2, 3, 4]),
        PrefixLM([1, 2, 3, 4]),
        PrefixLM([1, 2, 3, 4]) & LeftPadding(kv_starts=[0, 1, 0, 1]),
        Segments([0, 0, 1, 1]),
        Segments([0, 0, 1, 1], [[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 1, 1]]),
        ~Segments([0, 0, 1, 1]) | Causal(),
    ],
    ids=str,
)
def test_masks_where_the_batch_is_as_large_as_the_sequence(mask: Any, mesh: Any) -> None:
    whole = torch.randn(4, 4, 2, 8)
    q = DTensor.from_local(whole[:2], mesh, [Shard(0)], run_check=False)
    got = attention(q, q, q, mask=mask).to_local()
    torch.testing.assert_close(got, attention(whole, whole, whole, mask=mask)[:2])

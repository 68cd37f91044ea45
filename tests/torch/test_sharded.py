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

from polyattn import (
    Alibi,
    BlockMap,
    Causal,
    Dense,
    DenseBias,
    InvalidProblem,
    LeftPadding,
    Padding,
    PrefixLM,
    Segments,
)
from polyattn.torch import attention, paged_attention

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


_OF_A_PART = {
    "padding": (0, {"mask": Padding(kv_lengths=torch.tensor([1, 2]))}),
    "starts": (0, {"mask": Causal() & LeftPadding(torch.tensor([1, 2]))}),
    "prefix": (0, {"mask": PrefixLM(torch.tensor([1, 2]))}),
    "segments": (0, {"mask": Segments(torch.ones(2, 5, dtype=torch.int32))}),
    "dense, batch": (0, {"mask": Dense(torch.ones(2, 1, 5, 5, dtype=torch.bool))}),
    "dense, heads": (2, {"mask": Dense(torch.ones(1, 3, 5, 5, dtype=torch.bool))}),
    "blocks": (
        2,
        {"mask": BlockMap(5, 5, torch.zeros(1, 3, 1, 1).int(), torch.ones(1, 3, 1).int())},
    ),
    "bias": (2, {"bias": DenseBias(torch.ones(3, 5, 5))}),
    "slopes": (2, {"bias": Alibi(torch.ones(3))}),
    "slopes, batch": (0, {"bias": Alibi(torch.ones(2, 6))}),
    "sinks": (2, {"sinks": torch.ones(3)}),
}


@pytest.mark.parametrize("case", _OF_A_PART)
def test_arrays_that_fit_a_part_and_not_the_whole_are_refused(case: str, mesh: Any) -> None:
    dim, options = _OF_A_PART[case]
    whole = torch.randn(4, 5, 6, 8)
    q = DTensor.from_local(whole.chunk(2, dim)[0], mesh, [Shard(dim)], run_check=False)
    with pytest.raises(InvalidProblem, match="each rank takes its part"):
        attention(q, q, q, **options)


def test_one_entry_or_head_of_an_array_is_that_of_all(mesh: Any) -> None:
    whole = torch.randn(2, 5, 2, 8)
    for dim in (0, 2):
        q = DTensor.from_local(whole.chunk(2, dim)[0], mesh, [Shard(dim)], run_check=False)
        for options in (
            {"mask": Dense(torch.rand(1, 1, 5, 5) > 0.3)},
            {"bias": DenseBias(torch.randn(1, 1, 5, 5))},
            {"bias": Alibi(torch.rand(1, 2))},
            {"mask": Segments([0, 0, 0, 1, 1])},
        ):
            got = attention(q, q, q, **options).to_local()
            want = attention(whole, whole, whole, **options).chunk(2, dim)[0]
            torch.testing.assert_close(got, want)
        with pytest.raises(InvalidProblem):
            attention(q, q, q, sinks=torch.ones(1))
        with pytest.raises(InvalidProblem):
            attention(q, q, q, mask=Padding(kv_lengths=[3]))


_BESIDE_PLAIN: dict[str, Any] = {
    "bias": lambda spread: {"bias": DenseBias(spread(torch.zeros(5, 5)))},
    "slopes": lambda spread: {"bias": Alibi(spread(torch.ones(4)))},
    "sinks": lambda spread: {"sinks": spread(torch.ones(4))},
    "lengths": lambda spread: {"mask": Padding(kv_lengths=spread(torch.tensor([3])))},
    "starts": lambda spread: {"mask": LeftPadding(kv_starts=spread(torch.tensor([3])))},
    "ids": lambda spread: {"mask": Segments(spread(torch.zeros(1, 5, dtype=torch.int64)))},
    "prefixes": lambda spread: {"mask": Causal() & PrefixLM(spread(torch.tensor([3])))},
}


@pytest.mark.parametrize("again", [False, True], ids=["first", "after a plain call"])
@pytest.mark.parametrize("case", _BESIDE_PLAIN)
def test_spread_arrays_beside_plain_ones_are_told_how_to_be_passed(
    case: str, again: bool, mesh: Any
) -> None:
    x = torch.randn(1, 5, 4, 8)
    if again:  # whose class, signatures and sizes are those of the next one
        attention(x, x, x, **_BESIDE_PLAIN[case](lambda one: one))
    with pytest.raises(InvalidProblem, match=r"DTensor.*full_tensor"):
        attention(x, x, x, **_BESIDE_PLAIN[case](lambda one: _on_all(one, mesh)))


@pytest.mark.parametrize("case", ["query", "key", "block table", "lengths", "sinks"])
def test_pages_take_no_spread_arrays(case: str, mesh: Any) -> None:
    pages = torch.randn(4, 16, 2, 8)
    given: dict[str, Any] = {
        "query": torch.randn(1, 1, 4, 8), "key": pages, "value": pages,
        "block table": torch.zeros(1, 4, dtype=torch.int64), "lengths": torch.tensor([20]),
    }  # fmt: skip
    sinks = _on_all(torch.ones(4), mesh) if case == "sinks" else None
    if case in given:
        given[case] = _on_all(given[case], mesh)
    with pytest.raises(InvalidProblem, match=rf"got (a )?{case} of type DTensor.*full_tensor"):
        paged_attention(*given.values(), sinks=sinks)


def _on_all(x: torch.Tensor, mesh: Any) -> DTensor:
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

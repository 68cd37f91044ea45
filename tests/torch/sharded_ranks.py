"""A rank of `test_sharded`: attention of DTensors beside the whole call, forward and backward.

python sharded_ranks.py RANK WORLD PORT
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from polyattn import (
    Alibi,
    Causal,
    Dense,
    DenseBias,
    InvalidProblem,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
    record_selections,
)
from polyattn.torch import attention, explain, plan

B, T, S, N, K, H = 4, 9, 13, 8, 4, 16


def cases() -> dict[str, dict[str, Any]]:
    """Return the options of each call; arrays are whole, and the same on every rank."""
    torch.manual_seed(3)
    return {
        "plain": {}, "causal": {"mask": Causal(), "return_lse": True},
        "soft cap": {"mask": Causal() & Window(left=4), "softcap": 3.0},
        "padding": {"mask": Padding(kv_lengths=torch.tensor([13, 5, 2, 9])), "return_lse": True},
        "padding of a list": {"mask": Padding(kv_lengths=[13, 5, 2, 9])},
        "left padding": {"mask": Causal() & LeftPadding(torch.tensor([0, 3, 1, 2]))},
        "prefix": {"mask": PrefixLM(torch.tensor([3, 1, 0, 5]))},
        "segments": {"mask": Segments(torch.randint(0, 2, (B, T)), torch.randint(0, 2, (B, S)))},
        "dense": {"mask": Dense(torch.rand(B, N, T, S) > 0.3)},
        "dense of heads": {"mask": ~Dense(torch.rand(1, N, T, S) > 0.7)},
        "bias": {"bias": DenseBias(torch.randn(B, 1, T, S)), "mask": Causal()},
        "alibi": {"bias": Alibi(torch.rand(N)), "mask": Causal()},
        "sinks": {"sinks": torch.randn(N), "mask": Causal()},
    }  # fmt: skip


def check_call(mesh: Any, places: Any, layout: str, options: dict[str, Any]) -> None:
    """Compare a call of DTensors with the whole one, and the gradients."""
    torch.manual_seed(1)
    arrays = [torch.randn(B, n, heads, H) for n, heads in ((T, N), (S, K), (S, K))]
    if layout == "BNTH":
        arrays = [x.transpose(1, 2).contiguous() for x in arrays]
    whole = [x.clone().requires_grad_() for x in arrays]
    spread = [distribute_tensor(x, mesh, places).requires_grad_() for x in arrays]
    want = attention(*whole, layout=layout, **options)
    with record_selections() as ran:
        got = attention(*spread, layout=layout, **options)
    assert len(ran) == 1
    explain(*spread, layout=layout, **options)
    want, got = (x if isinstance(x, tuple) else (x,) for x in (want, got))
    for one, other in zip(got, want, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), other, atol=1e-5, rtol=1e-5)
    assert got[0].placements == tuple(places)
    grad = torch.randn(want[0].shape, generator=torch.Generator().manual_seed(9))
    want[0].backward(grad)
    got[0].backward(distribute_tensor(grad, mesh, places))
    for one, other in zip(spread, whole, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, atol=1e-5, rtol=1e-5)


def check_trained_sinks(mesh: Any) -> None:
    """Sinks that train are DTensors too, and have the gradient of all ranks' batch entries."""
    torch.manual_seed(2)
    q, sinks = torch.randn(B, T, N, H), torch.randn(N)
    for places, held in (([Shard(0)], [Replicate()]), ([Shard(2)], [Shard(0)]),
                         ([Shard(2)], [Replicate()])):  # fmt: skip
        whole = sinks.clone().requires_grad_()
        attention(q, q, q, sinks=whole, backend="reference").square().sum().backward()
        mine = distribute_tensor(sinks, mesh, held).requires_grad_()
        x = distribute_tensor(q, mesh, places)
        attention(x, x, x, sinks=mine, backend="reference").square().sum().backward()
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad, atol=1e-5, rtol=1e-5)


def check_packed(mesh: Any) -> None:
    """Heads of packed rows are spread, their sequences are not."""
    q, mask = torch.randn(10, N, H, generator=torch.Generator().manual_seed(4)), None
    mask = Packed(torch.tensor([0, 4, 10])) & Causal()
    x = distribute_tensor(q, mesh, [Shard(1)])
    out, lse = attention(x, x, x, mask=mask, layout="packed", return_lse=True)
    want = attention(q, q, q, mask=mask, layout="packed", return_lse=True)
    torch.testing.assert_close(out.full_tensor(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.full_tensor(), want[1], atol=1e-5, rtol=1e-5)


def check_compiled(mesh: Any) -> None:
    """A compiled call of DTensors is one of the parts, too."""
    q = torch.randn(B, T, N, H, generator=torch.Generator().manual_seed(5))
    x = distribute_tensor(q, mesh, [Shard(2)])
    out = torch.compile(lambda y: attention(y, y, y, mask=Causal()), backend="aot_eager")(x)
    want = attention(q, q, q, mask=Causal())
    torch.testing.assert_close(out.full_tensor(), want, atol=1e-5, rtol=1e-5)


def refused(text: str, *arrays: Any, call: Any = attention, **options: Any) -> None:
    """Hold that a call is refused with a text."""
    try:
        call(*arrays, **options)
    except InvalidProblem as error:
        assert text in str(error), str(error)
    else:
        raise AssertionError(f"not refused: {text}")


def check_refusals(mesh: Any) -> None:
    """What needs an exchange, or would be wrong, is said."""
    q = torch.randn(B, T + 1, N, H)
    heads, rows = distribute_tensor(q, mesh, [Shard(2)]), distribute_tensor(q, mesh, [Shard(1)])
    refused("need an exchange", rows, rows, rows)
    refused("same placements", heads, rows, rows)
    refused("beside DTensors", heads, q, q)
    refused("beside DTensors", q, heads, heads)
    few = distribute_tensor(q[:, :, :1].contiguous(), mesh, [Shard(2)])
    refused("whole groups of heads", heads, few, few)
    refused("that trains", heads, heads, heads, sinks=torch.randn(N, requires_grad=True))
    copies = distribute_tensor(q, mesh, [Replicate()])
    refused("different entries", copies, copies, copies, dropout_p=0.5)
    refused("plan for", heads, heads, heads, call=plan)


def main() -> None:
    """Run every check on this rank."""
    rank, world, port = (int(x) for x in sys.argv[1:4])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for name, options in cases().items():
        for layout, batch, heads in (("BTNH", 0, 2), ("BNTH", 0, 1)):
            for place in (Shard(batch), Shard(heads), Replicate()):
                try:
                    check_call(mesh, [place], layout, options)
                except Exception as error:
                    raise AssertionError(f"{name}, {layout}, {place}") from error
    check_trained_sinks(mesh)
    check_packed(mesh)
    check_refusals(mesh)
    check_compiled(mesh)
    dist.destroy_process_group()
    # Meshes keep their groups: a thread of gloo's that drops a tensor after the interpreter's end
    # aborts the process (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A rank of `test_context_parallel`: its part of a sequence through diffusers' own templates.

python context_parallel_ranks.py RANK WORLD PORT KIND OUT
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

from polyattn import record_selections
from polyattn.integrations.diffusers import register

BATCH, LENGTH, HEADS, DIM = 2, 36, 12, 16


def whole() -> list[torch.Tensor]:
    """Return query, key, value and the gradient of the output, the same on every rank."""
    torch.manual_seed(7)
    return list(torch.randn(4, BATCH, LENGTH, HEADS, DIM))


def main() -> None:
    """Attend, differentiate, and save this rank's rows."""
    rank, world, port = (int(x) for x in sys.argv[1:4])
    kind, out = sys.argv[4:6]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    register()
    degrees = {f"{kind}_degree": world}
    over = ContextParallelConfig(**degrees)
    names = ("ring", "ulysses")
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (world, 1) if kind == "ring" else (1, world), mesh_dim_names=names
    )
    config = ParallelConfig(context_parallel_config=over)
    config.setup(rank, world, torch.device("cpu"), mesh=mesh)
    rows = slice(rank * LENGTH // world, (rank + 1) * LENGTH // world)
    q, k, v, grad = (x[:, rows].contiguous() for x in whole())
    for x in (q, k, v):
        x.requires_grad_()
    with attention_backend("polyattn"), record_selections() as ran:
        found = dispatch_attention_fn(q, k, v, parallel_config=config)
        found.backward(grad)
    assert ran
    torch.save([found.detach(), q.grad, k.grad, v.grad], out)
    dist.destroy_process_group()
    # Meshes keep their groups: a thread of gloo's that drops a tensor after the interpreter's end
    # aborts the process (pytorch/pytorch#179291).
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

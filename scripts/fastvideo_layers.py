"""Run FastVideo's own attention layers on polyattn, on one rank and on two, beside float64.

``scripts/fastvideo_layers.py CHECKOUT`` takes a checkout of https://github.com/hao-ai-lab/FastVideo
(or its ``fastvideo`` folder alone, in a folder), registers polyattn with its selector, and runs its
``LocalAttention`` and ``DistributedAttention``, with its enumeration, metadata, forward context and
process groups, on the CPU. Each case is compared with torch's function in float64, within twice the
error of torch's function in float32.

What its modules import that has no part in attention (imageio, torchvision, ...) is stood in for
where it is not installed, and its package's ``__init__``, which imports its pipelines, is not run.

Exit code: 0 if every case is equal, 1 if not.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

STOOD_IN = ("imageio", "torchvision", "torchvision.utils", "einops", "remote_pdb")
UNUSED = ("diffusers", "diffusers.loaders", "diffusers.loaders.lora_base")
"""Stood in for always: FastVideo takes a name of a file of it."""
B, T, TEXT, N, H = 2, 48, 10, 4, 32
LIMIT_SECONDS = 900


def stand_in(checkout: Path) -> list[str]:
    """Make ``fastvideo`` importable without its third parties; return what was stood in for."""
    missing = [*UNUSED, *(name for name in STOOD_IN if not _found(name))]
    for name in missing:
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        module.__getattr__ = lambda wanted: None  # type: ignore[method-assign]
        sys.modules[name] = module
    package = ModuleType("fastvideo")
    package.__path__ = [str(checkout / "fastvideo")]
    package.__spec__ = importlib.machinery.ModuleSpec("fastvideo", None, is_package=True)
    sys.modules["fastvideo"] = package
    return missing


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers, the same on every rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def truth(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Return torch's answer in float64 and in float32, laid out (B, T, N, H)."""
    found = []
    for dtype in (torch.float64, torch.float32):
        arrays: list[Any] = [x.to(dtype).transpose(1, 2) for x in (q, k, v)]
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        out = torch.nn.functional.scaled_dot_product_attention(
            *arrays, **(options | {"attn_mask": mask})
        )
        found.append(out.transpose(1, 2))
    return found[0], found[1]


def compared(got: Tensor, want: tuple[Tensor, Tensor]) -> tuple[str, float, float]:
    """Return the verdict, our error and that of torch's function in float32."""
    exact, single = want
    ours = (got.double() - exact).abs().max().item()
    theirs = (single.double() - exact).abs().max().item()
    bound = 2 * theirs + 4 * torch.finfo(torch.float32).eps * exact.abs().max().item()
    return ("equal" if ours <= bound else "different"), ours, theirs


def _badness(found: tuple[str, float, float]) -> tuple[bool, float]:
    return found[0] != "equal", found[1]


class Cases:
    """The cases of one rank; each is a method of this name, and returns what `compared` says."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.layers = importlib.import_module("fastvideo.attention.layer")
        self.sdpa = importlib.import_module("fastvideo.attention.backends.sdpa")
        self.context = importlib.import_module("fastvideo.forward_context").set_forward_context
        names = importlib.import_module("fastvideo.platforms").AttentionBackendEnum
        self.dense = (names.FLASH_ATTN, names.TORCH_SDPA)

    def local(
        self, *, keys: int = T, kv_heads: int = N, mask: Tensor | None = None,
        read_as: Tensor | None = None, scale: float | None = None, causal: bool = False,
        said_causal: bool = False,
    ) -> tuple[str, float, float]:  # fmt: skip
        """Run LocalAttention; `read_as` is the mask as torch's function takes it."""
        q, k, v = (
            drawn(B, n, heads, H, seed=i)
            for i, (n, heads) in enumerate([(T, N), (keys, kv_heads), (keys, kv_heads)])
        )
        layer = self.layers.LocalAttention(
            N, H, num_kv_heads=kv_heads, softmax_scale=scale, causal=causal,
            supported_attention_backends=self.dense, dropout_rate=0,
        )  # fmt: skip
        metadata = None
        if mask is not None:
            metadata = self.sdpa.SDPAMetadata(0, attn_mask=mask, is_causal=said_causal)
        with self.context(0, metadata):
            got = layer(q, k, v)
        want = truth(
            q, k, v, attn_mask=read_as, is_causal=causal, scale=scale, enable_gqa=kv_heads != N
        )
        return compared(got, want)

    def distributed(
        self, *, text: bool = False, causal: bool = False, padded: int = 0,
        mask: Tensor | None = None, read_as: Tensor | None = None, rope: bool = False,
    ) -> tuple[str, float, float]:  # fmt: skip
        """Run DistributedAttention over this rank's rows; `padded` rows at the end are no video."""
        q, k, v = (drawn(B, T, N, H, seed=i) for i in range(3))
        tq, tk, tv = (drawn(B, TEXT, N, H, seed=i) for i in range(3, 6))
        layer = self.layers.DistributedAttention(
            N, H, causal=causal, supported_attention_backends=self.dense, prefix="blocks.0.attn"
        )
        rows = slice(self.rank * T // self.world, (self.rank + 1) * T // self.world)
        true = T - padded
        turned = (drawn(true, H // 2, seed=7), drawn(true, H // 2, seed=8)) if rope else None
        more = {"replicated_q": tq, "replicated_k": tk, "replicated_v": tv} if text else {}
        metadata = None if mask is None else self.sdpa.SDPAMetadata(0, attn_mask=mask)
        with self.context(0, metadata):
            out, replicated = layer(
                *(x[:, rows] for x in (q, k, v)),
                original_seq_len=true, freqs_cis=turned, **more,
            )  # fmt: skip
        whole = [x[:, :true] for x in (q, k, v)]
        if turned is not None:
            rotate = importlib.import_module("fastvideo.layers.rotary_embedding")._apply_rotary_emb
            whole[:2] = [rotate(x, *turned, is_neox_style=False) for x in whole[:2]]
        if text:
            whole = [torch.cat(pair, 1) for pair in zip(whole, (tq, tk, tv), strict=True)]
        exact, single = truth(*whole, attn_mask=read_as, is_causal=causal)
        here = slice(rows.start, min(rows.stop, true))
        found = [compared(out[:, : here.stop - here.start], (exact[:, here], single[:, here]))]
        if text:
            found.append(compared(replicated, (exact[:, true:], single[:, true:])))
        return max(found, key=_badness)

    def all(self) -> dict[str, Callable[[], tuple[str, float, float]]]:
        """Return every case by its name."""
        kept = drawn(B, T, seed=11) > -0.8
        text = torch.ones(B, TEXT, dtype=torch.int64)
        text[1, 6:] = 0
        covers = torch.cat([torch.ones(B, T, dtype=torch.bool), text.bool()], 1)
        added = drawn(B, 1, T, T, seed=12)
        tril = torch.ones(T, T, dtype=torch.bool).tril().expand(B, 1, T, T)
        here, over = self.local, self.distributed
        short = torch.ones(B, T, dtype=torch.bool)
        short[:, -TEXT:] = text.bool()
        four = kept[:, None, None]
        return {
            "LocalAttention, plain": here,
            "LocalAttention, cross": lambda: here(keys=TEXT),
            "LocalAttention, scale": lambda: here(scale=0.3),
            "LocalAttention, causal": lambda: here(causal=True),
            "LocalAttention, grouped heads": lambda: here(kv_heads=2),
            "LocalAttention, grouped heads, mask (B, S)": lambda: here(
                kv_heads=2, mask=kept, read_as=four
            ),
            "LocalAttention, cross, integers (B, S)": lambda: here(
                keys=TEXT, mask=text, read_as=text.bool()[:, None, None]
            ),
            "LocalAttention, short integers (B, s)": lambda: here(
                mask=text, read_as=short[:, None, None]
            ),
            "LocalAttention, floats (B, 1, T, S)": lambda: here(mask=added, read_as=added),
            "LocalAttention, booleans (B, T, S)": lambda: here(mask=tril[:, 0], read_as=tril),
            "LocalAttention, causal by its metadata": lambda: here(
                mask=tril, read_as=tril, said_causal=True
            ),
            "DistributedAttention, plain": over,
            "DistributedAttention, rotary": lambda: over(rope=True),
            "DistributedAttention, causal": lambda: over(causal=True),
            "DistributedAttention, padded": lambda: over(padded=5),
            "DistributedAttention, mask (B, S)": lambda: over(mask=kept, read_as=four),
            "DistributedAttention, replicated text": lambda: over(text=True),
            "DistributedAttention, replicated text, its mask": lambda: over(
                text=True, mask=text, read_as=covers[:, None, None]
            ),
            "DistributedAttention, replicated text, padded, rotary": lambda: over(
                text=True, padded=5, rope=True
            ),
        }


def run_rank(checkout: Path, rank: int, world: int, port: int, out: Path) -> None:
    """Run every case on this rank and write what was found."""
    missing = stand_in(checkout)
    from polyattn import record_selections
    from polyattn.integrations.fastvideo.slot_in import register

    register()
    state = importlib.import_module("fastvideo.distributed.parallel_state")
    state.init_distributed_environment(
        world_size=world, rank=rank, distributed_init_method=f"tcp://127.0.0.1:{port}",
        local_rank=rank,
    )  # fmt: skip
    state.initialize_model_parallel(sequence_model_parallel_size=world)
    found = []
    for name, case in Cases(rank, world).all().items():
        with torch.no_grad(), record_selections() as ran:
            verdict, ours, theirs = case()
        backend = ran[-1].backend if ran else ""
        found.append((name, verdict if ran else "not ours", ours, theirs, backend))
    out.write_text(json.dumps({"missing": missing, "rows": found}))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_world(checkout: Path, world: int) -> list[dict[str, Any]]:
    """Run the ranks as processes on loopback."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.json" for rank in range(world)]
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(checkout), "--rank", str(rank), str(world),
                 str(port), str(file)],
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        try:
            codes = [rank.wait(timeout=LIMIT_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}, expected 0")
        return [json.loads(file.read_text()) for file in files]


def main() -> int:
    """Print the table, a line for each case and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rank", nargs=4, metavar=("RANK", "WORLD", "PORT", "OUT"))
    given = parser.parse_args()
    if given.rank:
        rank, world, port, out = given.rank
        run_rank(given.checkout, int(rank), int(world), int(port), Path(out))
        return 0
    bad = 0
    for world in (1, 2):
        told = run_world(given.checkout, world)
        print(f"{world} rank(s); stood in for: {', '.join(told[0]['missing']) or 'nothing'}")
        for rows in zip(*(one["rows"] for one in told), strict=True):
            worst = max(rows, key=lambda row: _badness(row[1:4]))
            name, verdict, ours, theirs, backend = worst
            bad += verdict != "equal"
            print(f"  {verdict:<10} {name:<55} {ours:.1e} (torch {theirs:.1e}) {backend}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

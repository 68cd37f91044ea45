"""Impls as layers use them: one rank's heads, foreign arguments, pickling."""

from __future__ import annotations

import copy
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from polyattn import InvalidProblem, UnknownBackend, record_selections
from polyattn.integrations.fastvideo.layer import AttentionBackend, AttentionImpl, backend_class
from polyattn.integrations.fastvideo.selector import get_attn_backend
from polyattn.selection.registry import registry
from polyattn.torch import attention

TIME_LIMIT = 300  # seconds, of a machine that is busy with much else


class LocalAttention(nn.Module):
    """As FastVideo's: the impl is a plain attribute."""

    def __init__(self, heads: int, head_size: int, causal: bool = False) -> None:
        super().__init__()
        backend = get_attn_backend(head_size, torch.float32, default_backend=None)
        self.attn_impl = backend.get_impl_cls()(
            num_heads=heads,
            head_size=head_size,
            softmax_scale=head_size**-0.5,
            num_kv_heads=heads,
            causal=causal,
            prefix="blocks.0.impl",
            dropout_rate=0,
        )
        self.to_out = nn.Linear(head_size, head_size)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.to_out(self.attn_impl.forward(q, k, v, None))
        return out


def test_an_impl_for_all_heads_runs_on_a_share_of_them() -> None:
    impl = get_attn_backend(64, torch.float32).get_impl_cls()(4, 64, 0.125)
    q = torch.randn(2, 24, 4, 64)
    whole = impl.forward(q, q, q, None)
    for share in (1, 2, 4):
        for first in range(0, 4, share):
            part = q[:, :, first : first + share]
            out = impl.forward(part, part, part, None)
            torch.testing.assert_close(out, whole[:, :, first : first + share])


def test_a_share_of_grouped_heads() -> None:
    impl = get_attn_backend(16, torch.float32).get_impl_cls()(8, 16, num_kv_heads=2)
    q, kv = torch.randn(1, 5, 8, 16), torch.randn(1, 7, 2, 16)
    whole = impl.forward(q, kv, kv)
    half = impl.forward(q[:, :, 4:], kv[:, :, 1:], kv[:, :, 1:])
    torch.testing.assert_close(half, whole[:, :, 4:])
    quarter = impl.forward(q[:, :, 2:4], kv[:, :, :1], kv[:, :, :1])  # more ranks than kv heads
    torch.testing.assert_close(quarter, whole[:, :, 2:4])


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 24, 4, 32), (2, 24, 4, 32)),  # head size
        ((2, 24, 4, 64), (2, 24, 4, 32)),
        ((2, 24, 3, 64), (2, 24, 1, 64)),  # no equal share of 4
        ((2, 24, 8, 64), (2, 24, 2, 64)),  # more heads than it was made for
        ((2, 4, 24, 64), (2, 4, 24, 64)),  # heads second
        ((2, 24, 0, 64), (2, 24, 0, 64)),
        ((24, 4, 64), (24, 4, 64)),
        ((64,), (64,)),
    ],
)
def test_other_shapes_are_refused(query: tuple[int, ...], key: tuple[int, ...]) -> None:
    impl = get_attn_backend(64, torch.float32).get_impl_cls()(4, 64, num_kv_heads=2)
    q, k = torch.ones(query), torch.ones(key)
    with pytest.raises(InvalidProblem, match=r"expected \(B, T, 4, 64\).*share"):
        impl.forward(q, k, k)


def test_heads_that_are_no_multiple_of_kv_heads_are_refused() -> None:
    impl = get_attn_backend(64, torch.float32).get_impl_cls()(4, 64, num_kv_heads=2)
    q, k = torch.ones(1, 3, 1, 64), torch.ones(1, 3, 2, 64)
    with pytest.raises(InvalidProblem, match="multiple"):
        impl.forward(q, k, k)


def _ulysses(rank: int, ranks: int, file: str, results: Any) -> None:
    """Run what FastVideo's DistributedAttention does on one rank, and compare with one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    batch, length, heads, size = 1, 12, 4, 16
    torch.manual_seed(0)
    whole = torch.randn(3 * batch, length, heads, size)
    impl = get_attn_backend(size, torch.float32).get_impl_cls()(heads, size, size**-0.5)

    def exchange(pieces: list[torch.Tensor], dim: int) -> torch.Tensor:
        sent = torch.stack([piece.contiguous() for piece in pieces])
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        return torch.cat(list(got), dim)

    mine = whole.chunk(ranks, 1)[rank]  # a share of the sequence, all heads
    qkv = exchange(list(mine.chunk(ranks, 2)), 1)  # the whole sequence, a share of the heads
    qkv = impl.preprocess_qkv(qkv, None)
    out = impl.postprocess_output(impl.forward(*qkv.chunk(3, 0), None), None)
    out = exchange(list(out.chunk(ranks, 1)), 2)
    expected = attention(*whole.chunk(3, 0)).chunk(ranks, 1)[rank]
    results.put((rank, float((out - expected).abs().max())))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_two_ranks_share_the_heads(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    results: Any = spawn.Queue()
    ranks = [
        spawn.Process(target=_ulysses, args=(rank, 2, str(tmp_path / "store"), results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:  # one that fails ends the other's exchange
            process.join(TIME_LIMIT)
        assert [process.exitcode for process in ranks] == [0, 0]
        errors = dict(results.get(timeout=TIME_LIMIT) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
    assert set(errors) == {0, 1} and max(errors.values()) < 1e-5


@pytest.mark.parametrize("value", [None, 0, 0.0, False, "", (), [], {}])
def test_extra_arguments_that_say_nothing_pass(value: Any) -> None:
    impl = get_attn_backend(16, torch.float32).get_impl_cls()(
        2, 16, 0.25, False, 2, prefix="blocks.0", dropout_rate=value, nvfp4_fa4=value
    )
    q = torch.randn(1, 4, 2, 16)
    torch.testing.assert_close(impl.forward(q, q, q), attention(q, q, q))


@pytest.mark.parametrize("value", [0.1, True, "relu", (1,), torch.zeros(2)])
def test_extra_arguments_that_say_something_are_named(value: Any) -> None:
    impl_cls = get_attn_backend(16, torch.float32).get_impl_cls()
    with pytest.raises(InvalidProblem, match=r"topk_ratio="):
        impl_cls(2, 16, topk_ratio=value)
    with pytest.raises(InvalidProblem, match=r"softmax_scal=.*'softmax_scale'"):
        impl_cls(2, 16, softmax_scal=value)


@pytest.mark.parametrize("sizes", [(0, 16), (2, 0), (2.5, 16), (True, 16), ("2", 16), (3, 16, 2)])
def test_sizes_are_checked(sizes: tuple[Any, ...]) -> None:
    impl_cls = get_attn_backend(16, torch.float32).get_impl_cls()
    with pytest.raises(InvalidProblem, match=r"heads|head_size"):
        impl_cls(*sizes[:2], num_kv_heads=sizes[2] if len(sizes) > 2 else None)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_classes_and_impls_pickle(protocol: int) -> None:
    for name in registry.names("torch"):
        backend = backend_class(name)
        assert backend is backend_class(name.upper())
        for cls in (backend, backend.get_impl_cls(), backend.get_metadata_cls()):
            assert pickle.loads(pickle.dumps(cls, protocol)) is cls
            assert name in repr(cls) or cls is backend.get_metadata_cls()
    several = backend_class("sdpa_flash", "sdpa_math")
    assert pickle.loads(pickle.dumps(several, protocol)) is several is not backend_class("flex")
    assert several.get_name() == "SDPA_FLASH" and several.get_impl_cls().others == ("sdpa_math",)
    impl = several.get_impl_cls()(2, 16, 0.3, True, prefix="x")
    again = pickle.loads(pickle.dumps(impl, protocol))
    assert type(again) is type(impl) and vars(again) == vars(impl)
    assert vars(copy.deepcopy(impl)) == vars(impl)


class Mine(AttentionImpl):
    """A user's own subclass."""

    backend_name = "reference"


def test_subclasses_of_users_pickle() -> None:
    impl = pickle.loads(pickle.dumps(Mine(2, 16)))
    q = torch.randn(1, 4, 2, 16)
    with record_selections() as ran:
        impl.forward(q, q, q)
    assert type(impl) is Mine and ran[0].backend == "reference"


def test_a_class_of_a_backend_that_is_not_here_says_so() -> None:
    data = pickle.dumps(backend_class("sdpa_math")).replace(b"sdpa_math", b"sdpa_maht")
    with pytest.raises(UnknownBackend, match=r"sdpa_maht.*sdpa_math"):
        pickle.loads(data)
    assert not hasattr(sys.modules[AttentionImpl.__module__], "nonesuch")


def test_a_saved_model_works_in_another_process(tmp_path: Path) -> None:
    model = LocalAttention(2, 16, causal=True)
    q = torch.randn(1, 5, 2, 16)
    model_file, out_file = tmp_path / "model.pt", tmp_path / "out.pt"
    torch.save((model, q), model_file)
    program = (
        "import sys, torch\n"
        "model, q = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save(model(q, q, q).detach(), sys.argv[2])\n"
    )
    root = str(Path(__file__).parents[3])
    ran = subprocess.run(
        [sys.executable, "-c", program, str(model_file), str(out_file)],
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        env={**os.environ, "PYTHONPATH": root},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    torch.testing.assert_close(torch.load(out_file), model(q, q, q).detach())


def test_a_saved_model_is_loaded_with_weights_only() -> None:
    kept = io.BytesIO()
    impl = get_attn_backend(16, torch.float32, ["sdpa_math"]).get_impl_cls()(2, 16)
    torch.save(impl, kept)
    kept.seek(0)
    with torch.serialization.safe_globals([type(impl)]):
        assert vars(torch.load(kept, weights_only=True)) == vars(impl)


def test_backend_classes_are_never_instantiated_to_be_asked() -> None:
    backend = backend_class("sdpa_math")
    assert issubclass(backend, AttentionBackend) and backend.get_name() == "SDPA_MATH"
    assert backend.get_impl_cls().backend_name == "sdpa_math"

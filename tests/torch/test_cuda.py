"""Calls on a CUDA device, as programs make them: captured, compiled, beside streams, unread.

What backends compute there is for tests/conformance; here is what is around it.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F
from torch import Tensor

import polyattn
from polyattn import Causal, Dense, LeftPadding, Padding, Segments, Window
from polyattn.torch import attention, scaled_dot_product_attention

pytestmark = pytest.mark.gpu

B, N, T, H = 2, 4, 256, 64


def arrays(*, seed: int = 0, kv_heads: int = N, length: int = T, **options: Any) -> list[Tensor]:
    """(B, N, T, H) bfloat16 on the device."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, N, T, H), (B, kv_heads, length, H), (B, kv_heads, length, H))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    return [x.to("cuda", options.get("dtype", torch.bfloat16)) for x in drawn]


def exact(*qkv: Tensor, **options: Any) -> Tensor:
    q, k, v = (x.detach().double() for x in qkv)
    return attention(q, k, v, layout="BNTH", backend="reference", **options)


def assert_right(out: Tensor, truth: Tensor) -> None:
    error = (out.double() - truth).abs().max()
    assert float(error) < 0.02, f"off by {float(error):.3g}"


def masks() -> dict[str, Any]:
    lengths = torch.tensor([100, 256], dtype=torch.int32, device="cuda")
    ids = (torch.arange(T, device="cuda") // 100).to(torch.int32)
    pairs = torch.rand(T, T, generator=torch.Generator().manual_seed(1)).cuda() < 0.5
    return {
        "none": None, "causal": Causal(), "window": Window(64, 0),
        "padding": Padding(kv_lengths=lengths),
        "causal padding": Causal() & Padding(lengths, lengths),
        "left padding": LeftPadding(kv_starts=lengths - 100) & Causal(),
        "segments": Segments(ids, ids) & Causal(), "dense": Dense(pairs),
    }  # fmt: skip


MASKS = [
    "none", "causal", "window", "padding", "causal padding", "left padding", "segments", "dense",
]  # fmt: skip


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_nothing_waits_for_the_device(name: str, trains: bool) -> None:
    q, k, v = (x.requires_grad_(trains) for x in arrays())
    mask = masks()[name]

    def step() -> Tensor:
        out = attention(q, k, v, mask=mask, layout="BNTH")
        if trains:
            out.sum().backward()
        return out

    step()  # the first call of a class may look at things
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_right(out, exact(q, k, v, mask=mask))


@pytest.mark.parametrize("name", MASKS)
def test_calls_are_captured(name: str) -> None:
    """What is captured is replayed on other contents."""
    q, k, v = arrays()
    mask = masks()[name]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            attention(q, k, v, mask=mask, layout="BNTH")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask=mask, layout="BNTH")
    for old, new in zip((q, k, v), arrays(seed=5), strict=True):
        old.copy_(new)
    graph.replay()
    assert_right(out, exact(q, k, v, mask=mask))


def test_what_a_graph_will_fill_serves_no_other_call() -> None:
    """A mask that is made while a graph is captured holds nothing before it is replayed."""
    q, k, v = arrays(length=T + 40)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        attention(q, k, v, mask=Window(9, 5), layout="BNTH", backend="sdpa_efficient")
    torch.cuda.current_stream().wait_stream(warm)
    mask, graph = Window(17, 3), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, mask=mask, layout="BNTH", backend="sdpa_efficient")
    truth = exact(q, k, v, mask=mask)
    assert_right(attention(q, k, v, mask=mask, layout="BNTH", backend="sdpa_efficient"), truth)
    graph.replay()
    assert_right(out, truth)


@pytest.mark.parametrize("name", MASKS)
def test_calls_are_compiled(name: str) -> None:
    q, k, v = (x.requires_grad_() for x in arrays())
    mask = masks()[name]

    @torch.compile(fullgraph=True)
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, layout="BNTH")

    out = call(q, k, v)
    assert_right(out, exact(q, k, v, mask=mask))
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), (q, k, v))
    eager = attention(q, k, v, mask=mask, layout="BNTH", backend="sdpa_math")
    for a, b in zip(found, torch.autograd.grad((eager * weight).sum(), (q, k, v)), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05)


def test_a_stream_of_its_own() -> None:
    q, k, v = arrays()
    truth = exact(q, k, v, mask=Causal())
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late = [x.clone() for x in (q, k, v)]
        out = attention(*late, mask=Causal(), layout="BNTH")
    stream.synchronize()
    assert_right(out, truth)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": "bool"}, {"attn_mask": "numbers"},
        {"enable_gqa": True}, {"enable_gqa": True, "is_causal": True},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_drop_in_is_torchs_function(dtype: str, options: dict[str, Any]) -> None:
    kv_heads = 2 if options.get("enable_gqa") else N
    q, k, v = arrays(kv_heads=kv_heads, dtype=getattr(torch, dtype))
    given = dict(options)
    if (how := given.get("attn_mask")) is not None:
        seen = torch.rand(B, 1, T, T, device="cuda") < 0.5
        zero = torch.zeros((), dtype=q.dtype, device="cuda")
        given["attn_mask"] = seen if how == "bool" else torch.where(seen, zero, -torch.inf)
    ours, theirs = scaled_dot_product_attention(q, k, v, **given), None
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), **_wide(given))
    assert ours.dtype == q.dtype and ours.device == q.device
    error = float((ours.double() - theirs).abs().max())
    assert error < (1e-5 if dtype == "float32" else 0.02), error


def _wide(options: dict[str, Any]) -> dict[str, Any]:
    mask = options.get("attn_mask")
    if mask is None or mask.dtype == torch.bool:
        return options
    return {**options, "attn_mask": mask.double()}


def test_autocast_is_torchs() -> None:
    q, k, v = arrays(dtype=torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        out = attention(q, k, v, mask=Causal(), layout="BNTH")
        assert out.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
    assert_right(out, exact(q, k, v, mask=Causal()))


def test_masks_from_the_host_go_to_the_device() -> None:
    q, k, v = arrays()
    for lengths in ([100, 256], torch.tensor([100, 256])):
        out = attention(q, k, v, mask=Padding(kv_lengths=lengths), layout="BNTH")
        assert_right(out, exact(q, k, v, mask=Padding(kv_lengths=lengths)))


def test_torchs_switches_hold() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = arrays()
    for kernel, name in (
        (SDPBackend.FLASH_ATTENTION, "sdpa_flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "sdpa_efficient"),
        (SDPBackend.CUDNN_ATTENTION, "sdpa_cudnn"),
        (SDPBackend.MATH, "sdpa_math"),
    ):
        with sdpa_kernel(kernel):
            assert polyattn.torch.explain(q, k, v, layout="BNTH").backend == name


def test_the_reasons_are_of_this_device() -> None:
    q, k, v = arrays(dtype=torch.float32)
    text = str(polyattn.torch.explain(q, k, v, layout="BNTH"))
    major, minor = torch.cuda.get_device_capability()
    assert f"sm_{major}{minor}" in text or "cuda" in text
    with pytest.raises(polyattn.Unsupported) as refused:
        polyattn.torch.explain(q, k, v, layout="BNTH", backend="sdpa_flash")
    assert "float32" in str(refused.value)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn"])
def test_gradients_come_in_with_any_strides(name: str, compiled: bool) -> None:
    """torch keeps cuDNN's graphs without the strides of what comes in; they differ here."""

    def step(q: Tensor, k: Tensor, v: Tensor, turn: int) -> Tensor:
        out = attention(q, k, v, layout="BNTH", backend=name)
        if turn == 1:
            out = out.transpose(1, 2).contiguous().transpose(1, 2)
        return (out.float() if turn == 2 else out).mul(torch.arange(H, device="cuda")).sum()

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # a graph for strides of 0 in front
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(B, T, -1).square().sum()

    torch.compiler.reset()  # it counts what is compiled by the lines it comes from
    call = torch.compile(step, fullgraph=True) if compiled else step
    q, k, v = (x.requires_grad_() for x in arrays())
    torch.autograd.grad(stock(q, k, v), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = attention(*wide, layout="BNTH", backend="reference")
    truth = torch.autograd.grad(out.mul(torch.arange(H, device="cuda")).sum(), wide)
    for turn in (0, 1, 2, 0):
        found = torch.autograd.grad(call(q, k, v, turn), (q, k, v))
        for a, b in zip(found, truth, strict=True):
            assert float((a.double() - b).norm() / b.norm()) < 0.02, (turn, name)


@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"])
def test_rows_may_begin_anywhere(name: str) -> None:
    """Kernels that read 16 bytes at once end the use of the device on such rows."""
    wide = torch.randn(3, B, N + 1, T + 3, H + 3, device="cuda").to(torch.bfloat16)
    for first in (0, 1, 3):
        q, k, v = (x[:, 1:, 2 : 2 + T, first : first + H] for x in wide)
        truth = exact(q, k, v, mask=Causal())
        assert_right(attention(q, k, v, mask=Causal(), layout="BNTH", backend=name), truth)
    flat = torch.randn(B * N * T * H + 1, device="cuda").to(torch.bfloat16)[1:].view(B, N, T, H)
    assert_right(attention(flat, flat, flat, layout="BNTH", backend=name), exact(flat, flat, flat))


def test_arrays_of_masks_are_torchs_unless_asked() -> None:
    from polyattn.selection.requests import record_selections

    q, k, v = arrays()
    seen = torch.rand(B, 1, 1, T, device="cuda") < 0.5
    with record_selections() as ran:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen)
        with polyattn.use_backend("sdpa_cudnn"):
            ours = scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert [one.backend for one in ran] == ["torch", "sdpa_cudnn"]
    assert torch.allclose(out.float(), ours.float(), atol=0.02)


@pytest.mark.parametrize("rows", [1, 7, T])
def test_windows_of_grouped_heads(rows: int) -> None:
    q, k, v = arrays(kv_heads=1)
    for mask in (Window(17, 5), Window(3, 0), Window(None, 4), Causal()):
        part = q[:, :, :rows]
        out = attention(part, k, v, mask=mask, layout="BNTH", backend="sdpa_flash")
        assert_right(out, exact(part, k, v, mask=mask))


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_padded_cache_is_read_to_its_length(rows: int, layout: str) -> None:
    """In a graph as well, whose lengths change from replay to replay; what is behind is NaN."""
    room, used = T + 32, T
    drawn = [torch.randn(2, 4, room, H, device="cuda") for _ in range(2)]
    cache = [x.to(torch.bfloat16).transpose(1, 2) for x in drawn]  # (B, T, N, H), heads first
    if layout == "BTNH":
        cache = [x.contiguous() for x in cache]
    lengths = torch.tensor([70, 0], dtype=torch.int64, device="cuda")
    q = torch.randn(2, rows, 8, H, device="cuda").to(torch.bfloat16)
    for x in cache:
        x[:, used:] = float("nan")

    def step() -> Tensor:
        k, v = (x[:, :used] for x in cache)
        given = q, k, v
        if layout == "BNTH":
            given = tuple(x.transpose(1, 2) for x in given)
        return attention(*given, mask=Padding(kv_lengths=lengths), layout=layout)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for now in ([70, 0], [1, used], [used + 5, 13], [-4, 64]):
        lengths.copy_(torch.tensor(now))
        graph.replay()
        k, v = (x[:, :used] for x in cache)
        truth = attention(
            q.double(), k.double(), v.double(), mask=Padding(kv_lengths=lengths.clamp(0, used)),
            backend="reference",
        )  # fmt: skip
        truth = truth if layout == "BTNH" else truth.transpose(1, 2)
        assert_right(captured, truth)
        assert_right(step(), truth)


def test_padding_is_read_by_the_flash_kernel() -> None:
    from polyattn.selection.requests import record_selections

    for mask in ("padding", "causal padding", "left padding"):
        with record_selections() as ran:
            attention(*arrays(), mask=masks()[mask], layout="BNTH")
        assert [one.backend for one in ran] == ["sdpa_flash"], mask

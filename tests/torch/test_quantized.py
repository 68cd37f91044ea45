"""Quantised keys: every backend that declares them, against keys decoded by hand in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import Causal, DenseBias, Problem, record_selections, use_backend
from polyattn.errors import InvalidProblem, TuningError, Unsupported
from polyattn.integrations.recording import Case
from polyattn.masks import (
    BlockMap,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    LeftPadding,
    Mask,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.biases import Alibi
from polyattn.measure.inputs import build
from polyattn.selection.registry import Available, registry
from polyattn.torch import attention, quantize_kv, quantized_attention
from polyattn.torch.cache import table
from polyattn.tuning.lookup import problem_class

B, S, N, K, H, V = 2, 131, 6, 2, 24, 16
BACKENDS = [
    name
    for name in registry.names("torch")
    if registry.get(name, "torch").capabilities_for("cpu").quantized
    and isinstance(registry.probe(("torch", name)), Available)
]
TINY = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
CODES = ("int8", "float8_e4m3fn")
every_backend = pytest.mark.parametrize("name", BACKENDS)


def normal(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(
    dtype: str = "int8", block: int = 16, layout: str = "BTNH", length: int = S, batch: int = B
) -> tuple[Any, ...]:
    """Return codes of keys, of values, and their scales; heads and blocks differ in size."""
    found = []
    for dim, seed in ((H, 5), (V, 7)):
        x = normal(batch, length, K, dim, seed=seed)
        x = x * normal(batch, length, K, 1, seed=seed + 1).exp()
        x = x.transpose(1, 2) if layout == "BNTH" else x
        found.append(quantize_kv(x, dtype=dtype, block_size=block, layout=layout))  # type: ignore[arg-type]
    (key, key_scales), (value, value_scales) = found
    return key, value, key_scales, value_scales


def decoded(x: torch.Tensor, scales: torch.Tensor, block: int, layout: str) -> torch.Tensor:
    """Multiply each key by the scale of its block, one after the other."""
    wide = x.double()
    dim = 1 if layout == "BTNH" else 2
    for j in range(x.shape[dim]):
        scale = scales[:, :, j // block, None].double()
        wide.select(dim, j).mul_(scale)
    return wide


def by_hand(q: Any, k: Any, v: Any, ks: Any, vs: Any, block: int, **options: Any) -> Any:
    layout = options.get("layout", "BTNH")
    wide = q.double(), decoded(k, ks, block, layout), decoded(v, vs, block, layout)
    return attention(*wide, return_lse=True, backend="reference", **options)


def check(got: Any, wanted: Any, tiny: float = 1e-5) -> None:
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tiny, atol=tiny)


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "top_left": Causal("top_left"),
    "window": Causal() & Window(left=7),
    "either": Window(left=3, right=0) | Window(left=40, right=0),
    "padding": Padding(None, torch.tensor([50, 0])) & Causal(),
    "left_padding": LeftPadding(None, torch.tensor([50, 0])) & Causal(),
    "chunks": Chunked(30) & Causal(),
    "first_keys": Causal() & (Window(left=20) | FirstKeys(4)),
    "complement": ~(Dilated(3) | LeftPadding(None, torch.tensor([9, 100]))),
    "prefix": PrefixLM(torch.tensor([9, 100])),
    "segments": Segments(torch.zeros(B, 20).int(), torch.arange(S).div(50).int().repeat(B, 1)),
    "dense": Dense(normal(B, 1, 20, S, seed=9) > 0),
    "blocks": BlockMap(
        8, 32, torch.tensor([[[[1, 4], [0, 0], [2, 3]]]]).int(), torch.tensor([[[2, 1, 2]]]).int()
    ),
}


@every_backend
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("kind", MASKS)
def test_masks(name: str, kind: str, dtype: str, layout: str) -> None:
    q = normal(B, 20, N, H)
    q = q.transpose(1, 2).contiguous() if layout == "BNTH" else q
    given, options = codes(dtype, layout=layout), {"mask": MASKS[kind], "layout": layout}
    got = quantized_attention(q, *given, block_size=16, return_lse=True, backend=name, **options)
    check(got, by_hand(q, *given, 16, **options))


@every_backend
@pytest.mark.parametrize("t", [1, 3])
@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("block", [1, 16, 64, 100, 1 << 40])
def test_sizes_of_blocks(name: str, block: int, dtype: str, t: int) -> None:
    """The last block is ragged in most of them."""
    q, given = normal(B, t, N, H), codes(dtype, block)
    got = quantized_attention(q, *given, block_size=block, return_lse=True, backend=name)
    check(got, by_hand(q, *given, block, mask=Causal()))


@every_backend
@pytest.mark.parametrize("dtype", TINY, ids=str)
def test_sinks_softcap_scale_and_biases(name: str, dtype: torch.dtype) -> None:
    q, given, sinks = normal(B, 5, N, H).to(dtype), codes(), normal(N, 2).to(dtype)
    biases = DenseBias(normal(B, 1, 5, S)), Alibi(normal(N).abs())
    for bias in (None, *biases):
        options: dict[str, Any] = {"softcap": 4.0, "scale": 0.3, "bias": bias}
        got = quantized_attention(
            q, *given, block_size=16, sinks=sinks, return_lse=True, backend=name, **options
        )
        assert got[0].dtype == dtype and got[1].dtype == torch.float32
        wanted = by_hand(q, *given, 16, mask=Causal(), sinks=sinks.double(), **options)
        check(got, wanted, TINY[dtype])


def test_float64_queries_are_the_references() -> None:
    q, given = normal(B, 2, N, H).double(), codes()
    with record_selections() as ran:
        got = quantized_attention(q, *given, block_size=16, return_lse=True)
    assert ran[0].backend == "reference" and got[0].dtype == torch.float64
    check(got, by_hand(q, *given, 16, mask=Causal()), 1e-12)


@every_backend
def test_codes_and_scales_at_any_strides(name: str) -> None:
    k, v, ks, vs = codes()
    q = normal(B, 3, N, H)
    wanted = quantized_attention(q, k, v, ks, vs, block_size=16, backend=name)
    wide = torch.full((B, 2 * S, K, 2 * H), 77, dtype=torch.int8)
    wide[:, ::2, :, ::2] = k
    longer = torch.full((K, B, 20), float("nan"))
    longer.transpose(0, 1)[..., : ks.shape[-1]] = ks
    apart = torch.full((B, K, 2 * ks.shape[-1]), float("nan"))
    apart[..., ::2] = ks
    for keys in (k, wide[:, ::2, :, ::2], k.transpose(1, 2).contiguous().transpose(1, 2)):
        for scales in (ks, longer.transpose(0, 1)[..., : ks.shape[-1]], apart[..., ::2]):
            got = quantized_attention(q, keys, v, scales, vs, block_size=16, backend=name)
            assert torch.equal(got, wanted)


@every_backend
def test_every_code_means_its_number(name: str) -> None:
    """Values are read one by one: the key that a query sees alone is what comes out."""
    for dtype in (torch.int8, torch.float8_e4m3fn):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        finite = every[every.float().isfinite()]
        v = finite.view(1, -1, 1, 1)
        scales = torch.full((1, 1, 1), 0.375)
        k, q = torch.zeros_like(v), torch.ones(1, v.shape[1], 1, 1)
        alone = Dense(torch.eye(v.shape[1], dtype=torch.bool))
        got = quantized_attention(
            q, k, v, scales, scales, block_size=1 << 20, mask=alone, backend=name
        )
        torch.testing.assert_close(got.flatten(), finite.float() * 0.375, rtol=2**-22, atol=0.0)


@every_backend
@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("dim", [1, 31, 512, 513, 1024])
def test_sums_of_the_largest_codes_hold(name: str, dim: int, rows: int) -> None:
    q = torch.ones(1, 1, rows, dim, dtype=torch.bfloat16)
    k, v = (torch.full((1, 40, 1, dim), code, dtype=torch.int8) for code in (-127, 127))
    k[:, 17] = 127
    scales = torch.full((1, 1, 1), 2.0**-7)
    _, lse = quantized_attention(
        q, k, v, scales, scales, block_size=64, scale=1 / dim, return_lse=True, backend=name
    )
    wanted = torch.logsumexp(k[0, :, 0, 0].double() / 128, 0)
    torch.testing.assert_close(lse.double(), wanted.expand(1, rows, 1), rtol=1e-3, atol=1e-3)


@every_backend
def test_a_nan_reaches_the_rows_that_see_it(name: str) -> None:
    k, v, ks, vs = codes("float8_e4m3fn")
    q = normal(B, 20, N, H)
    clean = quantized_attention(q, k, v, ks, vs, block_size=16, backend=name)
    for which in range(4):
        given = [x.clone() for x in (k, v, ks, vs)]
        if which < 2:
            given[which].view(torch.uint8)[0, 125, 0] = 0x7F
        else:
            given[which][0, 0, 125 // 16] = float("nan")
        first = 125 if which < 2 else 125 // 16 * 16
        got = quantized_attention(q, *given, block_size=16, backend=name)
        sees = torch.arange(20) + S - 20 >= first
        assert got[0, sees][:, :3].isnan().all()
        assert torch.equal(got[0, ~sees], clean[0, ~sees])
        assert torch.equal(got[0, :, 3:], clean[0, :, 3:]) and torch.equal(got[1], clean[1])


@every_backend
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("t", [0, 1, 3])
def test_no_keys_one_key_and_no_batch(name: str, layout: str, t: int) -> None:
    q = normal(B, t, N, H)
    q = q.transpose(1, 2) if layout == "BNTH" else q
    options: dict[str, Any] = {"layout": layout, "return_lse": True, "backend": name}
    for dtype in CODES:
        given = codes(dtype, layout=layout, length=0)
        out, lse = quantized_attention(q, *given, block_size=16, **options)
        assert out.shape == (*q.shape[:-1], V) and not out.any() and out.dtype == q.dtype
        assert lse.shape == (B, N, t) and bool((lse == float("-inf")).all())
        given = codes(dtype, layout=layout, length=1)
        got = quantized_attention(q, *given, block_size=16, **options)
        check(got, by_hand(q, *given, 16, mask=Causal(), layout=layout))
        given = codes(dtype, layout=layout, batch=0)
        out, lse = quantized_attention(q[:0], *given, block_size=16, **options)
        assert out.shape == (0, *q.shape[1:-1], V) and lse.shape == (0, N, t)


@every_backend
def test_growing_caches_share_one_entry_and_are_checked(name: str) -> None:
    table.forget()
    k, v, ks, vs = codes(block=1)
    q = normal(B, 1, N, H)
    for length in (65, 70, 100, 128):
        part = k[:, :length], v[:, :length], ks[..., :length], vs[..., :length]
        got = quantized_attention(q, *part, block_size=1, return_lse=True, backend=name)
        check(got, by_hand(q, *part, 1, mask=Causal()))
    (row,) = (row for key, row in table.rows.items() if key.door == "quantized")
    assert len(row.by_shapes) == 1 and len(row.by_class) == 1
    with pytest.raises(InvalidProblem, match=r"key_scales of shape .2, 2, 99."):
        quantized_attention(
            q, k[:, :100], v[:, :100], ks[..., :99], vs[..., :100], block_size=1, backend=name
        )
    with pytest.raises(InvalidProblem, match="value_scales of shape"):
        quantized_attention(
            q, k[:, :100], v[:, :100], ks[..., :100], vs[..., :99], block_size=1, backend=name
        )


def test_autocast_casts_the_query_only() -> None:
    q, given = normal(B, 3, N, H), codes()
    with torch.autocast("cpu", torch.bfloat16):
        got = quantized_attention(q, *given, block_size=16, backend="reference")
    wanted = quantized_attention(q.bfloat16(), *given, block_size=16, backend="reference")
    assert got.dtype == torch.bfloat16 and torch.equal(got, wanted)


def test_refused_with_reasons() -> None:
    q, given = normal(B, 3, N, H), codes()
    for name in ("sdpa_flash", "sdpa_math", "flex"):
        with use_backend(name), pytest.raises(Unsupported, match="quantized keys: got int8 codes"):
            quantized_attention(q, *given, block_size=16)
    with record_selections() as ran:
        quantized_attention(q, *given, block_size=16)
    assert ran[0].problem is not None and ran[0].problem.quantized == "int8"
    assert ran[0].backend in BACKENDS


def test_the_reference_has_gradients_of_the_query_alone() -> None:
    q, (k, v, ks, vs) = normal(B, 3, N, H).requires_grad_(), codes()
    out = quantized_attention(q, k, v, ks, vs, block_size=16, backend="reference")
    (got,) = torch.autograd.grad(out.square().sum(), q)
    keys, values = decoded(k, ks, 16, "BTNH"), decoded(v, vs, 16, "BTNH")
    plain = attention(q.double(), keys, values, mask=Causal(), backend="reference")
    (wanted,) = torch.autograd.grad(plain.square().sum(), q)
    torch.testing.assert_close(got, wanted)
    with pytest.raises(InvalidProblem, match="key_scales that need a gradient"):
        quantized_attention(q, k, v, ks.requires_grad_(), vs, block_size=16)
    with torch.no_grad():
        assert quantized_attention(q, k, v, ks, vs, block_size=16).shape == out.shape


@pytest.mark.parametrize(
    ("changes", "about"),
    [
        ({"k": torch.zeros(B, S, K, H)}, "key_codes .2, 131, 2, 24. float32.*expected int8 or fl"),
        ({"v": torch.zeros(B, S, K, V).to(torch.float8_e4m3fn)}, "value_codes.*int8 as key_codes"),
        ({"v": torch.zeros(B, S, K, V)}, "value_codes.*float32 on cpu, expected int8 as key_co"),
        ({"k": [1]}, "key of type list"),
        ({"v": torch.zeros(B, S + 1, K, V).to(torch.int8)}, "as many keys"),
        ({"q": torch.zeros(B, N, H)}, "4 dims"),
        ({"q": torch.zeros(B, 1, N, H).to(torch.int8)}, "query of dtype int8"),
        ({"q": torch.zeros(B, 1, N, H + 1)}, "one head dim"),
        ({"q": 3}, "query of type int"),
        ({"ks": torch.zeros(B, K, 9).double()}, "key_scales .2, 2, 9. float64.*expected float32"),
        ({"vs": 0.5}, "value_scales of type float"),
        ({"ks": torch.zeros(B, K, 8)}, "key_scales of shape .2, 2, 8., expected .2, 2, 9."),
        ({"vs": torch.zeros(K, 9)}, "value_scales of shape .2, 9."),
        ({"ks": torch.zeros(B, K, 9, device="meta")}, "on meta, expected float32 on cpu"),
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": 16.0}, "block_size=16.0"),
        ({"block_size": True}, "block_size=True"),
        ({"block_size": [16]}, "block_size=.16."),
        ({"layout": "packed"}, "layout='packed' with quantised keys"),
        ({"layout": "NTBH"}, "layout='NTBH'"),
        ({"mask": Packed([0, 1], [0, S])}, "Packed"),
        ({"mask": torch.ones(1)}, "mask of type Tensor"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@every_backend
def test_wrong_calls(name: str, changes: dict[str, Any], about: str) -> None:
    k, v, ks, vs = codes()
    given = {"q": normal(B, 1, N, H), "k": k, "v": v, "ks": ks, "vs": vs, **changes}
    options = {"block_size": 16}
    options |= {name: given.pop(name) for name in ("block_size", "mask", "layout") if name in given}
    for _ in range(2):  # also where the right call is remembered
        with pytest.raises(InvalidProblem, match=about):
            quantized_attention(*given.values(), **options, backend=name)
        quantized_attention(normal(B, 1, N, H), k, v, ks, vs, block_size=16, backend=name)


def test_compilers_are_told() -> None:
    compiled = torch.compile(quantized_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"inside torch\.compile"):
        compiled(normal(B, 1, N, H), *codes(), block_size=16)


def test_the_problem_keeps_its_codes() -> None:
    plain = Problem(batch=1, q_len=1, kv_len=9, heads=4, kv_heads=4, head_dim=8)
    codes = plain.with_(quantized="int8")
    assert "quantized" not in plain.to_json() and "quantized='int8'" in str(codes)
    for one in (plain, codes):
        assert Problem.from_json(one.to_json()) == one
    assert codes.demands - plain.demands == {"quantized"}
    assert len({problem_class(p) for p in (plain, codes, plain.with_(quantized=CODES[1]))}) == 3
    with pytest.raises(InvalidProblem, match="quantized='int4'"):
        plain.with_(quantized="int4")
    with pytest.raises(TuningError, match="quantised"):
        build(Case(codes, None, (False,) * 3, None))

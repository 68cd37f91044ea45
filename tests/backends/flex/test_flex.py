"""FlexAttention against the reference, on both its routes, and what the routes promise."""

import threading

import pytest
import torch
from torch.autograd import forward_ad

from polyattn import Problem
from polyattn.backends.flex.torch import flex_kernel as flex
from polyattn.backends.flex.torch import routes
from polyattn.backends.flex.torch.blocks import block_cache
from polyattn.errors import Unsupported
from polyattn.masks import (
    BlockMap,
    Causal,
    Chunked,
    Dense,
    Dilated,
    FirstKeys,
    LeftPadding,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    Window,
)
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.selection.registry import registry
from polyattn.torch import attention
from polyattn.torch.admission import admit

TINY = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
compiles_here = pytest.mark.skipif(not flex.can_compile("cpu"), reason="no compiler for CPUs")
slow = pytest.mark.slow


def arrays(b=2, t=20, s=33, n=4, k=2, h=8, v=5, dtype=torch.float32, packed=False):
    lead = () if packed else (b,)
    shapes = ((*lead, t, n, h), (*lead, s, k, h), (*lead, s, k, v))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def bits(*shape):
    return torch.rand(shape) > 0.5


def block_map(t, s, block_q, block_k, b=2, n=4):
    rows, blocks = -(-t // block_q), -(-s // block_k)
    order = torch.rand(b, n, rows, blocks).argsort(-1).to(torch.int32)
    return BlockMap(block_q, block_k, order, torch.randint(0, blocks + 1, (b, n, rows)).int())


def masks(t, s):
    return {
        "none": None,
        "causal": Causal(),
        "top_left": Causal("top_left"),
        "window": Window(left=3, right=2),
        "causal_window": Causal() & Window(left=4),
        "padding": Padding([t, min(t, 3)], [0, s - 1]),
        "segments": Segments(torch.randint(0, 3, (2, t)), torch.randint(0, 3, (s,))),
        "left_padding": LeftPadding([0, min(t, 3)], [0, s - 1]),
        "chunks": Chunked(7) & Causal(),
        "steps": Dilated(3) & Window(left=9),
        "first_keys": Causal() & (Window(left=4) | FirstKeys(2)),
        "not": ~(Causal() & ~Padding(None, [0, s - 1])),
        "prefix": PrefixLM([4, 0]),
        "blocks": block_map(t, s, 8, 16),
        "dense": Dense(bits(2, 1, t, s)),
        "dense_rows": Dense(bits(4, 1, s)),
        "or": (Causal() & Padding(None, [s, 5])) | Dense(bits(t, s)),
        "and": Dense(bits(1, 4, t, 1)) & PrefixLM([2, 9]) & Window(left=6),
    }


KINDS = tuple(masks(20, 33))


def direct(q, k, v, config, **options):
    """Run the backend with a configuration, past the selection."""
    call = admit(q, k, v, **options)
    assert not registry["flex"].check(call.problem)
    kernel = registry["flex"].load()(call.problem, config)
    return kernel(q, k, v, call.mask, call.bias, call.sinks)


def agree(got, wanted, dtype):
    torch.testing.assert_close(got.double(), wanted, rtol=TINY[dtype], atol=TINY[dtype])


def check(q, k, v, **options):
    """Compare output and lse of the eager route with the reference."""
    out, lse = attention(q, k, v, backend="flex", return_lse=True, **options)
    wide = [x.double() for x in (q, k, v)]
    want, want_lse = attention(*wide, backend="reference", return_lse=True, **options)
    agree(out, want, q.dtype)
    agree(lse, want_lse, torch.promote_types(q.dtype, torch.float32))
    assert out.dtype == q.dtype
    assert lse.dtype == (q.dtype if q.dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("t", "s"), [(20, 33), (33, 20), (1, 19)])
def test_masks(kind, t, s):
    torch.manual_seed(t)
    check(*arrays(t=t, s=s), mask=masks(t, s)[kind])


@pytest.mark.parametrize("dtype", TINY)
@pytest.mark.parametrize("kind", ["none", "causal_window", "padding", "blocks"])
def test_everything_at_once(kind, dtype):
    torch.manual_seed(1)
    q, k, v = arrays(dtype=dtype)
    options = {"mask": masks(20, 33)[kind], "softcap": 1.5, "scale": 0.4}
    check(q, k, v, bias=DenseBias(torch.randn(1, 4, 20, 33)), sinks=torch.randn(4, 2), **options)
    check(q, k, v, bias=Alibi(torch.rand(2, 4)), sinks=torch.randn(4), **options)
    check(q, k, v, bias=DenseBias(torch.randn(33)), **options)


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_layouts_and_strides(layout):
    torch.manual_seed(2)
    q, k, v = arrays()
    if layout == "BNTH":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    wide = [torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)]
    assert wide[0].stride(-1) == 2
    check(*wide, mask=Causal(), layout=layout)
    check(q[:, ::2], k, v, layout=layout, mask=Causal())


@pytest.mark.parametrize(
    "joined", [None, Causal(), Causal() & Window(left=2), Padding([4, 1, 0, 9], [3, 0, 2, 9])]
)
def test_packed(joined):
    torch.manual_seed(3)
    packed = Packed([0, 4, 6, 6, 20], [0, 5, 5, 9, 33])
    mask = packed if joined is None else packed & joined
    check(*arrays(packed=True), mask=mask, layout="packed")
    check(
        *arrays(packed=True),
        mask=mask & Segments(torch.arange(20) // 3, torch.arange(33) // 4),
        layout="packed",
        sinks=torch.randn(4),
    )


def test_rows_without_keys_give_zero_and_minus_infinity():
    q, k, v = arrays()
    out, lse = attention(q, k, v, mask=Padding([20, 3], [0, 33]), backend="flex", return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    assert (out[1, 3:] == 0).all()
    out = direct(q, k, v, {"compile": False}, bias=DenseBias(torch.full((33,), -torch.inf)))
    assert (out == 0).all()


@pytest.mark.parametrize("rows", [1, 7])
def test_a_few_rows_at_a_time(rows, monkeypatch):
    monkeypatch.setattr(routes, "_EAGER_SCORES", rows * 2 * 4 * 34)
    torch.manual_seed(4)
    for kind, mask in masks(20, 33).items():
        bias = Alibi(torch.rand(4)) if kind < "d" else DenseBias(torch.randn(2, 1, 20, 33))
        check(*arrays(), mask=mask, bias=bias, sinks=torch.randn(4))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("compile_", [False, pytest.param(True, marks=[slow, compiles_here])])
def test_masked_poison_changes_no_bit(poison, compile_):
    torch.manual_seed(5)
    q, k, v = arrays()
    mask, config = Causal() & Padding([20, 11], [33, 7]), {"compile": compile_}
    clean = direct(q, k, v, config, mask=mask)
    qp, kp, vp = q.clone(), k.clone(), v.clone()
    qp[1, 11:] = kp[1, 7:] = vp[1, 7:] = poison
    assert torch.equal(direct(qp, kp, vp, config, mask=mask), clean)
    kp, vp = k.clone(), v.clone()
    kp[0, 30] = vp[0, 30] = poison
    seen = torch.arange(20) + 13 >= 30  # the queries that may attend key 30
    out = direct(q, kp, vp, config, mask=mask)
    assert torch.equal(out[0, ~seen], clean[0, ~seen])
    assert torch.equal(out[1], clean[1])
    assert not out[0, seen].isfinite().any()


@pytest.mark.parametrize("kind", ["none", "causal", "padding", "blocks", "or"])
@pytest.mark.parametrize("what", ["dense", "alibi"])
def test_gradients(kind, what):
    torch.manual_seed(6)
    mask, dtype = masks(20, 33)[kind], torch.float64
    array = torch.randn(1, 4, 20, 33) if what == "dense" else torch.rand(4)
    start = [*arrays(dtype=dtype), array.to(dtype), torch.randn(4, dtype=dtype)]
    results = []
    for backend in ("flex", "reference"):
        q, k, v, extra, sinks = leaves = [x.clone().requires_grad_() for x in start]
        bias = DenseBias(extra) if what == "dense" else Alibi(extra)
        out, lse = attention(
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            sinks=sinks,
            softcap=2.0,
            return_lse=True,
            backend=backend,
        )
        results.append(torch.autograd.grad(out.square().sum() + lse.sin().sum(), leaves))
    for got, wanted in zip(*results, strict=True):
        agree(got, wanted, dtype)


def test_gradients_of_poisoned_and_empty_rows_are_finite():
    q, k, v = arrays()
    k[1, 7:] = v[1, 7:] = q[0] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(q, k, v, mask=Padding([0, 20], [33, 7]), backend="flex")
    for x in torch.autograd.grad(out.sum(), leaves):
        assert x.isfinite().all()


def test_gradients_stop_at_biases_of_minus_infinity():
    torch.manual_seed(17)
    bias = torch.randn(20, 33, dtype=torch.float64)
    bias[3] = bias[:, 9] = -torch.inf
    for sinks in (None, torch.randn(4, dtype=torch.float64)):
        results = []
        for backend in ("flex", "reference"):
            torch.manual_seed(18)
            leaves = [x.requires_grad_() for x in (*arrays(dtype=torch.float64), bias.clone())]
            out = attention(*leaves[:3], bias=DenseBias(leaves[3]), sinks=sinks, backend=backend)
            results.append(torch.autograd.grad(out.square().sum(), leaves))
        for got, wanted in zip(*results, strict=True):
            agree(got, wanted, torch.float64)


def test_gradients_are_the_same_twice():
    torch.manual_seed(7)
    start = [*arrays(b=2, t=150, s=170, n=8, k=2), torch.randn(170), torch.randn(8)]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        grads = []
        for _ in range(3):
            leaves = [x.clone().requires_grad_() for x in start]
            out = attention(
                *leaves[:3],
                bias=DenseBias(leaves[3]),
                sinks=leaves[4],
                mask=Causal(),
                backend="flex",
                deterministic=True,
            )
            grads.append(torch.autograd.grad(out.square().sum(), leaves))
    finally:
        torch.set_num_threads(threads)
    for again in grads[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads[0], again, strict=True))


def test_autocast_of_the_input_dtype_keeps_the_accuracy():
    torch.manual_seed(8)
    q, k, v = arrays(dtype=torch.bfloat16)
    plain = attention(q, k, v, mask=Causal(), backend="flex")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attention(q, k, v, mask=Causal(), backend="flex"), plain)


def test_parameters_without_gradient_are_welcome():
    q, k, v = (torch.nn.Parameter(x) for x in arrays())
    with torch.no_grad():
        check(q, k, v, mask=Causal())


def test_small_problems_stay_eager_and_large_ones_compile():
    facts = {"batch": 1, "heads": 8, "kv_heads": 8, "head_dim": 64}
    small, large = (Problem(q_len=n, kv_len=n, **facts) for n in (256, 1024))
    assert not flex.wants_compiling(small, {})
    assert flex.wants_compiling(large, {}) == flex.can_compile("cpu")
    assert flex.wants_compiling(small, {"compile": True}) == flex.can_compile("cpu")
    assert not flex.wants_compiling(large, {"compile": False})
    for unable in ({"lse": True}, {"grad": True}, {"dtype": "float64"}):
        assert not flex.wants_compiling(large.with_(**unable), {"compile": True})


def test_the_threshold_leads_to_compiled_code(monkeypatch):
    asked = []

    def compiled(klass):
        return lambda q, k, v, terms, blocks: (asked.append(klass), (q[..., :5], None))[1]

    monkeypatch.setattr(flex, "can_compile", lambda device: True)
    monkeypatch.setattr(flex, "compiled", compiled)
    monkeypatch.setattr(flex, "COMPILE_FROM", 2 * 4 * 20 * 33 * (8 + 5))
    q, k, v = arrays()
    direct(q[:, 1:], k, v, {}, mask=Causal())
    assert not asked
    direct(q, k, v, {}, mask=Causal())
    direct(q, k, v, {})
    assert [klass.symbolic for klass in asked] == [True, True]


def test_without_a_compiler_everything_is_eager(monkeypatch):
    monkeypatch.setattr(flex, "_has_compiler", lambda device: False)
    monkeypatch.setattr(routes, "compiled", None)
    q, k, v = arrays()
    want = attention(q, k, v, mask=Causal(), backend="reference")
    agree(direct(q, k, v, {"compile": True}, mask=Causal()), want.double(), torch.float32)


# --- the compiled route ------------------------------------------------------------------------


def count_compiles(monkeypatch):
    """Record each graph that the compiler takes in."""
    made = []
    real = torch._dynamo.convert_frame._compile

    def noted(*args, **kwargs):
        made.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", noted)
    return made


def check_compiled(q, k, v, **options):
    out = direct(q, k, v, {"compile": True}, **options)
    wide = [x.double() for x in (q, k, v)]
    agree(out, attention(*wide, backend="reference", **options), q.dtype)
    assert torch.equal(out, direct(q, k, v, {"compile": True}, **options))


@slow
@compiles_here
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("or", torch.float32), ("blocks", torch.bfloat16), ("segments", torch.float16)],
)
def test_compiled_masks(kind, dtype):
    torch.manual_seed(9)
    t, s = 150, 170
    check_compiled(*arrays(t=t, s=s, h=16, dtype=dtype), mask=masks(t, s)[kind])


@slow
@compiles_here
@pytest.mark.parametrize(
    ("s", "h", "sinks"), [(8, 8, None), (24, 16, None), (23, 8, 1), (16, 8, None)]
)
def test_what_lies_after_the_keys_is_not_read(s, h, sinks):
    """Torch's template takes 16 keys where 8 are left, for head dims of one or two vectors."""
    q, _, v = arrays(b=1, t=9, s=s, h=h)
    after = torch.full((1, s + 16, 2, h), 1e30)
    k = after[:, :s].copy_(torch.randn(1, s, 2, h))
    given = {} if sinks is None else {"sinks": torch.randn(4)}
    check_compiled(q, k, v, **given)


@compiles_here
def test_compiled_sinks_bias_softcap_without_mask():
    torch.manual_seed(10)
    for t, s, cap in ((150, 170, 1.5), (140, 200, 3.0)):
        bias, sinks = DenseBias(torch.randn(1, 4, t, s)), torch.randn(4, 2)
        check_compiled(*arrays(t=t, s=s), bias=bias, sinks=sinks, softcap=cap)


@slow
@compiles_here
def test_compiled_packed_with_sinks():
    torch.manual_seed(11)
    mask = Packed([0, 40, 60, 60, 150], [0, 50, 50, 90, 170]) & Causal() & Window(left=20)
    q, k, v = arrays(t=150, s=170, packed=True)
    check_compiled(q, k, v, mask=mask, layout="packed", sinks=torch.randn(4))


@slow
@compiles_here
def test_other_contents_lengths_and_windows_compile_little(monkeypatch):
    torch.manual_seed(12)
    made = count_compiles(monkeypatch)
    for i in range(8):
        mask = Padding([150, 90 + i], [170, 3 * i]) & Window(left=20)
        check_compiled(*arrays(t=150, s=170), mask=mask)
    assert len(made) == 1
    for i in range(8):
        mask = Padding([150, 90], [170, 3 * i]) & Window(left=20)
        check_compiled(*arrays(t=150 + 9 * i, s=170 + 31 * i), mask=mask)
    assert len(made) <= 4


@slow
@compiles_here
def test_the_compilers_limit_neither_fails_nor_falls_back(monkeypatch):
    torch.manual_seed(13)
    monkeypatch.setattr(routes, "eager", None)
    made = count_compiles(monkeypatch)
    with torch._dynamo.config.patch(recompile_limit=1):
        for t, s in ((150, 170), (100, 170), (150, 170)):  # two blocks of queries, one, two
            check_compiled(*arrays(t=t, s=s), mask=Window(left=30, right=3))
    assert len(made) >= 2


def test_calls_traced_by_the_callers_compiler_are_refused():
    facts = {"batch": 1, "q_len": 8, "kv_len": 8, "heads": 2, "kv_heads": 2, "head_dim": 8}
    problem = Problem(compiled=True, **facts)
    assert registry["flex"].check(problem)
    assert not registry["flex"].check(problem.with_(compiled=False))


def test_dropout_is_refused():
    with pytest.raises(Unsupported, match="dropout"):
        attention(*arrays(), dropout_p=0.5, backend="flex")


# --- which blocks ------------------------------------------------------------------------------


def blocks_of(mask, q, k, v, **options):
    call = admit(q, k, v, mask=mask, **options)
    attend = flex._Attend(call.problem, {"compile": True})
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    dims = flex.Dims.of(q, k)
    return attend._blocks(call.mask, attend._terms(dims, q, call.mask, None, None), dims, q.device)


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("pairs", [1 << 24, 1])
def test_blocks_are_those_of_torch(kind, pairs, monkeypatch):
    from torch.nn.attention.flex_attention import create_block_mask

    from polyattn.backends.flex.torch import blocks
    from polyattn.torch.kit.masking import materialise

    monkeypatch.setattr(blocks, "_BUILD_PAIRS", pairs)
    monkeypatch.setattr(blocks, "block_cache", blocks._BlockCache(0))
    monkeypatch.setattr(flex, "block_cache", blocks.block_cache)
    torch.manual_seed(15)
    t, s = 300, 280
    q, k, v = arrays(t=t, s=s)
    call = admit(q, k, v, mask=masks(t, s)[kind])
    made = blocks_of(call.mask, q, k, v)
    dense = materialise(call.mask, flex.Dims(2, 4, 2, t, s), q.device).expand(2, 4, t, s)
    torchs = create_block_mask(lambda b, h, m, n: dense[b, h, m, n], 2, 4, t, s, device="cpu")
    for name, got in zip(blocks._NAMES, made.tensors, strict=True):
        want = getattr(torchs, name)
        assert torch.equal(got.expand(want.shape), want), name
    assert torch.equal(made.empty.expand(2, 4, t, 1), ~dense.any(-1, keepdim=True))
    seen = dense.any(-2).unflatten(1, (2, 2)).any(2).unsqueeze(-1)
    assert torch.equal(made.seen.expand(2, 2, s, 1), seen)


def test_blocks_are_kept_until_an_array_changes():
    q, k, v = arrays(t=260, s=260)
    lengths = torch.tensor([260, 200])
    mask, before = Padding(None, lengths), block_cache.built
    first = blocks_of(mask, q, k, v)
    assert blocks_of(mask, q, k, v) is first
    assert blocks_of(Padding(None, lengths.clone()), q, k, v) is first
    assert block_cache.built == before + 1
    lengths[1] = 5
    changed = blocks_of(mask, q, k, v)
    lengths.data[1] = 200  # moves no version counter
    assert torch.equal(blocks_of(mask, q, k, v).seen, first.seen)
    assert not torch.equal(changed.seen, first.seen)
    assert blocks_of(Causal(), q, k, v) is blocks_of(Causal(), q, k, v)


def test_the_cache_of_blocks_is_bounded():
    from polyattn.backends.flex.torch.blocks import _BlockCache

    cache = _BlockCache(2_000)
    q, k, v = arrays(t=30, s=30)
    made = blocks_of(Causal(), q, k, v)
    for left in range(100):
        cache.get((left,), Window(left=left), torch.device("cpu"), lambda: made)
    assert 0 < len(cache._entries) < 100
    assert cache._bytes <= 2_000
    assert any(key[0] == 99 for key in cache._entries)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("compile_from", [0, flex.COMPILE_FROM])
def test_forward_mode(monkeypatch, compile_from, trains):
    monkeypatch.setattr(flex, "COMPILE_FROM", compile_from)
    inputs = arrays()
    moved = [torch.randn_like(x) for x in inputs]
    bias = DenseBias(torch.zeros(20, 33).index_fill(0, torch.tensor(3), float("-inf")))

    def tangents(backend):
        with forward_ad.dual_level():
            given = [
                forward_ad.make_dual(x.clone().requires_grad_(trains), t)
                for x, t in zip(inputs, moved, strict=True)
            ]
            out = attention(*given, mask=Window(left=3, right=2), bias=bias, backend=backend)
            return forward_ad.unpack_dual(out).tangent

    torch.testing.assert_close(tangents("flex"), tangents("portable"))
    call = lambda *given: attention(*given, mask=Causal(), backend="flex")  # noqa: E731
    _, got = torch.func.jvp(call, tuple(inputs), tuple(moved))
    call = lambda *given: attention(*given, mask=Causal(), backend="portable")  # noqa: E731
    torch.testing.assert_close(got, torch.func.jvp(call, tuple(inputs), tuple(moved))[1])


def test_the_cache_of_blocks_serves_threads():
    q, k, v = arrays(t=260, s=260)
    wrong = []

    def work(seed):
        for i in range(10):
            length = 100 + (seed + i) % 3
            made = blocks_of(Padding(None, torch.tensor([length, 260])), q, k, v)
            if int(made.seen[0].sum()) != length:
                wrong.append(length)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@slow
@compiles_here
def test_compiled_calls_follow_arrays_that_change_in_place():
    torch.manual_seed(16)
    q, k, v = arrays(t=150, s=170)
    mask = Dense(bits(150, 170))
    for _ in range(3):
        check_compiled(q, k, v, mask=mask)
        mask.mask.copy_(bits(150, 170) & (torch.arange(170) < 60))

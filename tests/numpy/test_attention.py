"""numpy_attention: what it computes, what it refuses, and that torch is no part of it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import textwrap
import threading
from itertools import pairwise
from random import Random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polyattn import (
    Alibi,
    BlockMap,
    Causal,
    Chunked,
    Dense,
    DenseBias,
    Dilated,
    FirstKeys,
    Full,
    InvalidProblem,
    LeftPadding,
    Mask,
    MissingDependency,
    Packed,
    Padding,
    PrefixLM,
    Segments,
    SettingsError,
    Window,
    numpy_attention,
)
from polyattn.masks import Index
from polyattn.native import module
from polyattn.native.program import MOST_TERMS, encode
from polyattn.selection.registry import Available, Missing

B, N, K, T, S, H, V = 2, 4, 2, 19, 23, 20, 12
DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
built = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the extension is not built"
)


def draw(dtype: str = "float32", t: int = T, s: int = S, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Return query, key, value with heads second."""
    random = np.random.default_rng(seed)
    shapes = ((B, N, t, H), (B, K, s, H), (B, K, s, V))
    return tuple(random.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)


def painted(mask: Mask | None, t: int = T, s: int = S, b: int = B) -> np.ndarray:
    """Ask the mask at each coordinate alone: (B, N, T, S)."""
    seen = np.ones((b, N, t, s), dtype=bool)
    if mask is not None:
        for place in np.ndindex(*seen.shape):
            seen[place] = mask.allows(Index(*place, t, s, mask.align or "bottom_right"))
    return seen


def naive(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    dtype: Any = np.float64,
) -> dict[str, Any]:
    """Attention by its definition, heads second, with what errors are measured by."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.astype(dtype), *(np.repeat(x.astype(dtype), group, axis=1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.swapaxes(-1, -2)) * dtype(scale)
    size = (np.abs(q) @ np.abs(k).swapaxes(-1, -2)) * abs(scale)
    if softcap is not None:
        scores = dtype(softcap) * np.tanh(scores / dtype(softcap))
    if bias is not None:
        scores, size = scores + bias.astype(dtype), size + np.abs(np.nan_to_num(bias, neginf=0))
    scores = np.where(seen, scores, -np.inf)
    if sinks is not None:
        last = sinks.astype(dtype).reshape(1, len(sinks), 1, -1)
        scores = np.concatenate(
            [scores, np.broadcast_to(last, (*scores.shape[:3], last.shape[3]))], -1
        )
    scores = np.concatenate([scores, np.full((*scores.shape[:3], 1), -np.inf, dtype)], -1)
    top = scores.max(-1, keepdims=True)
    top[top == -np.inf] = 0
    e = np.exp(scores - top)
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    weights = (e / np.where(total == 0, 1, total))[..., : k.shape[2]]
    largest = float(np.where(seen, size, 0).max(initial=0))
    return {"out": weights @ v, "lse": lse, "scale": weights @ np.abs(v), "score": largest}


def check(
    got: tuple[Any, Any], dtype: str, q: Any, k: Any, v: Any, seen: Any, **options: Any
) -> None:
    """Compare out and lse (heads second) with the definition, by the suite's one rule."""
    torch = pytest.importorskip("torch")
    from polyattn.conformance.tolerance import Yardstick, measure

    exact = naive(q, k, v, seen, **options)
    near = naive(q, k, v, seen, dtype=np.float32, **options)
    assert got[0].dtype == DTYPES[dtype] and got[1].dtype == np.float32
    scales = {"out": exact["scale"], "lse": np.ones_like(exact["lse"])}
    for name, array in zip(("out", "lse"), got, strict=True):
        kind = getattr(torch, dtype if name == "out" else "float32")
        yardstick = Yardstick(
            name,
            torch.from_numpy(exact[name]),
            torch.from_numpy(scales[name]),
            exact["score"],
            lambda name=name: torch.from_numpy(near[name]),
            seen.shape[-1],
            name == "lse" and dtype != "float32",
        )
        found = torch.from_numpy(array.astype(np.float64)).to(kind)  # exact: it came from there
        assert measure(found, yardstick) is None, str(measure(found, yardstick))


def call(q: Any, k: Any, v: Any, layout: str = "BNTH", **options: Any) -> tuple[Any, Any]:
    """Call with heads second, in either layout; returns out with heads second, and lse."""
    if layout == "BTNH":
        q, k, v = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v))
    out, lse = numpy_attention(q, k, v, layout=layout, return_lse=True, threads=1, **options)
    return (out.swapaxes(1, 2) if layout == "BTNH" else out), lse


def masks() -> dict[str, Mask | None]:
    random = np.random.default_rng(5)
    indices = random.permuted(np.tile(np.arange(6), (B, N, 4, 1)), axis=-1).astype(np.int32)
    blocks = BlockMap(5, 4, indices, random.integers(0, 5, (B, N, 4)))
    ids = random.integers(0, 3, (B, T)), random.integers(0, 3, (1, S))
    dense = Dense(random.random((N, 1, S)) > 0.5)
    return {
        "none": None, "full": Full(), "causal": Causal(), "top_left": Causal("top_left"),
        "window": Causal() & Window(left=5), "both_sides": Window(3, 2),
        "padding": Padding([T, 7], [4, S]), "padding_lists": Causal() & Padding(kv_lengths=[0, 9]),
        "left_padding": LeftPadding([0, 7], [4, S]), "chunks": Chunked(6) & Causal(),
        "first_keys": Causal() & (Window(left=2) | FirstKeys(3)), "steps": ~Dilated(3),
        "not": ~(blocks | LeftPadding(None, np.array([3, 9]))),
        "segments": Segments(*ids), "segments_shared": Segments([0] * 9 + [1] * 10, ids[1][0]),
        "prefix": PrefixLM(np.array([3, 15], np.int32)), "blocks": blocks, "dense": dense,
        "dense_flipped": Dense((random.random((S, T)) > 0.5)[::-1].T),
        "joined": blocks & (Causal() | Segments(*ids)) | PrefixLM([1, 2]) & dense,
    }  # fmt: skip


@built
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", masks())
def test_it_is_attention(name: str, dtype: str, layout: str) -> None:
    mask, arrays = masks()[name], draw(dtype)
    check(call(*arrays, layout, mask=mask), dtype, *arrays, painted(mask))


@built
def test_a_mask_with_no_program_of_its_own() -> None:
    mask = masks()["joined"]
    for i in range(MOST_TERMS // 2):
        mask = mask & (Dense(np.arange(S) != i) | Padding(kv_lengths=[i, 0]))
    assert mask is not None and encode(mask) is None
    arrays = draw()
    check(call(*arrays, mask=mask), "float32", *arrays, painted(mask))


@built
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_beside_the_mask(dtype: str) -> None:
    arrays, random = draw(dtype), np.random.default_rng(2)
    seen = painted(Causal())
    for shape in ((), (S,), (N, T, 1), (B, 1, T, S)):
        bias = np.asarray(random.standard_normal(shape), dtype=DTYPES[dtype])
        wide = np.broadcast_to(bias.astype(np.float64), seen.shape)
        got = call(*arrays, mask=Causal(), bias=DenseBias(bias), scale=0.3, softcap=2.0)
        check(got, dtype, *arrays, seen, bias=wide, scale=0.3, softcap=2.0)
    hidden = np.where(random.random((T, S)) > 0.5, 0.0, -np.inf)  # float64, and it masks
    got = call(*arrays, bias=DenseBias(hidden))
    check(got, dtype, *arrays, painted(None), bias=np.broadcast_to(hidden, seen.shape))
    away = np.abs(np.arange(T)[:, None] + S - T - np.arange(S))
    for slopes in (random.random(N), random.random((B, N)).astype(np.float16)):
        lean = -slopes.astype(np.float64).reshape(-1, N, 1, 1) * away
        got = call(*arrays, bias=Alibi(slopes))
        check(got, dtype, *arrays, painted(None), bias=np.broadcast_to(lean, seen.shape))
    for sinks in (random.standard_normal(N), random.standard_normal((N, 3)).astype(np.float32)):
        got = call(*arrays, mask=Padding([4, 0]), sinks=sinks)
        check(got, dtype, *arrays, painted(Padding([4, 0])), sinks=sinks.astype(np.float32))


@built
@pytest.mark.parametrize(
    "extra",
    [None, Causal(), Window(2, 1), Padding([3, 0, 4, 9], [2, 0, 3, 9]), PrefixLM([1, 0, 2, 5]),
     Segments([0, 1] * 8), Segments(np.arange(64).reshape(4, 16) % 3)],
    ids=repr,
)  # fmt: skip
def test_packed(extra: Mask | None) -> None:
    cu = np.array([0, 3, 3, 7, 16])
    random = np.random.default_rng(1)
    q, k, v = (random.standard_normal((16, heads, 8), dtype=np.float32) for heads in (N, K, K))
    mask = Packed(cu) if extra is None else Packed(cu) & extra
    out, lse = numpy_attention(q, k, v, mask=mask, layout="packed", return_lse=True, threads=1)
    assert out.shape == (16, N, 8) and lse.shape == (N, 16)
    for i, (low, high) in enumerate(pairwise(cu)):
        part = [x[None, low:high].swapaxes(1, 2) for x in (q, k, v)]
        size = int(high - low)
        seen = np.ones((1, N, size, size), dtype=bool)
        for place in np.ndindex(*seen.shape):
            tokens = low + place[2], low + place[3]
            ix = Index(i, *place[1:], size, size, "bottom_right", True, *tokens)
            seen[place] = mask.allows(ix)
        got = out[None, low:high].swapaxes(1, 2), lse[None, :, low:high]
        check(got, "float32", *part, seen)


def in_numpy(x: Any) -> Any:
    """Turn a tensor into an array that lies in the same memory."""
    import torch

    if not isinstance(x, torch.Tensor):
        return x
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@built
def test_both_fronts_give_the_same_bits() -> None:
    """On the fuzzer's problems: every stride, mask, bias and option."""
    pytest.importorskip("torch")
    from polyattn.conformance.generate import random_case
    from polyattn.conformance.inputs import build
    from polyattn.torch import attention

    rng, compared = Random(3), 0
    while compared < 250:
        inputs = build(random_case(rng).with_(grad="", deterministic=False, quantized=None))
        if inputs.case.dtype == "float64" or inputs.case.s == 0:  # torch's front answers the empty
            continue
        options = dict(inputs.options, return_lse=True)
        del options["deterministic"]
        tensors = inputs.q, inputs.k, inputs.v
        want = attention(*tensors, **options, backend="native_cpu")
        if inputs.bias is not None:
            options["bias"] = inputs.bias.map(lambda name, x: in_numpy(x))
        options["sinks"] = in_numpy(inputs.sinks)
        got = numpy_attention(*map(in_numpy, tensors), **options, threads=1)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == in_numpy(theirs).dtype, inputs.case.spec
            assert np.array_equal(ours, in_numpy(theirs), equal_nan=True), inputs.case.spec
        compared += 1


@built
@pytest.mark.parametrize("name", ["padding", "segments", "blocks", "dense"])
def test_what_is_masked_never_leaks(name: str) -> None:
    mask, (q, k, v) = masks()[name] & Padding(kv_lengths=[S, 9]), draw()
    clean, lse = call(q, k, v, mask=mask)
    seen = painted(mask).reshape(B, K, N // K, T, S)
    unseen = ~seen.any((2, 3))
    k, v = k.copy(), v.copy()
    k[unseen], v[unseen] = np.nan, np.inf
    struck = call(q, k, v, mask=mask)
    assert unseen.any() and np.isfinite(clean).all()
    assert np.array_equal(clean, struck[0]) and np.array_equal(lse, struck[1])
    empty = ~painted(mask).any(-1)
    assert (clean[empty] == 0).all() and (lse[empty] == -np.inf).all()
    assert np.isfinite(lse[~empty]).all()


@built
@pytest.mark.parametrize("sizes", [(0, T, S), (B, 0, S), (B, T, 0), (0, 0, 0)])
def test_empty_arrays(sizes: tuple[int, int, int]) -> None:
    b, t, s = sizes
    q, k, v = (x[:b] for x in draw(t=t, s=s))
    sinks = np.full((N, 2), 0.5)
    for mask in (None, Causal(), Padding([0] * b, [0] * b)):
        out, lse = call(q, k, v, mask=mask)
        assert out.shape == (b, N, t, V) and lse.shape == (b, N, t)
        out, lse = call(q, k, v, mask=mask, sinks=sinks)
        if s == 0:
            check((out, lse), "float32", q, k, v, painted(None, t, s, b), sinks=sinks)
    nothing = [np.zeros((0, *x.shape[1::2]), x.dtype) for x in (q, k, v)]
    out = numpy_attention(*nothing, mask=Packed([0]) & Causal(), layout="packed")
    assert out.shape == (0, N, V)


@built
def test_any_memory_is_read_as_its_values() -> None:
    q, k, v = draw()
    want, lse = call(q, k, v, mask=Causal())
    records = np.zeros(q.shape, dtype=[("flag", "u1"), ("x", "f4")])  # five bytes: not aligned
    records["x"] = q
    pairs = np.zeros((*v.shape[:-1], V, 2), np.float32)
    pairs[..., 0] = v
    readonly = k.copy()
    readonly.flags.writeable = False
    for way in (
        (q[:, :, ::-1].copy()[:, :, ::-1], k[..., ::-1].copy()[..., ::-1], pairs[..., 0]),
        (records["x"], np.asfortranarray(k), v.swapaxes(1, 2).copy().swapaxes(1, 2)),
        (q.astype(">f4"), readonly, v),
    ):
        out, again = call(*way, mask=Causal())
        assert np.array_equal(out, want) and np.array_equal(again, lse)
        assert out.flags.c_contiguous and out.flags.writeable
    one = np.broadcast_to(k[:1, :1], k.shape)  # strides of 0
    assert np.array_equal(call(q, one, v)[0], call(q, one.copy(), v)[0])
    bias = np.random.default_rng(0).standard_normal((S, T)).astype(np.float32)
    for given in (bias.T, bias[::-1, ::-1].copy()[::-1, ::-1].T):
        got = call(q, k, v, bias=DenseBias(given), sinks=bias[::-2, 0][:N])
        same = call(q, k, v, bias=DenseBias(bias.T.copy()), sinks=bias[::-2, 0][:N].copy())
        assert np.array_equal(got[0], same[0]) and np.array_equal(got[1], same[1])


@built
def test_masks_and_biases_of_another_byte_order_are_read_as_their_values() -> None:
    q, k, v = draw()
    rng = np.random.default_rng(0)
    lengths, ids = rng.integers(0, S, B), [rng.integers(0, 3, n) for n in (T, S)]
    slopes = rng.random(N).astype(np.float32)
    for mask, same in (
        (Padding(kv_lengths=lengths.astype(">i4")), Padding(kv_lengths=lengths)),
        (Segments(*(x.astype(">u2") for x in ids)), Segments(*ids)),
    ):
        for bias in (slopes, slopes.astype(">f4"), slopes.astype(">f8")):
            got, want = (call(q, k, v, mask=m, bias=Alibi(b)) for m, b in
                         ((mask, bias), (same, slopes)))  # fmt: skip
            assert np.array_equal(got[0], want[0]) and np.array_equal(got[1], want[1])


@built
def test_returns_out_alone_unless_asked() -> None:
    q, k, v = draw()
    out = numpy_attention(q, k, v, layout="BNTH", scale=np.float32(0.25), threads=np.int64(1))
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, call(q, k, v, scale=0.25)[0])


@built
def test_threads_and_calls_from_many_threads() -> None:
    q, k, v = draw(t=130, s=300)
    wrong: list[Any] = []

    def work(threads: int | None) -> None:
        for _ in range(20):
            got = numpy_attention(q, k, v, layout="BNTH", mask=Causal(), threads=threads)
            wrong.extend([threads] if not np.array_equal(got, want[threads]) else [])

    counts = (None, 1, 2, 3)
    want = {n: numpy_attention(q, k, v, layout="BNTH", mask=Causal(), threads=n) for n in counts}

    workers = [threading.Thread(target=work, args=(n,)) for n in counts]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
    assert not wrong and not any(worker.is_alive() for worker in workers)


Q, KEY, VALUE = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in draw())


NAMES = ("query", "key", "value")


class Tensor:
    """What another library's array looks like from here."""


Tensor.__module__ = "torch"


@built
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": [1.0]}, "list, expected a numpy.ndarray"),
        ({"query": Tensor()}, "call polyattn.torch.attention"),
        ({"key": np.ma.masked_array(KEY)}, "masked array"),
        ({"query": Q[0]}, r"4 dims \(B, T, N, H\)"),
        (
            {name: x.astype(np.float64) for name, x in zip(NAMES, (Q, KEY, VALUE), strict=True)},
            "float64.*astype",
        ),
        ({"query": Q.astype(np.int32)}, "int32, expected one of float16"),
        ({"key": KEY.astype(np.float16)}, "float16 on cpu with query float32"),
        ({"key": KEY[:1]}, "one batch size"),
        ({"key": KEY[..., :8]}, "one head dim"),
        ({"value": VALUE[:, :5]}, "as many keys"),
        ({"key": Q[:, :, :3], "value": Q[:, :, :3]}, "4 query heads with 3"),
        ({"value": VALUE[..., :0]}, "value_dim must be 1 to 1024"),
        ({"layout": "NTBH"}, "expected one of BTNH"),
        ({"layout": "packed"}, "3 dims"),
        ({"scale": "1"}, "expected a Python number"),
        ({"return_lse": "no"}, "expected True or False"),
        ({"scale": float("nan")}, "finite"),
        ({"scale": np.complex64(1)}, "expected a Python number"),
        ({"softcap": 0}, "softcap=0"),
        ({"mask": np.ones((T, S), bool)}, "polyattn.Dense"),
        ({"mask": "causal"}, "see polyattn.masks"),
        ({"mask": Padding(kv_lengths=[S + 1, 1])}, f"expected 0 to {S}"),
        ({"mask": Padding(q_lengths=np.array([-1, 1]))}, f"expected 0 to {T}"),
        ({"mask": Padding(kv_lengths=[1])}, r"expected \(2,\)"),
        ({"mask": PrefixLM([0, S + 1])}, f"expected 0 to {S}"),
        ({"mask": Segments([0] * 7)}, r"expected \(19,\)"),
        ({"mask": Dense(np.ones((7, S), bool))}, "broadcastable"),
        ({"mask": BlockMap(4, 4, [[[[0]]]], [[[1]]])}, "for 5 blocks of queries"),
        ({"mask": BlockMap(10, 4, [[[[6], [0]]]], [[[1, 1]]])}, "outside of 0 to 5"),
        ({"mask": BlockMap(10, 4, [[[[-1], [0]]]], [[[1, 1]]])}, "outside of 0 to 5"),
        ({"mask": BlockMap(10, 4, [[[[0], [0]]]], [[[2, 1]]])}, "expected 0 to 1"),
        ({"mask": Packed([0, T], [0, S])}, 'expected layout="packed"'),
        ({"bias": np.zeros((T, S))}, "polyattn.DenseBias"),
        ({"bias": DenseBias(np.zeros((7, S)))}, "broadcastable"),
        ({"bias": Alibi(np.zeros(3))}, r"\(4,\) or \(2, 4\) slopes"),
        ({"sinks": np.zeros(3)}, "N = 4"),
        ({"sinks": np.zeros(4, int)}, "expected floating point"),
        ({"sinks": 1.0}, "expected a numpy.ndarray"),
        ({"threads": 0}, "expected 1 to 1024"),
        ({"threads": 1025}, "expected 1 to 1024"),
        ({"threads": True}, "expected an integer"),
        ({"threads": 2.0}, "expected an integer"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, dict) else "",
)
def test_wrong_calls(change: dict[str, Any], message: str) -> None:
    arguments = {"query": Q, "key": KEY, "value": VALUE} | change
    with pytest.raises(InvalidProblem, match=rf"(?s)got .*{message}"):
        numpy_attention(**arguments)


@built
@pytest.mark.parametrize(
    "mask",
    [
        None,
        Causal(),
        Packed([0, 3, 8]) | Causal(),
        Packed([0, 3, 7]),
        Packed([1, 3, 8]),
        Packed([0, 5, 3, 8]),
        Packed([0, 3, 8]) & Dense(np.ones((8, 8), dtype=bool)),
        Packed([0, 3, 8]) & Padding(kv_lengths=[1]),
    ],
    ids=repr,
)
def test_wrong_packed_calls(mask: Any) -> None:
    q = np.zeros((8, 2, 16), np.float32)
    with pytest.raises(InvalidProblem, match=r"(?s)got .*expected"):
        numpy_attention(q, q, q, mask=mask, layout="packed")


@built
def test_a_mask_that_numpy_cannot_read() -> None:
    class Elsewhere:
        shape, dtype = (B,), "int32"

        def __array__(self, *_: Any, **__: Any) -> Any:
            raise TypeError("it is on another device")

    with pytest.raises(InvalidProblem, match=r"kv_lengths NumPy cannot read.*another device"):
        numpy_attention(Q, KEY, VALUE, mask=Padding(kv_lengths=Elsewhere()))


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_import", lambda: Missing("it is not here", "build it"))
    with pytest.raises(MissingDependency, match=r"it is not here.*build it"):
        numpy_attention(Q, KEY, VALUE)


def in_new_process(code: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@built
def test_torch_is_no_part_of_it() -> None:
    seen = in_new_process(
        """
        import json, sys
        import polyattn
        before = sorted({"torch", "numpy"} & sys.modules.keys())
        import numpy as np
        x = np.ones((1, 5, 2, 8), np.float32)
        out = polyattn.numpy_attention(x, x, x, mask=polyattn.Causal())
        frameworks = {"torch", "jax", "ml_dtypes"} & sys.modules.keys()
        print(json.dumps([before, sorted(frameworks), bool(np.allclose(out, 1))]))
        """
    )
    assert seen == [[], [], True]


def test_without_numpy() -> None:
    told = in_new_process(
        """
        import json, sys
        sys.modules["numpy"] = None  # as if it were not installed
        import polyattn
        try:
            polyattn.numpy_attention(None, None, None)
        except polyattn.MissingDependency as error:
            print(json.dumps(str(error)))
        """
    )
    assert "pip install 'polyattn[numpy]'" in told


@built
def test_the_environment_names_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = draw()
    for isa in module.isas():
        monkeypatch.setenv("POLYATTN_NATIVE_ISA", isa)
        check(call(*arrays, mask=Causal()), "float32", *arrays, painted(Causal()))
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", "mmx")
    with pytest.raises(SettingsError, match="mmx"):
        numpy_attention(Q, KEY, VALUE)

"""Codes of keys and values: their error, and that a cache's do not depend on how its keys came."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from polyattn import Causal
from polyattn.errors import InvalidProblem
from polyattn.torch import QuantizedCache, attention, quantize_kv

DTYPES: Any = ("int8", "float8_e4m3fn")
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}
SMALLEST = 2.0**-126
B, K, H, V = 2, 3, 8, 5
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def rows(length: int, dim: int = H, seed: int = 1) -> torch.Tensor:
    """Draw rows of many magnitudes, some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((B, length, K, dim), generator=generator)
    x = x * torch.randn((B, length, K, 1), generator=generator).mul(3).exp()
    x[:, 20:40] = 0
    return x


def blocks_of(x: torch.Tensor, block: int) -> list[torch.Tensor]:
    """Split (B, S, K, H) into blocks (B, K, rows, H) in float64."""
    return [part.double().transpose(1, 2) for part in x.split(block, 1)] if x.shape[1] else []


@every_dtype
@pytest.mark.parametrize("block", [1, 16, 64, 100])
@pytest.mark.parametrize(
    "kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_error_and_scales(kind: torch.dtype, block: int, dtype: Any) -> None:
    x = rows(131).clamp(-6e4, 6e4).to(kind)
    codes, scales = quantize_kv(x, dtype=dtype, block_size=block)
    assert codes.dtype == getattr(torch, dtype) and codes.shape == x.shape
    assert scales.dtype == torch.float32 and scales.shape == (B, K, -(-131 // block))
    parts = zip(blocks_of(x, block), blocks_of(codes, block), strict=True)
    for i, (true, code) in enumerate(parts):
        scale = scales[:, :, i].double()
        wanted = (true.abs().amax((2, 3)) / LARGEST[dtype]).clamp(min=SMALLEST)
        torch.testing.assert_close(scale, wanted, rtol=2**-22, atol=0.0)
        each = scale[..., None, None]
        error = (code * each - true).abs()
        bound = each / 2 if dtype == "int8" else (true.abs() / 16).maximum(each / 1024)
        assert bool((error <= bound * (1 + 2**-15)).all())


@every_dtype
def test_ties_go_to_even_and_the_ends_are_reached(dtype: Any) -> None:
    top = LARGEST[dtype]
    given = torch.tensor([top, -top, 0.5, 1.5, 2.5, -2.5, 17.0, 19.0])
    codes, scales = quantize_kv(given.view(1, 1, 1, -1), dtype=dtype)
    wanted = {
        "int8": [127, -127, 0, 2, 2, -2, 17, 19],
        "float8_e4m3fn": [448, -448, 0.5, 1.5, 2.5, -2.5, 16, 20],
    }
    assert scales.item() == 1.0 and codes.float().flatten().tolist() == wanted[dtype]


@every_dtype
def test_nothing_leaves_the_range_of_codes(dtype: Any) -> None:
    """Whatever the largest is, its code is the largest, and never NaN."""
    largest = torch.cat(
        [torch.rand(4000).add(1e-3) * 10.0**e for e in (-44, -38, -37, -3, 0, 3, 38)]
    )
    x = torch.stack((largest, -largest), -1).view(1, -1, 1, 2)
    codes, scales = quantize_kv(x, dtype=dtype, block_size=1)
    got = codes.double().view(-1, 2)
    assert bool(got.isfinite().all()) and bool((got[:, 0] == -got[:, 1]).all())
    assert bool((got.abs() <= LARGEST[dtype]).all()) and bool((scales >= SMALLEST).all())
    normal = largest > SMALLEST * 500
    assert bool((got[normal, 0] == LARGEST[dtype]).all())


@every_dtype
def test_torchs_own_dtypes_name_the_codes_too(dtype: Any) -> None:
    x = torch.randn(1, 70, 2, 16)
    for mine, theirs in zip(
        quantize_kv(x, dtype=dtype), quantize_kv(x, dtype=getattr(torch, dtype)), strict=True
    ):
        assert torch.equal(mine.float(), theirs.float())
    cache = QuantizedCache(1, 2, 16, dtype=getattr(torch, dtype))
    cache.append(x, x)
    assert cache.keys.dtype == getattr(torch, dtype)
    for wrong in (torch.float16, "int4", None, ["int8"]):
        with pytest.raises(InvalidProblem, match="expected one of 'int8'"):
            quantize_kv(x, dtype=wrong)  # type: ignore[arg-type]


@every_dtype
def test_zeros_stay_zeros(dtype: Any) -> None:
    codes, scales = quantize_kv(torch.zeros(1, 5, 2, 4), dtype=dtype, block_size=2)
    assert not codes.float().any() and bool((scales == SMALLEST).all())
    cache = QuantizedCache(1, 2, 4, dtype=dtype)
    cache.append(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    assert not any(x.any() for x in cache.dequantized())


@every_dtype
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("block", [1, 3, 16, 100, 1 << 40])
@pytest.mark.parametrize("value_dim", [H, V])
def test_the_division_into_appends_does_not_matter(
    value_dim: int, block: int, layout: str, dtype: Any
) -> None:
    rng = random.Random(block + value_dim)
    dim = 1 if layout == "BTNH" else 2
    whole = [rows(130), rows(130, value_dim, seed=2)]
    whole = [x if layout == "BTNH" else x.transpose(1, 2) for x in whole]
    expected = [quantize_kv(x, dtype=dtype, block_size=block, layout=layout) for x in whole]
    for _ in range(6):
        cache = QuantizedCache(
            B, K, H, value_dim=value_dim, dtype=dtype, block_size=block, layout=layout,
            capacity=rng.choice((0, 1, 50, 200)),
        )  # fmt: skip
        steps = rng.choice(((1,), (1, 1, 2, 5), (1, 40), (70, 1, 60), (0, 130)))
        while cache.length < 130:
            count = min(rng.choice(steps), 130 - cache.length)
            cache.append(*(x.narrow(dim, cache.length, count) for x in whole))
            if rng.random() < 0.2:
                cache.truncate(cache.length - rng.randint(0, min(count, block, 3)))
        got = (cache.keys, cache.key_scales), (cache.values, cache.value_scales)
        for (codes, scales), (wanted, their) in zip(got, expected, strict=True):
            assert codes.shape == wanted.shape and codes.stride(-1) == 1
            assert torch.equal(bits(codes), bits(wanted)) and torch.equal(scales, their)


def test_every_dtype_may_come_and_each_is_rounded_once() -> None:
    kinds = torch.float32, torch.bfloat16, torch.float64, torch.float16
    parts = [rows(9, seed=i).clamp(-1e4, 1e4).to(kind) for i, kind in enumerate(kinds)]
    cache = QuantizedCache(B, K, H, block_size=16)
    for part in parts:
        cache.append(part, part.bfloat16())
    codes, scales = quantize_kv(torch.cat([x.double() for x in parts], 1), block_size=16)
    assert torch.equal(cache.keys, codes) and torch.equal(cache.key_scales, scales)


@every_dtype
@pytest.mark.parametrize("first", [1, 30, 64, 100, 128, 200])
def test_truncating(first: int, dtype: Any) -> None:
    """Back to the begin of the full block before the open one, and to where a block ends."""
    x, other = rows(260), rows(260, seed=4)
    for one_by_one in (False, True):
        for length in range(first + 1):
            if one_by_one and length % 7:
                continue
            cache = QuantizedCache(B, K, H, dtype=dtype, block_size=32, capacity=first)
            if one_by_one:
                for i in range(first):
                    cache.append(x[:, i : i + 1], x[:, i : i + 1])
            else:
                cache.append(x[:, :first], x[:, :first])
            kept = max(0, (first // 32 - 1) * 32)
            if length < kept and length % 32:
                before = cache.keys.clone(), cache.length
                with pytest.raises(InvalidProblem, match=f"expected {kept} or more, or a multi"):
                    cache.truncate(length)
                assert torch.equal(bits(before[0]), bits(cache.keys)) and before[1] == cache.length
                continue
            cache.truncate(length)
            cache.append(other[:, length:240], other[:, length:240])
            wanted, scales = quantize_kv(
                torch.cat((x[:, :length], other[:, length:240]), 1), dtype=dtype, block_size=32
            )
            assert torch.equal(bits(cache.keys), bits(wanted))
            assert torch.equal(cache.value_scales, scales)


def test_reset_and_wrong_lengths() -> None:
    cache, x = QuantizedCache(B, K, H), rows(100)
    cache.append(x, x)
    for wrong in (-1, 101, 3.0):
        with pytest.raises(InvalidProblem, match="expected one of 0 to 100"):
            cache.truncate(wrong)  # type: ignore[arg-type]
    taken = cache.nbytes
    cache.reset()
    assert cache.length == 0 and cache.keys.shape == (B, 0, K, H) and cache.nbytes == taken
    assert cache.key_scales.shape == (B, K, 0)
    cache.append(x[:, 50:], x[:, 50:])
    assert torch.equal(cache.keys, quantize_kv(x[:, 50:])[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e300])
@pytest.mark.parametrize("held", [0, 5, 16, 30])
@pytest.mark.parametrize("count", [1, 3, 50])
@pytest.mark.parametrize("value_dim", [H, V])
def test_what_is_not_finite_leaves_the_cache_as_it_was(
    value_dim: int, count: int, held: int, bad: float
) -> None:
    """Of values that are refused, the keys beside them are not there either."""
    cache = QuantizedCache(B, K, H, value_dim=value_dim, block_size=16, capacity=8)
    key, value = rows(100).double(), rows(100, value_dim, seed=2).double()
    cache.append(key[:, :held], value[:, :held])
    for which, name in enumerate(("key", "value")):
        given = [x[:, held : held + count].clone() for x in (key, value)]
        given[which][1, -1, 2, 3] = bad
        with pytest.raises(InvalidProblem, match=f"float32 cannot hold in {name}, expected"):
            cache.append(*given)
        assert cache.length == held
    cache.append(key[:, held:], value[:, held:])
    for codes, x in ((cache.keys, key), (cache.values, value)):
        assert torch.equal(codes, quantize_kv(x, block_size=16)[0])


@every_dtype
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("value_dim", [H, V])
def test_decoding(value_dim: int, layout: str, dtype: Any) -> None:
    cache = QuantizedCache(B, K, H, value_dim=value_dim, dtype=dtype, layout=layout, block_size=16)
    dim = 1 if layout == "BTNH" else 2
    key, value = rows(40), rows(40, value_dim, seed=2)
    q = torch.randn(B, 1, 2 * K, H)
    if layout == "BNTH":
        key, value, q = (x.transpose(1, 2) for x in (key, value, q))
    for i in range(40):
        cache.append(key.narrow(dim, i, 1), value.narrow(dim, i, 1))
        got = cache.attention(q, return_lse=True, backend="reference")
        keys, values = cache.dequantized(torch.float64)
        wanted = attention(
            q.double(), keys, values, mask=Causal(), layout=layout, return_lse=True,
            backend="reference",
        )  # fmt: skip
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)
    assert [x.dtype for x in cache.dequantized(torch.bfloat16)] == [torch.bfloat16] * 2


def test_memory_grows_with_the_keys_and_is_a_fraction_of_theirs() -> None:
    cache, x = QuantizedCache(1, 4, 64, capacity=0), torch.randn(1, 1, 4, 64)
    sizes = set()
    for _ in range(1000):
        cache.append(x, x)
        sizes.add(cache.keys.untyped_storage().data_ptr())
    assert len(sizes) <= 12  # doubled, not copied at each step
    many = QuantizedCache(1, 4, 64, capacity=1 << 16)
    assert many.nbytes < 0.53 * (2 * (1 << 16) * 4 * 64 * 2)  # of bfloat16, rows and scales too


def test_made_in_inference_mode_and_written_outside() -> None:
    x = rows(70)
    with torch.inference_mode():
        cache = QuantizedCache(B, K, H, capacity=4)
        cache.append(x[:, :30], x[:, :30])
    for i in range(30, 70):
        cache.append(x[:, i : i + 1], x[:, i : i + 1])
    assert torch.equal(cache.keys, quantize_kv(x)[0])


def test_gradients_are_refused() -> None:
    cache, x = QuantizedCache(B, K, H), rows(2).requires_grad_()
    with pytest.raises(InvalidProblem, match=r"key that needs a gradient.*no_grad"):
        cache.append(x, x)
    with torch.no_grad():
        cache.append(x, x)
    assert cache.length == 2 and not cache.key_scales.requires_grad


@pytest.mark.parametrize(
    ("key", "value", "about"),
    [
        (torch.zeros(B, 2, K, H), torch.zeros(B, 3, K, H), "2 keys and 3 values"),
        (torch.zeros(B, 2, K, V), torch.zeros(B, 2, K, H), r"key .2, 2, 3, 5. .*\(2, T, 3, 8\)"),
        (torch.zeros(B, 2, K, H), torch.zeros(1, 2, K, H), r"value .1, 2, 3, 8."),
        (torch.zeros(B, 2, K, H).int(), torch.zeros(B, 2, K, H), "key .* torch.int32 on cpu"),
        (torch.zeros(B, 2, K, H, device="meta"), torch.zeros(B, 2, K, H), "on meta, expected"),
        (None, torch.zeros(B, 2, K, H), "key None"),
    ],
)
def test_wrong_appends(key: Any, value: Any, about: str) -> None:
    cache = QuantizedCache(B, K, H)
    with pytest.raises(InvalidProblem, match=about):
        cache.append(key, value)
    assert cache.length == 0


@pytest.mark.parametrize(
    ("options", "about"),
    [
        ({"dtype": "int4"}, "dtype='int4', expected one of 'int8'"),
        ({"block_size": 0}, "block_size=0"),
        ({"layout": "packed"}, "layout='packed'"),
        ({"capacity": -1}, "capacity=-1"),
        ({"value_dim": 0}, "value_dim=0"),
    ],
)
def test_wrong_forms(options: dict[str, Any], about: str) -> None:
    with pytest.raises(InvalidProblem, match=about):
        QuantizedCache(B, K, H, **options)
    if "capacity" not in options and "value_dim" not in options:
        with pytest.raises(InvalidProblem, match=about):
            quantize_kv(rows(3), **options)


@pytest.mark.parametrize("x", [torch.zeros(2, 3, 4), torch.zeros(1, 2, 3, 4).int(), 3])
def test_what_cannot_be_quantised(x: Any) -> None:
    with pytest.raises(InvalidProblem, match="expected keys or values BTNH of a float dtype"):
        quantize_kv(x)

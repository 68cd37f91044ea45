"""The drop-in does what torch's function does: results, gradients, errors, transforms."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyattn import record_selections, use_backend
from polyattn.torch import attention
from polyattn.torch import scaled_dot_product_attention as sdpa

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def both(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Return (ours, torch's), each a result or the type and text of its error."""
    found = []
    for function in (sdpa, F.scaled_dot_product_attention):
        try:
            found.append(function(*args, **kwargs))
        except Exception as error:
            found.append((type(error), str(error)))
    return found[0], found[1]


def random_call(rng: random.Random) -> tuple[list[torch.Tensor], dict[str, Any]]:
    lead = (
        rng.choice([(), (2,), (1,), (3,), (2, 2)])
        if rng.random() < 0.2
        else (rng.choice([1, 2, 3]),)
    )
    heads, groups = rng.choice([1, 2, 3]), rng.choice([1, 1, 2])
    t, s, e = rng.choice([1, 2, 5, 8, 0]), rng.choice([1, 3, 5, 8, 0]), rng.choice([1, 4, 8, 16])
    ev = e if rng.random() < 0.8 else rng.choice([1, 8, 12])
    dtype = rng.choice(DTYPES)
    shapes = [(*lead, heads * groups, t, e), (*lead, heads, s, e), (*lead, heads, s, ev)]
    if rng.random() < 0.15:
        shapes = [shape[1:] for shape in shapes]
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    if rng.random() < 0.2:
        tensors = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in tensors]
    kwargs: dict[str, Any] = {"enable_gqa": groups > 1 and rng.random() < 0.8}
    kind = rng.choice(["none", "none", "causal", "bool", "float", "both"])
    if kind in ("causal", "both"):
        kwargs["is_causal"] = True
    if kind in ("bool", "float", "both"):
        full = (*shapes[0][:-1], s)
        shape = tuple(1 if rng.random() < 0.3 else size for size in full)[
            rng.choice([0, 0, 1, 2]) :
        ]
        allowed = torch.rand(shape) > 0.3
        kwargs["attn_mask"] = allowed if kind == "bool" else torch.randn(shape, dtype=dtype)
    if rng.random() < 0.2:
        kwargs["scale"] = rng.choice([0.5, 1, 0.0, -0.3])
    if rng.random() < 0.05:
        tensors[1] = tensors[1].double()
    return tensors, kwargs


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_agree_with_torch(seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        tensors, kwargs = random_call(rng)
        ours, theirs = both(*tensors, **kwargs)
        shapes = (
            [tuple(x.shape) for x in tensors],
            {k: getattr(v, "shape", v) for k, v in kwargs.items()},
        )
        if isinstance(theirs, tuple):
            assert isinstance(ours, tuple), (shapes, theirs)
            assert ours[0] is theirs[0], (shapes, ours, theirs)
            continue
        assert not isinstance(ours, tuple), (shapes, ours)
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, shapes
        if kwargs.get("scale", 1) <= 0 and kwargs.get("is_causal") and "attn_mask" not in kwargs:
            # torch's CPU kernel masks with -inf before it scales: by a scale <= 0 that is wrong
            shown = torch.ones(tensors[0].shape[-2], tensors[1].shape[-2]).bool().tril()
            rest = {k: v for k, v in kwargs.items() if k != "is_causal"}
            theirs = F.scaled_dot_product_attention(*tensors, attn_mask=shown, **rest)
        loose = {torch.bfloat16: 3e-2, torch.float16: 4e-3}.get(ours.dtype, 1e-5)
        torch.testing.assert_close(ours, theirs, rtol=loose, atol=loose, equal_nan=True)


@pytest.mark.parametrize(
    "kwargs", [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
)
def test_gradients_agree_with_torch(kwargs: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(3))
    wanted: list[torch.Tensor] = [q, k, v]
    if kwargs.get("attn_mask") == "bool":
        kwargs = {"attn_mask": torch.rand(2, 1, 7, 7) > 0.4}
    elif kwargs.get("attn_mask") == "float":
        kwargs = {"attn_mask": torch.randn(1, 3, 7, 7, requires_grad=True)}
        wanted.append(kwargs["attn_mask"])
    grads = [
        torch.autograd.grad(f(q, k, v, **kwargs).square().sum(), wanted)
        for f in (sdpa, F.scaled_dot_product_attention)
    ]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dropout_keeps_the_mean_and_the_seed() -> None:
    q, k = torch.randn(1, 1, 64, 8), torch.zeros(1, 1, 4096, 8)
    v = torch.ones(1, 1, 4096, 8)
    torch.manual_seed(0)
    a = sdpa(q, k, v, dropout_p=0.25)
    torch.manual_seed(0)
    assert torch.equal(a, sdpa(q, k, v, dropout_p=0.25))
    assert abs(a.mean().item() - 1) < 0.02 and a.std() > 0
    assert torch.equal(sdpa(q, k, v, dropout_p=0.0), sdpa(q, k, v))


def test_wrong_calls_raise_torchs_errors() -> None:
    q = torch.randn(1, 2, 4, 8)
    for args, kwargs in (
        ((q, q.double(), q), {}),
        ((q, q, q), {"attn_mask": torch.ones(3, 4, dtype=torch.bool)}),
        ((q, q[..., :4], q), {}),
        ((q, q, q), {"attn_mask": torch.ones(4, 4, dtype=torch.int64)}),
        ((q, q, q), {"dropout_p": "x"}),
        ((q, q), {}),
        ((q, q, q), {"bogus": 1}),
        ((q, None, q), {}),
    ):
        ours, theirs = both(*args, **kwargs)
        assert isinstance(ours, tuple) and isinstance(theirs, tuple)
        assert issubclass(ours[0], theirs[0]), (ours, theirs)


def test_autocast_casts_as_torch_does() -> None:
    q = torch.randn(1, 2, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = both(q, q, q)
        again = sdpa(q, q, q)
    assert ours.dtype == theirs.dtype == again.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)
    assert sdpa(q, q, q).dtype == torch.float32


def test_autocast_to_one_dtype_and_then_another() -> None:
    q = torch.randn(1, 9, 2, 8)
    for function in (sdpa, attention):
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            for _ in range(3):
                with torch.autocast("cpu", dtype=dtype):
                    assert function(q, q, q).dtype == dtype
        half = q.bfloat16()
        for _ in range(3):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert function(half, half, half).dtype == torch.bfloat16
            with torch.autocast("cpu", dtype=torch.float16):
                assert function(half, half, half).dtype == torch.float16


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's own, of its kernel
def test_function_transforms() -> None:
    q = torch.randn(5, 2, 2, 6, 8)
    ours = torch.func.vmap(lambda x: sdpa(x, x, x, is_causal=True))(q)
    theirs = torch.func.vmap(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True))(q)
    torch.testing.assert_close(ours, theirs)
    loss = lambda f: lambda x: f(x, x, x).square().sum()  # noqa: E731
    x = q[0]
    torch.testing.assert_close(
        torch.func.grad(loss(sdpa))(x), torch.func.grad(loss(F.scaled_dot_product_attention))(x)
    )


def test_meta_and_fake_tensors_and_subclasses() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(1, 2, 4, 8, device="meta")
    assert sdpa(x, x, x, is_causal=True).shape == x.shape
    with FakeTensorMode():
        y = torch.randn(1, 2, 4, 8)
        assert sdpa(y, y, y).shape == y.shape

    class Tagged(torch.Tensor):
        pass

    z = torch.randn(1, 2, 4, 8).as_subclass(Tagged)
    assert type(sdpa(z, z, z)) is Tagged


def test_strided_nested_tensors_go_to_torch_and_are_recorded() -> None:
    n = torch.nested.nested_tensor([torch.randn(2, 5, 8), torch.randn(2, 3, 8)])
    with record_selections() as ran:
        out = sdpa(n, n, n)
    assert out.is_nested and ran[0].backend == "torch"


def test_jagged_nested_tensors_are_packed_rows() -> None:
    n = torch.nested.nested_tensor(
        [torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=torch.jagged
    )
    x = n.transpose(1, 2)
    with record_selections() as ran:
        out = sdpa(x, x, x)
    assert out.is_nested and ran[0].backend != "torch"
    truth = F.scaled_dot_product_attention(x, x, x)
    torch.testing.assert_close(out.transpose(1, 2).values(), truth.transpose(1, 2).values())


@pytest.mark.parametrize("mask", [None, (6, 7), (2, 1, 7), (1, 7)])
def test_more_leading_dims_are_modelled(mask: tuple[int, ...] | None) -> None:
    q, k = torch.randn(2, 3, 2, 2, 6, 8), torch.randn(2, 3, 2, 2, 7, 8)
    kwargs = {} if mask is None else {"attn_mask": torch.rand(mask) > 0.3}
    with use_backend("sdpa_flash"):
        ours = sdpa(q, k, k, **kwargs)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, **kwargs))


def test_export() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sdpa(x, x, x, is_causal=True)

    x = torch.randn(2, 2, 6, 8)
    program = torch.export.export(Model(), (x,))
    torch.testing.assert_close(program.module()(x), Model()(x))


def test_masks_of_one_shape_but_other_values_are_never_mixed_up() -> None:
    q = torch.randn(2, 2, 6, 8)
    for _ in range(4):
        for mask in (torch.rand(2, 1, 6, 6) > 0.5, torch.randn(2, 1, 6, 6)):
            ours, theirs = both(q, q, q, mask)
            torch.testing.assert_close(ours, theirs)
            with use_backend("sdpa_math"):
                torch.testing.assert_close(sdpa(q, q, q, mask), theirs)


def test_switches_of_torch_are_obeyed_and_requests_outrank_them() -> None:
    q = torch.randn(1, 2, 6, 8)
    sdpa(q, q, q)
    with record_selections() as ran:
        with sdpa_kernel(SDPBackend.MATH):
            sdpa(q, q, q)
            torch.compile(sdpa, fullgraph=True, backend="eager")(q, q, q)
            with use_backend("sdpa_flash"):
                sdpa(q, q, q)
        sdpa(q, q, q)
    assert [r.backend for r in ran] == ["sdpa_math", "sdpa_math", "sdpa_flash", "sdpa_flash"]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available"):
        sdpa(q, q, q, dropout_p=0.5)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="No available"):
        sdpa(q, q, q[..., :4])


def test_dropout_draws_what_torch_draws() -> None:
    for t, s in ((5, 5), (5, 12), (12, 5)):
        for causal in (False, True):
            q, k = torch.randn(2, 3, t, 8), torch.randn(2, 3, s, 8)
            found = []
            for function in (sdpa, F.scaled_dot_product_attention):
                torch.manual_seed(4)
                found.append(function(q, k, k, dropout_p=0.4, is_causal=causal))
                found.append(torch.rand(3))  # the generator stands where it stood, too
            torch.testing.assert_close(found[0], found[2])
            assert torch.equal(found[1], found[3])

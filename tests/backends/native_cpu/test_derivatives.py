"""Derivatives of native_cpu beyond the first: second, forward mode, batched, under torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from polyattn import Unsupported, record_selections, use_backend
from polyattn.conformance.tolerance import Yardstick, measure
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
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention, paged_attention, scaled_dot_product_attention

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)

from polyattn.backends.native_cpu.torch.arguments import program_of
from polyattn.backends.native_cpu.torch.decoded import allowed_by
from polyattn.torch.kit.layouts import to_bnth
from polyattn.torch.kit.masking import Dims, materialise

B, T, S, N, K, H, V = 2, 9, 12, 4, 2, 16, 8


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arrays(dtype: torch.dtype = torch.float32, layout: str = "BTNH") -> list[Tensor]:
    made = [torch.randn(x, dtype=dtype) for x in ((B, T, N, H), (B, S, K, H), (B, S, K, V))]
    if layout == "packed":
        return [x[0] for x in made]
    return [x.transpose(1, 2).contiguous() if layout == "BNTH" else x for x in made]


MASKS: dict[str, Any] = {
    "causal": Causal(),
    "top left": Causal("top_left") & Window(left=4),
    "padding": Padding(torch.tensor([3, 9]), torch.tensor([12, 0])) & Causal(),
    "segments": Segments(torch.arange(9) // 5, torch.arange(24).reshape(2, 12) // 5),
    "prefix": PrefixLM(torch.tensor([3, 2])) & Window(left=5),
    "blocks": BlockMap(
        4, 4, torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]]), torch.tensor([[[1, 2, 3]]])
    ),
    "starts": LeftPadding(torch.tensor([0, 4]), torch.tensor([0, 5])) & Chunked(4),
    "top left steps": Causal("top_left") & Dilated(2) & Chunked(5),
    "complement": ~(Dilated(3) & LeftPadding(None, torch.tensor([0, 5]))) | FirstKeys(2),
    "either": Dense(torch.arange(48).reshape(4, 1, 12) % 3 > 0) | Causal(),
}
PACKED = Packed(torch.tensor([0, 4, 9]), torch.tensor([0, 5, 12]))


@pytest.mark.parametrize("kind", [*MASKS, "packed", "packed and more"])
def test_programs_are_read_back(kind: str) -> None:
    layout = "packed" if kind.startswith("packed") else "BTNH"
    more = PACKED & ~Chunked(2) & Segments(torch.arange(9) // 2, torch.arange(12) // 3)
    mask = {"packed": PACKED, "packed and more": more, **MASKS}[kind]
    q, k, _ = arrays(layout=layout)
    dims = Dims.of(to_bnth(q, layout), to_bnth(k, layout))
    codes, found = program_of(mask, q, k, layout)
    shape = dims.batch, dims.heads, dims.q_len, dims.kv_len
    read = allowed_by(codes, found, dims, q.device).expand(shape)
    assert torch.equal(read, materialise(mask, dims, q.device).expand(shape))


def _sinks(dtype: torch.dtype) -> Tensor:
    return torch.randn(N, 2, dtype=dtype)


PROBLEMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "BNTH": {"layout": "BNTH", "mask": Causal()},
    "lse": {"mask": MASKS["padding"], "return_lse": True},
    "segments": {"mask": MASKS["segments"], "scale": -0.3},
    "blocks": {"mask": MASKS["blocks"], "softcap": 2.0},
    "dense": {"mask": MASKS["either"], "return_lse": True, "softcap": 1.0},
    "bias": {"bias": (4, 1, 12), "softcap": 3.0, "mask": MASKS["top left"], "return_lse": True},
    "sinks": {"sinks": (4, 2), "mask": MASKS["padding"], "return_lse": True},
    "alibi": {"slopes": (4,), "mask": Causal()},
    "packed": {"layout": "packed", "mask": PACKED & Causal(), "return_lse": True, "sinks": (4,)},
}


class Call:
    """One problem: its leaves, and the call of them on some backend in some dtype."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        options = dict(PROBLEMS[kind])
        self.leaves = arrays(dtype, options.get("layout", "BTNH"))
        shapes = {name: options.pop(name, None) for name in ("bias", "sinks", "slopes")}
        self.names = [name for name in ("bias", "sinks") if shapes[name] is not None]
        self.leaves += [torch.randn(shapes[name], dtype=dtype) for name in self.names]
        self.slopes = None if shapes["slopes"] is None else torch.rand(shapes["slopes"])
        self.options = options

    def run(self, backend: Any, leaves: list[Tensor]) -> list[Tensor]:
        q, k, v, *more = leaves
        extras: dict[str, Any] = dict(zip(self.names, more, strict=True))
        if "bias" in extras:
            extras["bias"] = DenseBias(extras["bias"])
        if self.slopes is not None:
            extras["bias"] = Alibi(self.slopes.to(q.dtype))
        found = attention(q, k, v, **self.options, **extras, backend=backend)
        return list(found) if isinstance(found, tuple) else [found]


def close(got: list[Tensor], exact: list[Tensor], terms: int = S) -> None:
    """Compare with float64 as `conformance.tolerance` does, in units of the largest entry."""
    for i, (one, other) in enumerate(zip(got, exact, strict=True)):
        finite = other[other.isfinite()].abs()
        scale = torch.full_like(other, float(finite.max()) if finite.numel() else 1.0)
        rounded = other.to(one.dtype)
        fault = measure(
            one, Yardstick(f"number {i}", other, scale, 16.0, lambda r=rounded: r, terms)
        )
        assert fault is None, str(fault)


def second(backend: Any, call: Call, leaves: list[Tensor], *along: list[Tensor]) -> list[Tensor]:
    """Return the derivatives of <gradients, directions> by the leaves and what came in."""
    leaves = [x.clone().requires_grad_() for x in leaves]
    incoming = [x.clone().requires_grad_() for x in along[0]]
    outs = call.run(backend, leaves)
    grads = torch.autograd.grad(outs, leaves, incoming, create_graph=True)
    return list(torch.autograd.grad(grads, leaves + incoming, along[1]))


def doubled(xs: list[Tensor]) -> list[Tensor]:
    return [x.double() for x in xs]


def directions(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    outs = call.run("native_cpu", call.leaves)
    return [torch.randn_like(x) for x in outs], [torch.randn_like(x) for x in call.leaves]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_second_derivatives(kind: str, dtype: torch.dtype) -> None:
    call = Call(kind, dtype)
    along = directions(call)
    exact = second("reference", call, doubled(call.leaves), *map(doubled, along))
    close(second("native_cpu", call, call.leaves, *along), exact)


def forward(backend: Any, call: Call, leaves: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(leaves, tangents, strict=True)]
        outs = [forward_ad.unpack_dual(x) for x in call.run(backend, duals)]
        return [x for out in outs for x in out if x is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", PROBLEMS)
def test_forward_mode(kind: str, dtype: torch.dtype) -> None:
    call = Call(kind, dtype)
    tangents = directions(call)[1]
    call.run("native_cpu", call.leaves)  # what is kept for plain calls must not answer
    exact = forward("reference", call, doubled(call.leaves), doubled(tangents))
    close(forward("native_cpu", call, call.leaves, tangents), exact)


def test_forward_mode_of_one_input_and_of_none() -> None:
    q, k, v = arrays()
    with forward_ad.dual_level():
        plain = attention(q, k, v, backend="native_cpu")
        assert forward_ad.unpack_dual(plain).tangent is None
        out = attention(q, k, forward_ad.make_dual(v, v), backend="native_cpu")
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, plain)


def test_third_derivatives() -> None:
    def third(backend: str, leaves: list[Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in leaves]
        out, lse = attention(*leaves, mask=Causal(), return_lse=True, backend=backend)
        total = out.square().sum() + lse.sin().sum()
        for _ in range(2):
            grads = torch.autograd.grad(total, leaves, create_graph=True)
            total = sum(x.sin().sum() for x in grads)  # type: ignore[assignment]
        return list(torch.autograd.grad(total, leaves))

    for one, other in zip(
        third("native_cpu", leaves := arrays()), third("reference", doubled(leaves)), strict=True
    ):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)


def formula(q: Tensor, k: Tensor, v: Tensor, bias: Any = 0.0) -> Tensor:
    """Attention on (B, N, T, H) in float64, for functions of plain operations only."""
    q, k, v = q.double(), k.double(), v.double()
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def by_name(*args: Tensor) -> Any:
    return attention(*args, layout="BNTH", backend="native_cpu")


def by_choice(*args: Tensor) -> Any:
    return attention(*args, layout="BNTH")


WAYS = {"named": by_name, "chosen": by_choice, "drop-in": scaled_dot_product_attention}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def long_arrays(h: int = 64, v: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    """Return arrays for which native_cpu is chosen, on processors without a better kernel."""
    q, k, values = torch.randn(1, 2, 256, h), torch.randn(1, 2, 256, h), torch.randn(1, 2, 256, v)
    with record_selections() as ran:
        scaled_dot_product_attention(q.clone().requires_grad_(), k, values)
    if [x.backend for x in ran] != ["native_cpu"]:
        pytest.skip(f"{ran[0].backend} is chosen here")
    return q, k, values


def short_arrays() -> tuple[Tensor, Tensor, Tensor]:
    """Return arrays of which whole Jacobians are small."""
    return torch.randn(1, 1, 20, 2), torch.randn(1, 1, 20, 2), torch.randn(1, 1, 20, 4)


def alike(got: Tensor, exact: Tensor) -> None:
    close([got], [exact.double()], terms=1 << 14)


@ways
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients(way: Any, create_graph: bool) -> None:
    leaves = [x.requires_grad_() for x in long_arrays()]
    many = torch.randn(3, 1, 2, 256, 64)
    options: Any = {"is_grads_batched": True, "create_graph": create_graph}
    got = torch.autograd.grad(way(*leaves), leaves, many, **options)
    exact = torch.autograd.grad(formula(*leaves), leaves, many.double(), **options)
    for one, other in zip(got, exact, strict=True):
        alike(one, other)
    if create_graph:
        again = [torch.autograd.grad(x[0].square().sum(), leaves) for x in (got, exact)]
        alike(again[0][0], again[1][0])


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
@pytest.mark.parametrize("drop_in", [False, True], ids=["named", "drop-in"])
def test_vectorised_jacobians(drop_in: bool, strategy: str) -> None:
    q, k, v = short_arrays()
    jacobian = torch.autograd.functional.jacobian
    with use_backend("native_cpu"):
        way = scaled_dot_product_attention if drop_in else by_name
        got = jacobian(lambda x: way(x, k, v), q, vectorize=True, strategy=strategy)
    alike(got, jacobian(lambda x: formula(x, k, v), q, vectorize=True))


def test_vectorised_hessian() -> None:
    q, k, v = short_arrays()
    hessian = torch.autograd.functional.hessian
    got = hessian(lambda x: by_name(x, k, v).square().sum(), q, vectorize=True)
    alike(got, hessian(lambda x: formula(x, k, v).square().sum(), q))


@ways
def test_second_and_forward_derivatives_where_native_is_chosen(way: Any) -> None:
    tensors = long_arrays(v=128)
    got, exact = [], []
    for function, found in ((way, got), (formula, exact)):
        leaves = [x.clone().requires_grad_() for x in tensors]
        grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        found += torch.autograd.grad(sum(x.sin().sum() for x in grads), leaves)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, x.sin()) for x in tensors]
            found.append(forward_ad.unpack_dual(function(*duals)).tangent)
    for one, other in zip(got, exact, strict=True):
        alike(one, other)


def test_second_derivatives_of_a_trained_bias() -> None:
    leaves = [*long_arrays(), torch.randn(2, 256, 256)]
    found = []
    for function in (scaled_dot_product_attention, formula):
        own = [x.clone().requires_grad_() for x in leaves]
        grads = torch.autograd.grad(function(*own).square().sum(), own, create_graph=True)
        found.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), own))
    for one, other in zip(*found, strict=True):
        alike(one, other)


def total(function: Any, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda q: function(q, k, v).square().sum()


def sine(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda q: function(q).sin().sum()


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Callable[[Tensor], Tensor]]] = {
    "grad": torch.func.grad,
    "vjp": lambda f: lambda q: torch.func.vjp(f, q)[1](torch.tensor(2.0, dtype=f(q).dtype))[0],
    "jvp": lambda f: lambda q: torch.func.jvp(f, (q,), (q.sin(),))[1],
    "vmap of grad": lambda f: (
        lambda q: torch.func.vmap(torch.func.grad(f))(torch.stack([q, q.sin()]))
    ),
    "grad of vmap": lambda f: torch.func.grad(
        lambda q: torch.func.vmap(f)(torch.stack([q, q.sin()])).sum()
    ),
    "grad of grad": lambda f: torch.func.grad(sine(torch.func.grad(f))),
    "jvp of grad": lambda f: lambda q: torch.func.jvp(torch.func.grad(f), (q,), (q.sin(),))[1],
    "grad of jvp": lambda f: torch.func.grad(lambda q: torch.func.jvp(f, (q,), (q.sin(),))[1]),
    "jvp of jvp": lambda f: (
        lambda q: torch.func.jvp(
            lambda p: torch.func.jvp(f, (p,), (q.sin(),))[1], (q,), (q.cos(),)
        )[1]
    ),
}
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)


@transforms
@pytest.mark.parametrize("way", [by_name, by_choice], ids=["named", "chosen"])
def test_function_transforms(transform: Any, way: Any) -> None:
    q, k, v = long_arrays()
    alike(transform(total(way, k, v))(q), transform(total(formula, k, v))(q))


@transforms
@pytest.mark.parametrize("way", [by_choice, scaled_dot_product_attention], ids=["call", "drop-in"])
def test_compiled_function_transforms(transform: Any, way: Any) -> None:
    q, k, v = long_arrays()
    compiled = torch.compile(transform(total(way, k, v)), fullgraph=True, backend="aot_eager")
    alike(compiled(q), transform(total(formula, k, v))(q))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_forward_mode(backend: str) -> None:
    q, k, v = short_arrays()

    def along(q: Tensor) -> Any:
        with forward_ad.dual_level():
            out = by_name(forward_ad.make_dual(q, q.sin()), k, v)
            return forward_ad.unpack_dual(out).tangent

    alike(torch.compile(along, fullgraph=True, backend=backend)(q), along(q))


def test_hessians_by_function_transforms() -> None:
    q, k, v = short_arrays()
    exact = torch.func.hessian(total(formula, k, v))(q)
    alike(torch.func.hessian(total(by_name, k, v))(q), exact)
    twice = torch.func.jacrev(torch.func.jacrev(total(by_name, k, v)))
    alike(twice(q), exact)


def test_no_grad_inside_a_transform_is_kept() -> None:
    q, k, v = long_arrays()

    def shifted(q: Tensor) -> Tensor:
        with torch.no_grad():
            shift = by_name(q, k, v).mean()  # small: a cosine of large numbers is their rounding
        return q.square().sum() * shift

    twice = torch.func.grad(sine(torch.func.grad(shifted)))(q)
    shift = formula(q, k, v).mean().float()
    alike(twice, torch.cos(2 * q * shift) * 2 * shift)


class Undefined(torch.autograd.Function):
    """The identity, with no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("backend", ["native_cpu", "reference"])
def test_undefined_gradients_stay_undefined(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in arrays())
    out, lse = attention(q, k, v, return_lse=True, backend=backend)
    total = Undefined.apply(out).sum() + Undefined.apply(lse).sum()
    assert torch.autograd.grad(total, (q, k, v), allow_unused=True) == (None, None, None)


def test_undefined_gradients_of_the_operator_stay_undefined() -> None:
    q, k, v = (x.requires_grad_() for x in long_arrays())
    compiled = torch.compile(by_name, fullgraph=True, backend="eager")
    total = Undefined.apply(compiled(q, k, v)).sum()
    assert torch.autograd.grad(total, (q, k, v), allow_unused=True) == (None, None, None)


@pytest.mark.parametrize("of", ["out", "lse"])
def test_losses_of_one_output(of: str) -> None:
    leaves = arrays()
    found = []
    for backend, dtype in (("native_cpu", torch.float32), ("reference", torch.float64)):
        own = [x.to(dtype).requires_grad_() for x in leaves]
        out, lse = attention(*own, return_lse=True, backend=backend)
        one = (out if of == "out" else lse).sin().sum()
        grads = torch.autograd.grad(one, own, create_graph=True, materialize_grads=True)
        again = torch.autograd.grad(sum(x.sin().sum() for x in grads), own, materialize_grads=True)
        found.append((*grads, *again))
    for got, exact in zip(*found, strict=True):
        alike(got, exact)


def test_masked_nans_stay_where_they_are() -> None:
    mask = Padding(None, torch.tensor([5, 8]))
    found = []
    for bad in (0.0, float("nan"), float("inf")):
        torch.manual_seed(1)
        q, k, v = arrays()
        k[0, 5:], v[0, 5:], k[1, 8:], v[1, 8:] = bad, bad, bad, bad
        own = [x.requires_grad_() for x in (q, k, v)]
        out = attention(*own, mask=mask, backend="native_cpu")
        grads = torch.autograd.grad(out.sin().sum(), own, create_graph=True)
        found.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), own))
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in own]
            out = attention(*duals, mask=mask, backend="native_cpu")
            found[-1] += tuple(forward_ad.unpack_dual(out))
    for one, *others in zip(*found, strict=True):
        assert one.isfinite().all() and all(torch.equal(one, other) for other in others)


def test_visible_nans_are_seen() -> None:
    q, k, v = arrays()
    v[0, 3] = float("nan")
    own = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*own, mask=Causal("top_left"), backend="native_cpu")
    (grad,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    (again,) = torch.autograd.grad(grad.sin().sum(), q)
    assert again[0, 3:].isnan().all() and again[0, :3].isfinite().all()
    assert again[1].isfinite().all()


def test_derivatives_in_checkpointed_regions() -> None:
    leaves = [x.requires_grad_() for x in arrays()]
    found = []
    for run in (by_name_rows, lambda *x: checkpoint(by_name_rows, *x, use_reentrant=False)):
        grads = torch.autograd.grad(run(*leaves).sin().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.sin().sum() for x in grads), leaves))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def by_name_rows(*args: Tensor) -> Any:
    return attention(*args, mask=Causal(), backend="native_cpu")


def test_a_changed_input_is_noticed() -> None:
    q, k, v = arrays()
    own = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*own, backend="native_cpu")
    grads = torch.autograd.grad(out.sin().sum(), own, create_graph=True)
    with torch.no_grad():
        q.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(sum(x.sin().sum() for x in grads), own)


def test_the_backward_pass_is_seen_by_dispatch_modes() -> None:
    class Names(TorchDispatchMode):
        seen: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    leaves = [x.requires_grad_() for x in arrays()]
    out = attention(*leaves, backend="native_cpu")
    with Names() as mode:
        out.sum().backward()
    assert "polyattn.native_attention_backward.default" in mode.seen


def test_paged_keys_refuse_what_their_kernel_cannot() -> None:
    q, pages = torch.randn(1, 1, 2, 16), torch.randn(4, 8, 2, 16)
    table, lengths = torch.tensor([[0, 1]]), torch.tensor([12])

    def call(q: Tensor, backend: str = "native_cpu") -> Tensor:
        return paged_attention(q, pages, pages, table, lengths, backend=backend)

    with forward_ad.dual_level(), pytest.raises(Unsupported, match="reference"):
        call(forward_ad.make_dual(q, q))
    with pytest.raises(Unsupported, match="reference"):
        torch.func.vmap(call)(torch.stack([q, q]))
    assert torch.func.jvp(lambda q: call(q, "reference"), (q,), (q,))[1].abs().sum() > 0

"""The native kernels as operators of torch: compilers, exports, transforms, fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.masks import (
    BlockMap,
    Causal,
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
from polyattn.masks.biases import Alibi, DenseBias
from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)

from polyattn.backends.native_cpu.torch.arguments import program_of
from polyattn.backends.native_cpu.torch.operator import native_attention, native_attention_backward

OPERATOR = "polyattn.native_attention"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def native(*args: Any, **options: Any) -> Any:
    return attention(*args, backend="native_cpu", **options)


def arrays(t: int = 9, s: int = 12, v: int = 8) -> list[torch.Tensor]:
    shapes = (2, t, 4, 16), (2, s, 2, 16), (2, s, 2, v)
    return [torch.randn(x, generator=torch.Generator().manual_seed(x[1])) for x in shapes]


def arguments(mask: Mask | None = None, **changes: Any) -> tuple[Any, ...]:
    q, k, v = changes.get("qkv") or arrays()
    codes, found = program_of(mask, q, k, "BTNH")
    extras = changes.get("bias"), changes.get("slopes"), changes.get("sinks")
    return (q, k, v, *extras, list(codes), found, "BTNH", 0.25, 0.0, True)


CHECKED = {
    "plain": arguments(),
    "mask": arguments(Causal() & Padding([3, 9], torch.tensor([12, 1]))),
    "extras": arguments(bias=torch.randn(4, 9, 1), sinks=torch.randn(4, 2)),
    "slopes": arguments(slopes=torch.rand(4), qkv=[x.bfloat16() for x in arrays()]),
}


@pytest.mark.parametrize("kind", CHECKED)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_forward_keeps_the_rules_of_operators(kind: str, grad: bool) -> None:
    args = [
        x.detach().requires_grad_(grad and i != 4) if isinstance(x, torch.Tensor) else x
        for i, x in enumerate(CHECKED[kind])
    ]
    torch.library.opcheck(native_attention, args)


@pytest.mark.parametrize("kind", CHECKED)
def test_backward_keeps_the_rules_of_operators(kind: str) -> None:
    q, k, v, bias, slopes, sinks, codes, found, layout, scale, softcap, _ = CHECKED[kind]
    out, lse = native_attention(*CHECKED[kind])
    torch.library.opcheck(
        native_attention_backward,
        (
            torch.randn_like(out),
            torch.randn_like(lse),
            q,
            k,
            v,
            out,
            lse,
            bias,
            slopes,
            sinks,
            codes,
            found,
            layout,
            scale,
            softcap,
            bias is not None,
            sinks is not None,
        ),
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lse": {"mask": Causal(), "return_lse": True},
    "padding": {"mask": Padding(torch.tensor([3, 9]), torch.tensor([12, 0])) & Causal()},
    "segments": {"mask": Segments(torch.arange(9) // 5, torch.arange(24).reshape(2, 12) // 5)},
    "prefix": {"mask": PrefixLM(torch.tensor([3, 2])) & Window(left=5)},
    "starts": {"mask": LeftPadding([0, 4], torch.tensor([0, 5])) & Chunked(4)},
    "complement": {"mask": ~Dilated(3) | FirstKeys(2)},
    "blocks": {
        "mask": BlockMap(
            4, 4, torch.tensor([[[[0, 1, 2], [1, 0, 2], [2, 0, 1]]]]), torch.tensor([[[1, 2, 3]]])
        )
    },
    "dense": {"mask": Dense(torch.arange(48).reshape(4, 1, 12) % 3 > 0) | Causal()},
    "bias": {"bias": DenseBias(torch.randn(9, 12)), "softcap": 3.0},
    "alibi": {"bias": Alibi(torch.rand(4)), "sinks": torch.randn(4)},
}


@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
@pytest.mark.parametrize("kind", OPTIONS)
def test_compiled_whole_and_alike(kind: str, layout: str) -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if layout == "BNTH":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return native(q, k, v, layout=layout, **OPTIONS[kind])

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    wanted, got = call(*arrays()), compiled(*arrays())
    for one, other in zip(_tuple(wanted), _tuple(got), strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()
    assert any(name in str(counter.graphs[0].graph) for name in (OPERATOR, "native_inference"))


def _tuple(x: Any) -> tuple[torch.Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def test_compiled_packed() -> None:
    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *cu: torch.Tensor) -> Any:
        return native(q, k, v, mask=Packed(*cu) & Causal(), layout="packed", return_lse=True)

    inputs = (*(x[0] for x in arrays()), torch.tensor([0, 4, 9]), torch.tensor([0, 5, 12]))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for one, other in zip(call(*inputs), compiled(*inputs), strict=True):
        assert torch.equal(one, other)


def test_lengths_stay_symbolic() -> None:
    def call(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return native(x, x, x, mask=Causal() & Padding(None, lengths))

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    compiled(torch.randn(2, 30, 4, 16), torch.tensor([30, 3]))
    before = counter.frame_count
    for length in (17, 25, 31):
        x, lengths = torch.randn(2, length, 4, 16), torch.tensor([length, 3])
        assert torch.equal(call(x, lengths), compiled(x, lengths))
    assert counter.frame_count == before


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training(backend: str) -> None:
    def loss(*leaves: torch.Tensor) -> torch.Tensor:
        q, k, v, bias, sinks = leaves
        out, lse = native(
            q, k, v, mask=Causal(), bias=DenseBias(bias), sinks=sinks, return_lse=True
        )
        return out.square().sum() + lse.sin().sum()

    leaves = [x.requires_grad_() for x in (*arrays(), torch.randn(4, 9, 12), torch.randn(4, 2))]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for one, other in zip(torch.autograd.grad(compiled(*leaves), leaves), wanted, strict=True):
        torch.testing.assert_close(one, other)


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return native(x, x, x, mask=Causal() & Padding(None, lengths))


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict: bool) -> None:
    x, lengths = torch.randn(2, 16, 4, 16), torch.tensor([16, 3])
    program = torch.export.export(Model(), (x, lengths), strict=strict)
    assert OPERATOR in str(program.graph)
    assert torch.equal(program.module()(x, lengths), Model()(x, lengths))


def test_export_with_symbolic_lengths() -> None:
    x, lengths = torch.randn(2, 24, 4, 16), torch.tensor([16, 3])
    length = torch.export.Dim("length", min=17, max=32)
    shapes = {"x": {1: length}, "lengths": {}}
    program = torch.export.export(Model(), (x, lengths), dynamic_shapes=shapes, strict=True)
    longer = torch.randn(2, 31, 4, 16)
    assert torch.equal(program.module()(longer, lengths), Model()(longer, lengths))


def test_fake_tensors_have_the_strides_of_real_ones() -> None:
    q, k, v = arrays()
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    lying = [x.contiguous() for x in swapped]
    strided = [x.repeat_interleave(2, -1)[..., ::2].transpose(1, 2) for x in (q, k, v)]
    for inputs, layout in (
        ((q, k, v), "BTNH"),
        (swapped, "BNTH"),
        (lying, "BNTH"),
        (strided, "BNTH"),
    ):
        real = native(*inputs, layout=layout, mask=Causal(), return_lse=True)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(x) for x in inputs]
            out = native(*fake, layout=layout, mask=Causal(), return_lse=True)
        for one, other in zip(real, out, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape,
                other.stride(),
                other.dtype,
            )


def test_function_transforms() -> None:
    q, k, v = arrays()

    def total(q: torch.Tensor) -> torch.Tensor:
        out, lse = native(q, k, v, mask=Causal(), return_lse=True)
        return out.square().sum() + lse.sum()

    leaf = q.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(q), wanted)
    many = torch.stack([q, 2 * q, -q])
    mapped = torch.func.vmap(lambda q: native(q, k, v, mask=Causal()))(many)
    assert torch.equal(mapped, torch.stack([native(x, k, v, mask=Causal()) for x in many]))
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(many)[0], wanted)


def test_slopes_have_no_gradient() -> None:
    args = list(CHECKED["slopes"])
    args[4] = args[4].clone().requires_grad_()
    with pytest.raises(RuntimeError, match="slopes"):
        native_attention(*args)[0].sum().backward()

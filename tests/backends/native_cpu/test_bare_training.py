"""The shortest way for calls that train: gradients, faults, and what it leaves to others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyattn import Causal, Dense, InvalidProblem, LeftPadding, Padding, Window
from polyattn.backends.native_cpu.torch import bare_training
from polyattn.native import module
from polyattn.selection import scopes
from polyattn.selection.registry import Available
from polyattn.torch import attention

pytestmark = [
    pytest.mark.skipif(
        not isinstance(module.status(), Available), reason="the native kernels are not built here"
    ),
    pytest.mark.skipif(bare_training.EXCHANGE is None, reason="this torch has no C exchange"),
]

MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": Causal,
    "window": lambda: Window(3, 2),
    "dense": lambda: Dense(torch.rand(2, 1, 9, 13) > 0.4),
    "padding": lambda: Padding(None, torch.tensor([5, 13])),
    "int32": lambda: Padding(None, torch.tensor([5, 13], dtype=torch.int32)),
    "left and causal": lambda: LeftPadding(None, torch.tensor([6, 0])) & Causal(),
}
TOLERANCES = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}


class Passes:
    """Counts the passes that the extension has answered the shortest way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = self.backward = 0
        native = module.load()
        for name in ("forward", "backward"):
            monkeypatch.setattr(native, f"{name}_tensors", self._counted(native, name))

    def _counted(self, native: Any, name: str) -> Callable[..., None]:
        run = getattr(native, f"{name}_tensors")

        def counted(*arguments: Any) -> None:
            run(*arguments)
            setattr(self, name, getattr(self, name) + 1)

        return counted

    @property
    def both(self) -> tuple[int, int]:
        return self.forward, self.backward


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    found = Passes(monkeypatch)
    scopes.invalidate()
    yield found
    monkeypatch.undo()
    scopes.invalidate()


def made(
    layout: str = "BNTH",
    dtype: Any = torch.float32,
    heads: tuple[int, int] = (4, 2),
    value: int = 16,
) -> list[Tensor]:
    torch.manual_seed(3)
    (n, k), found = heads, []
    for count, rows, last in ((n, 9, 16), (k, 13, 16), (k, 13, value)):
        shape = (2, count, rows, last) if layout == "BNTH" else (2, rows, count, last)
        found.append(torch.randn(shape).to(dtype).requires_grad_())
    return found


def trained(inputs: list[Tensor], dout: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Return output and gradients."""
    out = attention(*inputs, **{"backend": "native_cpu", "layout": "BNTH", **options})
    dout = torch.ones_like(out) if dout is None else dout
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("heads", "value"), [((4, 4), 16), ((4, 2), 16), ((3, 1), 40)])
@pytest.mark.parametrize("layout", ["BNTH", "BTNH"])
def test_gradients(
    layout: str, heads: tuple[int, int], value: int, dtype: Any, mask: str, passes: Passes
) -> None:
    inputs, options = made(layout, dtype, heads, value), {"mask": MASKS[mask](), "layout": layout}
    dout = torch.randn_like(attention(*inputs, backend="native_cpu", **options).float()).to(dtype)
    before = passes.both
    found = trained(inputs, dout, **options)
    assert passes.both == (before[0] + 1, before[1] + 1)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact = trained(wide, dout.double(), backend="reference", **options)
    for got, truth in zip(found, exact, strict=True):
        scale = max(1.0, float(truth.abs().max()))
        assert float((got.double() - truth).abs().max()) <= TOLERANCES[dtype] * scale
    for got, x in zip(found[1:], inputs, strict=True):
        assert got.dtype == dtype and got.stride() == x.stride()


def test_only_what_is_asked_for(passes: Passes) -> None:
    for wanted in itertools.product([False, True], repeat=3):
        if not any(wanted):
            continue
        inputs = [x.detach().requires_grad_(want) for x, want in zip(made(), wanted, strict=True)]
        attention(*inputs, backend="native_cpu", layout="BNTH").sum().backward()
        assert tuple(x.grad is not None for x in inputs) == wanted
    assert passes.both == (7, 7)


def test_second_derivatives_go_the_careful_way(passes: Passes) -> None:
    inputs = [x.detach().double().float().requires_grad_() for x in made(heads=(2, 2))]

    def second(backend: str, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        out = attention(*inputs, mask=Causal(), backend=backend, layout="BNTH")
        first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    for got, truth in zip(second("native_cpu", inputs), second("reference", wide), strict=True):
        torch.testing.assert_close(got.double(), truth, rtol=1e-3, atol=1e-3)
    assert passes.both == (1, 1)  # the last derivative alone is of nothing more


def test_batched_gradients_go_the_careful_way(passes: Passes) -> None:
    inputs = made()
    out = attention(*inputs, backend="native_cpu", layout="BNTH")
    many = torch.randn(3, *out.shape)
    found = torch.autograd.grad(out, inputs, many, is_grads_batched=True, retain_graph=True)
    assert passes.both == (1, 0)
    for i, dout in enumerate(many):
        for got, alone in zip(
            found, torch.autograd.grad(out, inputs, dout, retain_graph=True), strict=True
        ):
            torch.testing.assert_close(got[i], alone, rtol=1e-4, atol=1e-5)
    assert passes.both == (1, 3)


def test_gradients_that_lie_otherwise(passes: Passes) -> None:
    inputs = made()
    out = attention(*inputs, backend="native_cpu", layout="BNTH")
    dout = torch.randn(out.shape)
    forms = {
        "turned": dout.transpose(2, 3).contiguous().transpose(2, 3),
        "rows first": dout.transpose(1, 2).contiguous().transpose(1, 2),
        "every second": torch.stack([dout, dout], -1).flatten(-2)[..., ::2],
        "shifted": torch.cat([dout[:1], dout]).contiguous()[1:],
    }
    expected = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    for form in forms.values():
        assert torch.equal(form, dout)
        for got, want in zip(
            torch.autograd.grad(out, inputs, form, retain_graph=True), expected, strict=True
        ):
            assert torch.equal(got, want)
    ones = torch.autograd.grad(out.sum(), inputs)  # expanded, with strides of 0
    for got, want in zip(ones, trained(inputs)[1:], strict=True):
        assert torch.equal(got, want)


def test_zeros_without_memory_as_a_gradient(passes: Passes) -> None:
    inputs = made()
    out = attention(*inputs, backend="native_cpu", layout="BNTH")
    nothing = torch._efficientzerotensor(out.shape)
    for got in torch.autograd.grad(out, inputs, nothing):
        assert torch.equal(got, torch.zeros_like(got))


def test_what_changes_in_between_is_told() -> None:
    for changed in range(3):
        inputs = [x * 1.0 for x in made()]
        out = attention(*inputs, backend="native_cpu", layout="BNTH")
        with torch.no_grad():
            inputs[changed].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    allowed, lengths = torch.rand(2, 1, 9, 13) > 0.4, torch.tensor([5, 13])
    for mask, array in ((Dense(allowed), allowed), (Padding(None, lengths), lengths)):
        out = attention(*made(), mask=mask, backend="native_cpu", layout="BNTH")
        array.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_saved_arrays_may_be_moved_and_calls_repeated(passes: Passes) -> None:
    inputs, mask = made(), Padding(None, torch.tensor([5, 13], dtype=torch.int32))
    expected = trained(inputs, mask=mask)
    moved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone())
    with moved:
        found = trained(inputs, mask=mask)
    run = lambda *x: attention(*x, mask=mask, backend="native_cpu", layout="BNTH")  # noqa: E731
    out = checkpoint(run, *inputs, use_reentrant=False)
    again = [out.detach(), *torch.autograd.grad(out.sum(), inputs)]
    for got, want in itertools.chain(
        zip(found, expected, strict=True), zip(again, expected, strict=True)
    ):
        assert torch.equal(got, want)


def test_rows_without_keys_and_no_queries(passes: Passes) -> None:
    allowed = torch.ones(2, 1, 9, 13, dtype=torch.bool)
    allowed[0, :, 4] = False
    out, dq, *_ = trained(made(), mask=Dense(allowed))
    assert not out[0, :, 4].any() and not dq[0, :, 4].any() and dq[0, :, 5].any()
    q, k, v = made()
    found = trained([q[:, :, :0].detach().requires_grad_(), k, v])
    assert found[0].numel() == 0 and not found[2].any() and not found[3].any()


def test_nan_behind_the_mask_reaches_no_gradient(passes: Passes) -> None:
    q, k, v = (x.detach() for x in made())
    k[1, :, 7:], v[1, :, 7:] = float("nan"), float("inf")
    clean = [torch.nan_to_num(x, 0, 0, 0) for x in (q, k, v)]
    mask = Padding(None, torch.tensor([13, 7]))
    found = trained([x.requires_grad_() for x in (q, k, v)], mask=mask)
    wanted = trained([x.requires_grad_() for x in clean], mask=mask)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
    assert passes.both == (2, 2)


def test_other_ways_are_not_left() -> None:
    inputs = made()
    with pytest.raises(InvalidProblem):
        trained(inputs, mask=Dense(torch.ones(2, 1, 9, 12, dtype=torch.bool)))
    found = torch.func.grad(
        lambda q: attention(q, *inputs[1:], backend="native_cpu", layout="BNTH").sum()
    )(inputs[0])
    torch.testing.assert_close(found, trained(inputs)[1])
    _, tangent = torch.func.jvp(
        lambda q: attention(q, *inputs[1:], backend="native_cpu", layout="BNTH"),
        (inputs[0],),
        (torch.ones(2, 4, 9, 16),),
    )
    assert tangent.isfinite().all()

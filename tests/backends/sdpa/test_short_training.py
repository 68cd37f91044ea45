"""The short way to torch's CPU kernel for calls that train."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn import Causal, Dense
from polyattn.backends.sdpa.torch import short_training
from polyattn.native import module
from polyattn.selection import scopes
from polyattn.selection.registry import Available
from polyattn.torch import attention
from polyattn.torch.internals import dual_levels, is_lazy_copy, tracing_state
from polyattn.torch.kit.plain_calls import ASKERS

pytestmark = [
    pytest.mark.skipif(
        not isinstance(module.status(), Available), reason="the native module is not built here"
    ),
    pytest.mark.skipif(short_training.EXCHANGE is None, reason="this torch has no C exchange"),
]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def made(heads: int = 4, rows: int = 11, dtype: Any = torch.float32) -> list[Tensor]:
    torch.manual_seed(5)
    counts = (4, heads, heads)
    return [torch.randn(2, n, rows, 16).to(dtype).requires_grad_() for n in counts]


@pytest.fixture(params=["extension", "python"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """By the class of the extension, and by the function that says what it does."""
    if request.param == "python":
        monkeypatch.delattr(module.load(), "TrainedCall")
    scopes.invalidate()
    yield request.param
    monkeypatch.undo()
    scopes.invalidate()


def trained(inputs: list[Tensor], mask: Any, backend: str = "sdpa_flash") -> list[Tensor]:
    out = attention(*inputs, mask=mask, backend=backend, layout="BNTH")
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def with_an_empty_row(rows: int) -> Tensor:
    allowed = torch.rand(2, 1, rows, rows) > 0.4
    allowed[0, :, 2] = False
    return allowed


def masks(rows: int) -> dict[str, Any]:
    open_rows = (torch.rand(2, 1, rows, rows) > 0.4) | torch.eye(rows, dtype=torch.bool)
    return {
        "none": None,
        "causal": Causal(),
        "dense": Dense(open_rows),
        "one row for all": Dense(open_rows[:, :, -1:]),
        "of each head": Dense(open_rows | (torch.rand(2, 4, rows, rows) > 0.5)),
        "an empty row": Dense(with_an_empty_row(rows)),
        "turned": Dense(open_rows.transpose(2, 3) | torch.eye(rows, dtype=torch.bool)),
    }


@pytest.mark.parametrize("mask", masks(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize("rows", [11, 40])
def test_outputs_and_gradients(rows: int, heads: int, dtype: Any, mask: str, way: str) -> None:
    inputs, given = made(heads, rows, dtype), masks(rows)[mask]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for got, truth in zip(trained(inputs, given), trained(wide, given, "reference"), strict=True):
        scale = max(1.0, float(truth.abs().max()))
        assert float((got.double() - truth).abs().max()) <= tolerance * scale


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the extension has said of each call's inputs."""
    found: list[bool] = []
    native = module.load()
    ask = native.are_ordinary

    def heard(*arguments: Any) -> bool:
        found.append(ask(*arguments))
        return found[-1]

    monkeypatch.setattr(native, "are_ordinary", heard)
    scopes.invalidate()
    yield found
    monkeypatch.undo()
    scopes.invalidate()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("which", [1, 2])
def test_what_is_masked_goes_the_careful_way_and_leaks_not(
    which: int, bad: float, asked: list[bool]
) -> None:
    inputs = [x.detach() for x in made()]
    allowed = torch.ones(2, 1, 11, 11, dtype=torch.bool)
    allowed[:, :, :, 3] = False
    wanted = trained([x.clone().requires_grad_() for x in inputs], Dense(allowed))
    inputs[which][:, :, 3] = bad
    found = trained([x.requires_grad_() for x in inputs], Dense(allowed))
    assert asked == [True, False]
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_nan_that_few_keys_would_lose_stays(way: str) -> None:
    for mask in (None, Causal()):
        q, k, v = (x.detach() for x in made(rows=3))
        q[0, 0, 2] = float("nan")
        out, *_ = trained([x.requires_grad_() for x in (q, k, v)], mask)
        assert out[0, 0, 2].isnan().all()
        assert out[0, 0, 0].isfinite().all()


def test_the_output_lies_as_torch_s_own_does(way: str) -> None:
    inputs = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in made()
    ]
    own = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert attention(*inputs, backend="sdpa_flash", layout="BNTH").stride() == own.stride()


def called(turned: bool = False, causal: bool = True, scale: float | None = None) -> Any:
    """A call of the extension beside the kernel it was given, and what was asked of both."""
    heard: list[tuple[str, Any]] = []
    own = torch._C._nn.scaled_dot_product_attention

    def kernel(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, scale: Any = None) -> Any:
        heard.append(("kernel", (tuple(q.shape), p, causal, scale)))
        return own(q, k, v, None, p, causal, scale=scale), None

    def careful(*arguments: Any) -> Any:
        heard.append(("careful", arguments[3:]))
        return "careful"

    made = module.load().TrainedCall((
        kernel, careful, short_training.EXCHANGE, (Tensor, torch.nn.Parameter), ASKERS,
        tracing_state, dual_levels, is_lazy_copy, turned, causal, scale,
    ))  # fmt: skip
    return made, heard


def test_a_call_of_the_extension_hands_on_what_it_is_given() -> None:
    for turned, scale in ((False, None), (True, 0.5)):
        run, heard = called(turned, True, scale)
        q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
        out = run(q, k, v)
        shape = (2, 5, 3, 8) if turned else (2, 3, 5, 8)
        assert heard == [("kernel", (shape, 0.0, True, scale))]
        assert out.shape == q.shape
        q[0, 0, 0, 0] = float("nan")
        assert run(q, k, v, "mask", "bias") == "careful"
        assert run.bound_to("own")(q, k, v, None, None, "sinks") == "careful"
        assert heard[1:] == [
            ("careful", ("mask", "bias", None)), ("careful", ("own", None, "sinks")),
        ]  # fmt: skip
    for wrong in ((), (q, k), (q, k, v, 1, 2, 3, 4)):
        with pytest.raises(TypeError, match="expected q, k, v"):
            run(*wrong)
    with pytest.raises(TypeError, match="expected q, k, v"):
        run(q, k, v, mask=None)
    for parts in ((), ("too", "few"), tuple(range(11))):
        with pytest.raises(ValueError, match="another version"):
            module.load().TrainedCall(parts)


class _Sub(Tensor):
    pass


def test_who_else_wants_to_know_of_a_call_is_heard() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return f(*args, **(kwargs or {}))

    run, heard = called()
    x = torch.randn(2, 3, 5, 8)
    assert isinstance(run(x, x, torch.nn.Parameter(x)), Tensor)
    del heard[:]
    with Mode():
        run(x, x, x)
    with torch.autograd.forward_ad.dual_level():
        run(x, x, x)
    run(x, x, torch._lazy_clone(x))
    run(x, x.as_subclass(_Sub), x)
    torch.func.vmap(lambda y: run(y, y, y) and y)(torch.stack([x, x]))
    torch.jit.trace(lambda y: run(y, y, y) and y, x, check_trace=False)
    for strange in (x.double(), x[..., :0], x.to("meta")):
        run(strange, strange, strange)
    assert [name for name, _ in heard] == ["careful"] * 9


def test_what_a_kernel_raises_comes_out() -> None:
    run, _ = called()
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 7)
    with pytest.raises(RuntimeError):
        run(q, k, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_are_ordinary(dtype: Any) -> None:
    ask, exchange = module.load().are_ordinary, short_training.EXCHANGE
    limit = float("inf") if dtype is torch.float16 else 2.0**50
    below = 65504.0 if dtype is torch.float16 else 2.0**49
    for last, order in itertools.product((1, 16, 19), ((0, 1, 2), (2, 1, 0), (1, 0, 2))):
        x = torch.randn(2, 3, last).to(dtype).permute(order)
        assert ask(exchange, x, x, x, None) is True
        for place in itertools.product(*map(range, x.shape)):
            fine = x.clone(memory_format=torch.preserve_format)
            fine[place] = -below
            assert ask(exchange, fine, x, x, None) is True
            for bad in (limit, -limit, float("nan"), float("-inf")):
                struck = fine.clone(memory_format=torch.preserve_format)
                struck[place] = bad
                assert ask(exchange, x, struck, x, None) is False
                assert ask(exchange, x, x, struck, None) is False
    x = torch.ones(2, 4, dtype=dtype)
    for mask, open_ in (([[0, 1], [1, 0]], True), ([[0, 1], [0, 0]], False), ([[1], [1]], True)):
        allowed = torch.tensor(mask, dtype=torch.bool)
        assert ask(exchange, x, x, x, allowed) is open_
        assert ask(exchange, x, x, x, allowed.t()) is bool(allowed.any(0).all())
    for strange in (x[:0], x.double(), x.int()):
        assert ask(exchange, strange, x, x, None) is False


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
def test_are_ordinary_reads_what_is_there_and_nothing_between(order: Any) -> None:
    """Rows with gaps, dims that are one run and others that are not, entries that repeat."""
    ask, exchange = module.load().are_ordinary, short_training.EXCHANGE
    whole = torch.full((3, 4, 5, 24), float("nan"))
    fine = torch.ones(1, 1, 1, 1)
    for cut in (whole[:, :, :, :17], whole[:, :2], whole[:, :, 1:3], whole[1:, 1:3, ::2, 3:]):
        cut.fill_(1.0)
        x = cut.permute(order)
        assert ask(exchange, x, fine, fine, None) is True
        for place in itertools.product(*({0, size // 2, size - 1} for size in x.shape)):
            x[place] = float("inf")
            assert ask(exchange, x, fine, fine, None) is False
            x[place] = 1.0
        whole.fill_(float("nan"))
    repeated = torch.ones(3, 1, 4, 1).expand(3, 2, 4, 5).permute(order)
    assert ask(exchange, repeated, fine, fine, None) is True
    repeated.as_strided((12,), (1,))[7] = float("nan")
    assert ask(exchange, repeated, fine, fine, None) is False

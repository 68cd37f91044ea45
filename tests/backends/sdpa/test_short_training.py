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
def test_outputs_and_gradients(rows: int, heads: int, dtype: Any, mask: str) -> None:
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


def test_a_nan_that_few_keys_would_lose_stays(asked: list[bool]) -> None:
    for mask in (None, Causal()):
        q, k, v = (x.detach() for x in made(rows=3))
        q[0, 0, 2] = float("nan")
        out, *_ = trained([x.requires_grad_() for x in (q, k, v)], mask)
        assert out[0, 0, 2].isnan().all() and out[0, 0, 0].isfinite().all()
    assert asked == [False, False]


def test_the_output_lies_as_torch_s_own_does() -> None:
    inputs = [
        x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in made()
    ]
    own = torch.nn.functional.scaled_dot_product_attention(*inputs)
    assert attention(*inputs, backend="sdpa_flash", layout="BNTH").stride() == own.stride()


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

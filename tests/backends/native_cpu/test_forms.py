"""The compiled form that bfloat16 runs on, in every way to a kernel; forced here.

Forms differ in the last bits of the lse or of gradients, which is how they are told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from polyattn import Causal, settings
from polyattn.native import forms, module
from polyattn.native.forms import Form
from polyattn.selection.registry import Available
from polyattn.torch import attention, paged_attention

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available) or len(module.isas()) < 2,
    reason="the native kernels are not built here, or in one form only",
)

Call = Callable[[torch.dtype, int], torch.Tensor]


@pytest.fixture
def other_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The form for bfloat16 is another than the best, as on Sapphire Rapids."""
    monkeypatch.delenv("POLYATTN_NATIVE_ISA", raising=False)
    other = module.isas()[1]
    monkeypatch.setattr(forms, "_found", Form(other, "its peak is higher"))
    forms._place.cache_clear()
    settings.reload()
    yield other
    forms._place.cache_clear()
    monkeypatch.undo()
    settings.reload()


def _arrays(dtype: torch.dtype, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 200, 2, 64, generator=generator).to(dtype)
    return q[:, :rows].contiguous(), k, v


def _plain(dtype: torch.dtype, rows: int) -> torch.Tensor:
    return attention(*_arrays(dtype, rows), backend="native_cpu")


def _with_lse(dtype: torch.dtype, rows: int) -> torch.Tensor:
    return attention(*_arrays(dtype, rows), return_lse=True, backend="native_cpu")[1]


def _gradients(dtype: torch.dtype, rows: int) -> torch.Tensor:
    arrays = [x.requires_grad_() for x in _arrays(dtype, rows)]
    out = attention(*arrays, mask=Causal(), backend="native_cpu")
    return torch.cat([g.flatten() for g in torch.autograd.grad(out.float().sum(), arrays)])


def _paged(dtype: torch.dtype, rows: int) -> torch.Tensor:
    q, k, v = _arrays(dtype, rows)
    key, value = (x.reshape(10, 20, 2, 64) for x in (k, v))
    table, lengths = torch.arange(10)[None], torch.tensor([200])
    return paged_attention(
        q, key, value, table, lengths, mask=None, return_lse=True, backend="native_cpu"
    )[1]


@pytest.mark.parametrize("call", [_plain, _with_lse, _gradients, _paged])
def test_bfloat16_runs_on_its_form(
    call: Call, other_form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[torch.dtype, int]] = [
        (torch.bfloat16, 200),
        (torch.bfloat16, 1),
        (torch.float32, 200),
        (torch.float16, 200),
    ]

    def bits(isa: str | None) -> list[Any]:
        if isa is None:
            monkeypatch.delenv("POLYATTN_NATIVE_ISA", raising=False)
        else:
            monkeypatch.setenv("POLYATTN_NATIVE_ISA", isa)
        return [call(*one).detach().float().numpy().tobytes() for one in asked]

    by_choice, by_other, by_best = bits(None), bits(other_form), bits(module.isas()[0])
    assert by_other[0] != by_best[0]  # they can be told apart, but of AVX-512 by bfloat16 alone
    assert by_choice == [by_other[0], *by_best[1:]]
    assert bits(None) == by_choice


def test_the_results_are_right_on_either_form(other_form: str) -> None:
    q, k, v = _arrays(torch.bfloat16, 200)
    exact = attention(*(x.double() for x in (q, k, v)), backend="reference")
    error = (_plain(torch.bfloat16, 200).double() - exact).norm() / exact.norm()
    assert float(error) < 4e-3

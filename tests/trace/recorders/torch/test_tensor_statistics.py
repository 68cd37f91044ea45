"""The statistics of tensors: the native kernel, torch's operations, the NumPy reference agree."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from polyattn.errors import TraceError
from polyattn.native import module
from polyattn.trace.recorders.torch import statistics_by_operations as by_torch
from polyattn.trace.recorders.torch import tensor_statistics as of
from polyattn.trace.recorders.torch.tensor_statistics import (
    FIELDS,
    SAMPLES,
    SKETCH,
    WIDTH,
    new_buffer,
    record_fields,
    tensor_statistics,
    trace_statistics,
    write_statistics,
)
from polyattn.trace.statistics import statistics as reference
from polyattn.trace.statistics.schema import COUNTS, DEFAULT_STATISTICS, MOMENTS
from polyattn.trace.statistics.sketch_text import unpack

try:
    ISAS = module.isas()
except Exception:  # the extension is not built: torch's operations alone are tested
    ISAS = ()
WAYS = (*ISAS, "torch")


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set of the kernel, and torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(of, "native_module", lambda: None)
    else:
        monkeypatch.setenv("POLYATTN_NATIVE_ISA", request.param)
    return request.param


def values(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def check(t: Tensor, near: float = 2e-6) -> dict[str, Any]:
    """Compare with the reference; sums may differ by `near` of what they are sums of."""
    got = record_fields(tensor_statistics(t).tolist())
    plain = t.detach().resolve_conj().resolve_neg()
    if plain.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        plain = plain.float()
    expected = reference(plain.numpy())
    for name in (*COUNTS, "min", "max"):
        assert got[name] == expected[name], name
    assert got["samples"] == expected["samples"]
    scale = {"mean": "abs_mean"}
    for name in set(MOMENTS) & set(DEFAULT_STATISTICS):
        if expected[name] is None:
            assert got[name] is None, name
        else:
            room = near * abs(expected[scale.get(name, name)])
            assert abs(got[name] - expected[name]) <= room, name
    buckets = np.array([unpack(got["sketch"]), unpack(expected["sketch"])]) / (expected["l2"] or 1)
    assert np.abs(buckets[0] - buckets[1]).max() <= near + 1e-7
    return got


@pytest.mark.parametrize("n", [0, 1, 5, 63, 64, 65, 1000, 8192, 8255, 70_001])
def test_any_length(way: str, n: int) -> None:
    found = check(values(n) + 0.5)
    assert found["n"] == n


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
        torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
        torch.uint16, torch.float8_e4m3fn,
    ],
)  # fmt: skip
def test_any_dtype(way: str, dtype: torch.dtype) -> None:
    t = values(9000) * 50
    if dtype.is_complex:
        t = torch.complex(t, values(9000, 1))
    elif dtype in (torch.uint8, torch.uint16):
        t = t.abs()
    found = check(t.to(dtype).reshape(90, 100))
    assert found["n"] == (18_000 if dtype.is_complex else 9000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_not_finite_is_counted_and_left_out(way: str, dtype: torch.dtype) -> None:
    t = values(20_000).to(dtype)
    t[100], t[9000:9010], t[19_999] = math.nan, math.inf, -math.inf
    found = check(t)
    assert (found["nan"], found["pinf"], found["ninf"]) == (1, 10, 1)
    assert found["samples"][-1] is None
    nothing = check(torch.full((130,), math.nan, dtype=dtype))
    assert nothing["min"] is nothing["std"] is nothing["l2"] is None
    mask = torch.zeros(300, 300, dtype=dtype).masked_fill(
        torch.ones(300, 300, dtype=torch.bool).triu(1), -math.inf
    )
    assert check(mask)["zero"] == 300 * 301 // 2


def test_deviation_far_from_zero(way: str) -> None:
    t = values(100_000) + 1e5
    assert check(t)["std"] == pytest.approx(t.double().std(correction=0).item(), rel=2e-6)
    assert check(torch.full((10_000,), 0.1))["std"] == 0.0
    drifting = torch.linspace(-1, 1, 50_000) * 3e4 + values(50_000)
    check(drifting)


@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-20, 1e19, 1e30, 3e37])
def test_squares_outside_float32(way: str, scale: float) -> None:
    check(values(9000) * scale)


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-170, 1e170, 1e300])
def test_squares_outside_float64(way: str, scale: float) -> None:
    check(values(9000).double() * scale)
    lowest = torch.full((100, 100), torch.finfo(torch.float64).min, dtype=torch.float64)
    assert check(lowest.triu(1))["l1"] == torch.finfo(torch.float64).max


def views() -> list[Tensor]:
    t = values(2 * 30 * 40 * 70).view(2, 30, 40, 70)
    return [
        t.transpose(-1, -2), t.transpose(1, 2), t.permute(3, 1, 0, 2), t[:, ::3], t[..., 5:69],
        t[..., ::2], t[0, :, :, 3], t[:, :1].expand(2, 30, 40, 70), t.flip(-1)[:, 1:, :, 1:],
        t.as_strided((50, 64), (7, 1)), t[0, 0, 0, 0], t.unsqueeze(0)[:, :, 3:4],
    ]  # fmt: skip


@pytest.mark.parametrize("i", range(len(views())))
def test_strides_do_not_matter(way: str, i: int) -> None:
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bool):
        t = views()[i].to(dtype) if dtype == torch.float32 else (views()[i] * 9).to(dtype)
        assert tensor_statistics(t).equal(tensor_statistics(t.contiguous()))
    check(views()[i])


def test_lazy_signs_and_conjugates(way: str) -> None:
    t = torch.complex(values(100), values(100, 1))
    assert t.conj().imag.is_neg()
    check(t.conj())
    check(t.conj().imag)


def test_many_blocks_are_one_tensor(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_torch, "CPU_BLOCK", 640)
    by_torch._cpu_table.cache_clear()
    t = values(10_007) + 3
    t[77] = math.inf
    check(t)
    by_torch._cpu_table.cache_clear()


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
def test_threads_do_not_change_a_bit() -> None:
    t = values(3_000_003)
    before = torch.get_num_threads()
    rows = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        rows.append(tensor_statistics(t))
    torch.set_num_threads(before)
    assert rows[0].equal(rows[1]) and rows[0].equal(rows[2])
    check(t)


def test_a_row_sees_order_where_sums_do_not(way: str) -> None:
    t = values(4096).view(64, 64)
    one, other = tensor_statistics(t), tensor_statistics(t.roll(1, 0))
    assert torch.allclose(one[: len(FIELDS)], other[: len(FIELDS)], rtol=1e-6)
    assert (one[SKETCH] - other[SKETCH]).norm() > one[SKETCH].norm()


def test_slices_of_blocks_add_up(way: str) -> None:
    t = values(1000)
    parts = torch.zeros(2, 1000)
    parts[0, :300], parts[1, 300:] = t[:300], t[300:]
    added = sum(tensor_statistics(part)[SKETCH] for part in parts)
    assert torch.allclose(added, tensor_statistics(t)[SKETCH], atol=1e-4)


def test_only_the_slot_is_written(way: str) -> None:
    buffer = new_buffer(3)
    write_statistics(values(100), buffer, 1)
    assert not buffer[0].any() and not buffer[2].any()
    assert buffer[1, 0] == 100 and buffer[1, SAMPLES][0] == values(100)[0]
    wide = torch.zeros(2, WIDTH + 3, dtype=torch.float64)
    write_statistics(values(100), wide, 1)
    assert wide[1, :WIDTH].equal(buffer[1]) and not wide[1, WIDTH:].any()


@pytest.mark.parametrize(
    ("slot", "buffer"),
    [
        (3, new_buffer(3)), (-1, new_buffer(3)), (0, new_buffer(3)[0]), (0, new_buffer(1)[:, 1:]),
    ],
)  # fmt: skip
def test_a_slot_that_is_not_there(way: str, slot: int, buffer: Tensor) -> None:
    with pytest.raises((TraceError, ValueError)):
        write_statistics(values(10), buffer, slot)
    with pytest.raises((TraceError, ValueError)):
        trace_statistics(values(10), buffer, slot)


def test_the_kernel_writes_only_what_it_can_write() -> None:
    if ISAS:
        for buffer in (torch.zeros(2, WIDTH), torch.zeros(WIDTH, 2, dtype=torch.float64).t()):
            with pytest.raises(TraceError, match="expected rows"):
                write_statistics(values(10), buffer, 0)


def test_tensors_without_plain_numbers(way: str) -> None:
    sparse = torch.eye(3).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for t, what in ((sparse, "sparse"), (nested, "nested"), (quantised, "quantised")):
        with pytest.raises(TraceError, match=what):
            tensor_statistics(t)


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
def test_the_binding_refuses_what_it_cannot_read() -> None:
    native, out = module.load(), new_buffer(1)
    t = values(12)
    good = [0, 1, 0, t.data_ptr(), (12,), (1,), out.data_ptr()]
    native.statistics(*good)
    for place, value, error, message in (
        (0, 99, ValueError, "isa"),
        (1, 0, ValueError, "threads"),
        (2, 9, ValueError, "element"),
        (3, 0, ValueError, "null"),
        (4, (-1,), ValueError, "below 0"),
        (4, 12, TypeError, "tuple"),
        (4, ("a",), TypeError, "sizes"),
        (5, (1, 1), ValueError, "strides"),
        (5, (2**62,), ValueError, "memory"),
        (4, (1,) * 65, ValueError, "64"),
        (6, 0, ValueError, "out"),
    ):
        with pytest.raises(error, match=message):
            native.statistics(*good[:place], value, *good[place + 1 :])


class Recorder(torch.nn.Module):
    """A small model that records two of its tensors, one of them not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.buffer = new_buffer(2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        trace_statistics(y, self.buffer, 0)
        z = torch.relu(y.transpose(0, 1))
        trace_statistics(z, self.buffer, 1)
        return z.sum()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_code_records_what_eager_code_records(backend: str, grad: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Recorder()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for seed in (1, 2):
        x = values(32 * 16, seed).view(32, 16)
        with torch.set_grad_enabled(grad):
            loss = model(x)
            eager = model.buffer.clone()
            grads = torch.autograd.grad(loss, [*model.parameters()]) if grad else ()
            model.buffer.zero_()
            loss = compiled(x)
            again = torch.autograd.grad(loss, [*model.parameters()]) if grad else ()
        assert torch.allclose(model.buffer, eager, rtol=1e-4, atol=1e-4)
        assert not model.buffer.requires_grad and eager[0].any() and eager[1].any()
        for a, b in zip(grads, again, strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()


def test_rows_in_compiled_code() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: tensor_statistics(x * 2), fullgraph=True)
    x = values(100)
    assert compiled(x).equal(tensor_statistics(x * 2))
    torch._dynamo.reset()


def test_the_operator_passes_torchs_own_checks() -> None:
    t = values(100).view(10, 10).t().requires_grad_()
    torch.library.opcheck(
        trace_statistics,
        (t, new_buffer(2), 1),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_inside_inference_mode_and_grad_mode(way: str) -> None:
    buffer = new_buffer(2)
    with torch.inference_mode():
        trace_statistics(values(10), buffer, 0)
    t = values(10).requires_grad_() * 1
    trace_statistics(t, buffer, 1)
    assert buffer[0].equal(buffer[1])
    assert not buffer.requires_grad and buffer.is_leaf


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    t = torch.cat([values(5_000_000) + 1, torch.tensor([math.nan, math.inf])])
    there = tensor_statistics(t.cuda())
    assert there.device.type == "cuda"
    on_cpu = tensor_statistics(t)
    assert torch.allclose(there.cpu(), on_cpu, rtol=1e-5, atol=1e-2, equal_nan=True)

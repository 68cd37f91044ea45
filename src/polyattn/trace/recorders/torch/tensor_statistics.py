"""What a trace keeps of a tensor, computed where the tensor is: one row of float64 numbers.

On the CPU the native kernel reads the tensor once; elsewhere, and where the extension is not
built, `torch_statistics` computes the same with operations of torch. Nothing here waits for a
device: rows stay on the tensor's device until somebody reads them.

`polyattn::trace_statistics` is the same as an operator of torch, so compiled code can call it,
also under ``fullgraph=True``; it writes into one row of a buffer that exists before the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from polyattn import settings
from polyattn.errors import MissingDependency, TraceError
from polyattn.native import module
from polyattn.torch.internals import below_autograd
from polyattn.trace.recorders.torch.native_protocol import PROTOCOL
from polyattn.trace.recorders.torch.statistics_by_operations import real_values, torch_statistics
from polyattn.trace.statistics import extension
from polyattn.trace.statistics.schema import (
    COUNTS,
    ELEMENTS,
    FIELDS,
    MOMENTS,
    SAMPLES,
    SKETCH,
    WIDTH,
)
from polyattn.trace.statistics.sketch_text import pack

__all__ = [
    "FIELDS", "SAMPLES", "SKETCH", "WIDTH", "RowWriter", "instruction_set", "native_module",
    "new_buffer", "record_fields", "recording", "tensor_statistics", "trace_statistics",
    "write_statistics",
]  # fmt: skip

_ELEMENTS = {getattr(torch, name): code for code, name in enumerate(ELEMENTS)}
_ELEMENTS[torch.bool] = _ELEMENTS[torch.uint8]
"""The codes of the kernel."""


def new_buffer(rows: int, device: torch.device | str = "cpu") -> Tensor:
    """Return a buffer for the statistics of `rows` tensors: zeros of shape (rows, WIDTH).

    float64, or float32 on a device that has no float64 (Apple's), where counts are then exact up
    to 2**24.
    """
    device = torch.device(device)
    dtype = torch.float32 if device.type == "mps" else torch.float64
    return torch.zeros((rows, WIDTH), dtype=dtype, device=device)


def tensor_statistics(t: Tensor) -> Tensor:
    """Return the statistics of a tensor, a row of float64 numbers on its device.

    Any dtype, strides and shape; complex numbers count as two elements. :func:`record_fields`
    reads the result.

    >>> row = tensor_statistics(torch.tensor([[3.0, -4.0], [float("nan"), 0.0]]))
    >>> dict(zip(FIELDS, row.tolist()))["l2"], row[SKETCH].tolist()[:2]
    (5.0, [-3.0, 4.0])
    """
    buffer = new_buffer(1, t.device)
    if torch.compiler.is_compiling():
        trace_statistics(t, buffer, 0)
    else:
        write_statistics(t, buffer, 0)
    return buffer[0]


def write_statistics(t: Tensor, buffer: Tensor, slot: int) -> None:
    """Write the statistics of a tensor into ``buffer[slot]``.

    `buffer`: of :func:`new_buffer`, on the tensor's device. What `t` records for gradients is not
    touched. Raises TraceError for a tensor that holds no plain numbers (sparse, quantised, nested)
    and for a buffer that does not fit. :class:`RowWriter` does the same with less to check.

    >>> buffer = new_buffer(2)
    >>> write_statistics(torch.arange(10), buffer, 1)
    >>> buffer[1, FIELDS.index("n")].item(), buffer[1, FIELDS.index("max")].item()
    (10.0, 9.0)
    """
    RowWriter(buffer).write(t, slot)


class RowWriter:
    """Writes statistics into the rows of one buffer: what eager code calls for each tensor.

    `buffer`: of :func:`new_buffer`. It must not be resized afterwards.

    >>> writer = RowWriter(new_buffer(2))
    >>> writer.write(torch.ones(3), 0)
    >>> writer.buffer[0, FIELDS.index("sum")].item()
    3.0
    """

    def __init__(self, buffer: Tensor) -> None:
        if buffer.dim() != 2 or buffer.shape[1] < WIDTH:
            _refuse(buffer)
        self.buffer = buffer
        self._rows = buffer.shape[0]
        self._native = native_module() if buffer.is_cpu else None
        if self._native is not None:
            if buffer.dtype is not torch.float64 or not buffer.is_contiguous():
                _refuse(buffer)
            self._kernel = self._native.statistics
            self._first, self._step = buffer.data_ptr(), 8 * buffer.shape[1]

    def write(self, t: Tensor, slot: int) -> None:
        """Write the statistics of a tensor into a row; see :func:`write_statistics`."""
        if not 0 <= slot < self._rows:
            _refuse(self.buffer, slot)
        if self._native is not None and t.is_cpu:
            element = _ELEMENTS.get(t.dtype)
            plain = t.layout is torch.strided and not (t.is_neg() or t.is_nested)
            if plain and element is not None:
                return self._read(t, element, slot)
        with torch.no_grad():
            values = real_values(t.detach())
            element = _ELEMENTS.get(values.dtype)
            if self._native is not None and values.is_cpu and element is not None:
                self._read(values, element, slot)
            else:
                self.buffer[slot, :WIDTH].copy_(torch_statistics(values))
        return None

    def _read(self, t: Tensor, element: int, slot: int) -> None:
        self._kernel(
            instruction_set(),
            torch.get_num_threads(),
            element,
            t.data_ptr(),
            t.shape,
            t.stride(),
            self._first + self._step * slot,
        )


def record_fields(row: Sequence[float]) -> dict[str, Any]:
    """Return the numbers of a row as a record has them: counts, null for NaN, base64.

    >>> found = record_fields(tensor_statistics(torch.tensor([1.0, float("inf")])).tolist())
    >>> found["n"], found["pinf"], found["mean"], found["samples"]
    (2, 1, 1.0, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, None])
    """
    fields: dict[str, Any] = {name: int(value) for name, value in zip(COUNTS, row, strict=False)}
    for name, value in zip(MOMENTS, row[len(COUNTS) : len(FIELDS)], strict=True):
        fields[name] = value if value == value else None
    samples = row[SAMPLES] if fields["n"] else ()
    fields["samples"] = [x if x - x == 0 else None for x in samples]
    fields["sketch"] = pack(row[SKETCH])
    return fields


@functools.cache
def native_module() -> ModuleType | None:
    """Return the extension, or None where it is not built, or from other sources."""
    try:
        return extension.load(PROTOCOL)
    except MissingDependency:
        return None


def instruction_set() -> int:
    """Return the instruction set to use, of the extension's; -1 without it.

    Raises SettingsError if ``POLYATTN_NATIVE_ISA`` names none of this machine.
    """
    return -1 if native_module() is None else _isa(settings.raw(settings.NATIVE_ISA))


def recording(next_seq: Callable[[], int], lines: Any, sink: Any) -> Any:
    """Return what records the tensors of a call in native code; None where it is not built.

    `lines`, `sink`: what makes lines in native code, and what takes them.
    """
    built = native_module()
    if built is None:
        return None
    cpu, threads = torch.device("cpu"), torch.get_num_threads
    return built.TraceRecord(Tensor, _ELEMENTS, torch.strided, cpu, threads, next_seq, lines, sink)


@functools.cache
def _isa(wanted: object) -> int:
    """Return the instruction set to use; parsed once for each value of the variable."""
    return module.isa_index()


def _refuse(buffer: Tensor, slot: int | None = None) -> NoReturn:
    row = "" if slot is None else f"slot {slot} of "
    raise TraceError(
        f"got {row}a buffer of shape {tuple(buffer.shape)}, {buffer.dtype} on {buffer.device}, "
        f"expected rows of at least {WIDTH} float64 numbers next to each other, and one of them; "
        "new_buffer makes such a buffer."
    )


_library = torch.library.Library("polyattn", "FRAGMENT")
_library.define(
    "trace_statistics(Tensor t, Tensor(a!) buffer, int slot) -> ()",
    # the values count in their logical order, so no compiler need copy them into another one
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),
)
trace_statistics: Callable[[Tensor, Tensor, int], None]
trace_statistics = torch.ops.polyattn.trace_statistics.default


def _below_autograd(t: Tensor, buffer: Tensor, slot: int) -> None:
    """A record is no part of what is differentiated."""
    with below_autograd():
        trace_statistics(t, buffer, slot)


_library.impl("trace_statistics", write_statistics, "CompositeExplicitAutograd")
_library.impl("trace_statistics", _below_autograd, "Autograd")
torch.library.register_fake("polyattn::trace_statistics", lambda *_: None, lib=_library)

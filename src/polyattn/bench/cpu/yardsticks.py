"""What the machine can do, measured in the same run, with samples before every case.

The matrix peak is that of independent multiply-adds from registers only; without the native module
it is a matrix product into a preallocated output, which is a little less. The read rate is that of
a sum over more memory than the caches hold.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from polyattn.bench.cpu.repeats import spread
from polyattn.native import forms, module
from polyattn.selection.registry import Available

__all__ = ["Yardsticks", "native"]

_SAMPLE_S = 0.05
_AT_ONCE = 3
_READ_BYTES = 512 << 20
_GEMM = 2048


def native() -> Any:
    """Return the native module, or None where it was not built."""
    return module.load() if isinstance(module.status(), Available) else None


class Yardsticks:
    """Samples of GF/s by dtype, and of GB/s read."""

    def __init__(self, *, small: bool = False) -> None:
        self._read: Any = None
        self._read_count = (_READ_BYTES >> (4 if small else 0)) // 4
        self._spins: dict[str, Callable[[], float]] = {}
        self.source: dict[str, str] = {"read": f"torch.sum over {self._read_count * 4 >> 20} MiB"}
        self.samples: dict[str, list[float]] = {}

    def sample(self, name: str) -> None:
        """Measure a few times more: the peak of a dtype (GF/s), or "read" (GB/s)."""
        if name == "read":
            measure = self._read_gbs
        else:
            name = self._kind(name)
            if name not in self._spins:
                self._spins[name] = self._spin(name)
            measure = self._spins[name]
        self.samples.setdefault(name, []).extend(measure() for _ in range(_AT_ONCE))

    def of(self, name: str) -> float:
        """Return what a row is measured against: the read rate's median, the largest of a peak.

        What disturbs registers can only make a sample smaller. Memory is shared: the rate of the
        moment when all others of the machine were silent is nothing that a call can count on.
        """
        if name == "read":
            return statistics.median(self.samples[name])
        return max(self.samples[self._kind(name)])

    def summary(self) -> dict[str, Any]:
        """Return the spread of each yardstick, and how it was measured."""
        units = {"read": "GB/s"}
        return {
            name: {"unit": units.get(name, "GF/s"), "source": self.source[name], **spread(values)}
            for name, values in self.samples.items()
        }

    @staticmethod
    def _kind(dtype: str) -> str:
        return "bfloat16" if dtype == "bfloat16" else "float32"  # float16 is computed in float32

    def _read_gbs(self) -> float:
        if self._read is None:
            self._read = torch.ones(self._read_count)
            self._read.sum()
        begin = time.perf_counter()
        self._read.sum()
        return self._read.nbytes / (time.perf_counter() - begin) / 1e9

    def _spin(self, dtype: str) -> Callable[[], float]:
        spinner, threads = native(), torch.get_num_threads()
        bf16 = dtype == "bfloat16"
        if spinner is None:
            self.source[dtype] = f"torch.mm of {_GEMM}, preallocated output"
            return _gemm(getattr(torch, dtype))
        isa = forms.for_bfloat16().name if bf16 else spinner.isas()[0]
        place = spinner.isas().index(isa)
        if bf16 and not spinner.spin(place, True, 1, 1)[0]:  # no dot products of bf16 there
            bf16, isa = False, f"{isa} without bf16 dot products, so float32"
        self.source[dtype] = f"{isa}, registers only, {threads} threads"
        return _Spin(spinner, place, bf16, threads)


class _Spin:
    """Runs the multiply-adds; as many as take long enough even where nothing disturbs them."""

    def __init__(self, spinner: Any, place: int, bf16: bool, threads: int) -> None:
        self._spinner, self._place, self._bf16, self._threads = spinner, place, bf16, threads
        self._iterations = 1 << 16

    def __call__(self) -> float:
        """Return GF/s."""
        while True:
            operations, seconds = self._spinner.spin(
                self._place, self._bf16, self._iterations, self._threads
            )
            if seconds >= _SAMPLE_S / 2:
                return float(operations / seconds / 1e9)
            growth = min(16.0, _SAMPLE_S / max(seconds, 1e-9))
            self._iterations = int(self._iterations * max(2.0, growth))


def _gemm(dtype: torch.dtype) -> Callable[[], float]:
    a, b = torch.randn(2, _GEMM, _GEMM).to(dtype)
    out = torch.empty_like(a)
    b = b.T if dtype == torch.bfloat16 else b
    torch.mm(a, b, out=out)

    def sample() -> float:
        begin = time.perf_counter()
        torch.mm(a, b, out=out)
        return 2 * _GEMM**3 / (time.perf_counter() - begin) / 1e9

    return sample

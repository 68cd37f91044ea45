"""Which compiled form runs bfloat16: a rule on measured peaks, told here by figures.

The machines whose figures these are need not be here; what runs is tested with what is.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyattn import settings
from polyattn.native import forms, module
from polyattn.native.forms import BFLOAT16, FEW_ROWS, Form, chosen, few_rows, isa_for, peaks
from polyattn.selection.registry import Available

ROOT = Path(__file__).resolve().parents[2]
BUILT = isinstance(module.status(), Available)
built_only = pytest.mark.skipif(not BUILT, reason="the native kernels are not built here")
AVX512 = ("avx512bf16", "avx512", "avx2", "generic")
SAPPHIRE_RAPIDS = {"avx512bf16": 65.0, "avx512": 130.5}
TILES = (*AVX512, "amx", "amx_twin")
GRANITE_RAPIDS = {"avx512bf16": 121.3, "avx512": 241.9, "amx": 3622.0}
ZEN_4 = {"avx512bf16": 225.5, "avx512": 114.5}


@pytest.mark.parametrize(
    ("here", "found", "form", "said"),
    [
        (AVX512, SAPPHIRE_RAPIDS, "avx512", "130 GF/s a thread, pairs in avx512bf16 65"),
        (AVX512, ZEN_4, "avx512bf16", "226 GF/s a thread, float32 in avx512 114"),
        (AVX512, {"avx512bf16": 100.0, "avx512": 100.0}, "avx512bf16", "pairs"),
        (AVX512, {"avx512bf16": 100.0, "avx512": 114.0}, "avx512bf16", "pairs"),  # no clear margin
        (AVX512, {"avx512bf16": 100.0, "avx512": 116.0}, "avx512", "few rows keep avx512bf16"),
        (("avx512bf16",), {"avx512bf16": 65.0}, "avx512bf16", "65 GF/s a thread"),
        (AVX512[1:], {}, "avx512", "no bfloat16 products"),
        (("avx2", "generic"), {}, "avx2", "no bfloat16 products"),
        (("neon", "generic"), {}, "neon", "no bfloat16 products"),
        (("generic",), {}, "generic", "no bfloat16 products"),
        (TILES, GRANITE_RAPIDS, "amx", "pairs in tiles of AMX: 3622 GF/s a thread, pairs in"),
        (TILES, GRANITE_RAPIDS, "amx", "avx512bf16 121, float32 in avx512 242; one or two rows in"),
        (TILES, {"avx512bf16": 100.0, "avx512": 9.0, "amx": 114.0}, "avx512bf16", "AMX 114"),
    ],
)
def test_the_higher_peak_runs_bfloat16(
    here: tuple[str, ...], found: dict[str, float], form: str, said: str
) -> None:
    got = chosen(here, found)
    assert got.name == form and said in got.why and dict(got.peaks) == found


def _spin(pairs: list[float], floats: list[float], asked: list[tuple[int, bool]]) -> forms.Spin:
    """Return a machine: the GF/s of its blocks in turn, first those of pairs, then of float32."""
    left = {True: iter(pairs), False: iter(floats)}

    def spin(place: int, bf16: bool, iterations: int, threads: int) -> tuple[float, float]:
        asked.append((place, bf16))
        if iterations == 1:
            return (1.0 if pairs else 0.0), 1.0
        return iterations * 1e9, iterations / next(left[bf16])

    return spin


def test_the_best_of_short_blocks_counts() -> None:
    asked: list[tuple[int, bool]] = []
    spin = _spin([60, 65, 20, 64, 64, 1], [1, 2, 130, 60, 130.5, 129], asked)
    assert peaks(AVX512, spin) == pytest.approx(SAPPHIRE_RAPIDS)
    assert asked[1:5] == [(0, True), (1, False)] * 2  # in turns, and no form beyond these


def test_tiles_are_measured_where_the_process_may_use_them() -> None:
    asked: list[tuple[int, bool]] = []
    turns = [gflops for _ in range(6) for gflops in (121.3, 3622.0)]
    spin = _spin(turns, [241.9] * 6, asked)
    assert peaks(TILES, spin, tiles=True) == pytest.approx(GRANITE_RAPIDS)
    assert asked[1:4] == [(0, True), (1, False), (TILES.index("amx"), True)]
    asked.clear()
    spin = _spin([65.0] * 6, [130.5] * 6, asked)
    assert peaks(TILES, spin, tiles=False) == pytest.approx(SAPPHIRE_RAPIDS)


def test_what_the_operating_system_refuses_is_said() -> None:
    form = chosen(TILES, SAPPHIRE_RAPIDS, "the operating system, or the container, does not")
    assert form.name == "avx512" and form.why.endswith(
        "; no AMX: the operating system, or the container, does not"
    )


_SMALL_SIGNAL_STACK = """
import ctypes

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
stack = Stack(ctypes.addressof(memory), 0, 4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0

import numpy as np
from ml_dtypes import bfloat16
from polyattn import numpy_attention
from polyattn.native import forms

x = np.random.default_rng(0).standard_normal((1, 128, 2, 64))
out = numpy_attention(*[x.astype(bfloat16)] * 3).astype("f4")
exact = numpy_attention(*[x.astype(bfloat16).astype("f4")] * 3)
assert abs(out - exact).max() < 0.02
print(forms.for_bfloat16().name, forms.for_bfloat16().why)
"""


@pytest.mark.skipif(not BUILT or "amx" not in module.isas(), reason="there are no tiles here")
def test_a_process_that_may_not_use_tiles_runs_another_form() -> None:
    """Linux refuses the tiles to a process one of whose threads has too small a signal stack."""
    pytest.importorskip("ml_dtypes")
    clean = {k: v for k, v in os.environ.items() if k != "POLYATTN_NATIVE_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", _SMALL_SIGNAL_STACK],
        capture_output=True, text=True, env=clean, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("avx512")
    assert "no AMX: a thread's stack for signals has no room" in done.stdout


def test_nothing_is_measured_where_there_is_no_choice() -> None:
    asked: list[tuple[int, bool]] = []
    assert peaks(("avx2", "generic"), _spin([], [], asked)) == {}
    assert asked == [(0, True)]


@pytest.mark.parametrize(
    ("sizes", "few"),
    [
        ((1, 8, 8), True), ((8, 8, 8), True), ((9, 8, 8), False), ((1, 32, 8), True),
        ((2, 32, 8), True), ((3, 32, 8), False), ((1, 32, 1), False), ((4096, 8, 8), False),
        ((64, 32, 8, 64), True), ((4096, 8, 8, 8), False),
    ],
)  # fmt: skip
def test_few_rows_are_those_that_nothing_is_packed_for(sizes: tuple[int, ...], few: bool) -> None:
    assert few_rows(*sizes) is few


def test_few_rows_are_as_many_as_in_the_kernels() -> None:
    source = (ROOT / "native" / "src" / "kernel" / "division.h").read_text(encoding="utf-8")
    found = re.search(r"kFewRows = (\d+)", source)
    assert found and int(found[1]) == FEW_ROWS


@built_only
def test_the_machine_here_is_measured_once() -> None:
    form = forms.for_bfloat16()
    assert form.name in module.isas() and form is forms.for_bfloat16()
    assert all(gflops > 0.1 for gflops in form.peaks.values())
    assert forms.described()["form"] == form.name


@pytest.mark.skipif(not BUILT or "amx" not in module.isas(), reason="there are no tiles here")
def test_tiles_take_part_unless_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYATTN_NATIVE_ISA", raising=False)
    settings.reload()
    form = forms.for_bfloat16()
    refusal = module.load().refusal(module.isas().index("amx"))
    assert ("amx" in form.peaks) is (refusal is None), form
    assert (form.name == "amx") is (refusal is None), form


@pytest.fixture
def other_form(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The form for bfloat16 is another than the best, as on Sapphire Rapids."""
    monkeypatch.delenv("POLYATTN_NATIVE_ISA", raising=False)
    settings.reload()
    other = module.isas()[1]
    monkeypatch.setattr(forms, "_found", Form(other, "its peak is higher"))
    forms._place.cache_clear()
    yield other
    forms._place.cache_clear()
    monkeypatch.undo()
    settings.reload()


@pytest.mark.skipif(not BUILT or len(module.isas()) < 2, reason="there is one form only")
def test_many_rows_of_bfloat16_run_there_and_all_else_on_the_best(
    other_form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = module.isas()
    assert here[isa_for(BFLOAT16, 128, 8, 8)] == other_form
    assert isa_for(BFLOAT16, 1, 32, 8) == isa_for(0, 128, 8, 8) == isa_for(2, 128, 8, 8) == 0
    for place, name in enumerate(here):  # what is named, runs
        monkeypatch.setenv("POLYATTN_NATIVE_ISA", name)
        for dtype in (0, BFLOAT16, 2):
            assert isa_for(dtype, 128, 8, 8) == isa_for(dtype, 1, 8, 8) == place
        assert forms.for_bfloat16().name == name
    monkeypatch.delenv("POLYATTN_NATIVE_ISA")
    assert here[isa_for(BFLOAT16, 128, 8, 8)] == other_form


@pytest.mark.skipif(not BUILT or len(module.isas()) < 2, reason="there is one form only")
def test_doctor_says_which_form_runs_bfloat16(
    other_form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from polyattn.cli import main

    main(["doctor"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"bfloat16: {other_form} (its peak is higher)" in shown


@pytest.mark.skipif(not BUILT or len(module.isas()) < 2, reason="there is one form only")
def test_numpy_arrays_take_the_form_too(other_form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    np = pytest.importorskip("numpy")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    from polyattn import numpy_attention

    def outs() -> list[bytes]:
        x = np.random.default_rng(0).standard_normal((1, 100, 2, 64))
        found = []
        for dtype, rows in ((bfloat16, 100), (bfloat16, 1), (np.float32, 100)):
            y = x.astype(dtype)
            _, lse = numpy_attention(y[:, :rows], y, y, return_lse=True)
            found.append(lse.tobytes())
        return found

    by_choice = outs()
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", other_form)
    by_other = outs()
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", module.isas()[0])
    by_best = outs()
    assert by_other != by_best  # so the forms can be told apart
    assert by_choice == [by_other[0], by_best[1], by_best[2]]

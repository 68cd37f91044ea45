"""Which compiled form of the kernels runs a problem: the best here, for bfloat16 by measurement.

The form with bfloat16 dot products multiplies pairs of bfloat16; the one before it converts them to
float32 while it packs keys and values; AMX multiplies pairs in tiles. Processors differ in which is
faster: the pairs do twice the work of float32 on AMD's Zen 4 and half of it on Intel's Xeons, whose
tiles do many times as much as either. So all are run from registers once in a process, when the
first bfloat16 problem comes for which it matters. AMX takes part if the operating system lets this
process use it, which is asked then and not before.

Few query rows, as in decoding, are bound by memory, and nothing is packed for them: what is
converted once could not serve many rows. They keep the pairs, but where AMX runs the others: its
tiles take keys and values as they lie, and the kernels choose between these and pairs by the rows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyattn import settings
from polyattn.forks import kept_free
from polyattn.native import module

__all__ = [
    "AMX", "FEW_ROWS", "MARGIN", "Form", "chosen", "described", "few_rows", "for_bfloat16",
    "isa_for", "peaks",
]  # fmt: skip

BFLOAT16 = 1
"""The code of the dtype, as the extension takes it: DType of polyattn/arguments.h."""
AMX = "amx"
FEW_ROWS = 8
"""Query rows on one key head up to which the kernels pack nothing: kFewRows of division.h."""
MARGIN = 1.15
"""How much higher a peak must be for another form than the best: the pairs need half the memory."""
_BLOCKS = 6
_ITERATIONS = 1 << 12  # some tens of microseconds

Spin = Callable[[int, bool, int, int], tuple[float, float]]


@dataclass(frozen=True)
class Form:
    """The form that runs bfloat16 problems, and why.

    `peaks`: GF/s of one thread by form, each with what it multiplies bfloat16 as; empty where
    there is no choice.
    """

    name: str
    why: str
    peaks: Mapping[str, float] = field(default_factory=dict)


def isa_for(dtype: int, q_len: int, heads: int, kv_heads: int, sequences: int = 1) -> int:
    """Return the place in :func:`polyattn.native.module.isas` of the form that runs a problem.

    `dtype`: the extension's code. `sequences`: how many share the `q_len` rows of packed arrays.
    POLYATTN_NATIVE_ISA, where it names one, rules.
    """
    if dtype != BFLOAT16:
        return module.isa_index()
    few = few_rows(q_len, heads, kv_heads, sequences)
    return _place(few, settings.raw(settings.NATIVE_ISA))


@functools.lru_cache(maxsize=64)
def _place(few: bool, variable: object) -> int:
    """Return the place of the form for bfloat16; found once for each value of the variable."""
    form = for_bfloat16().name
    return module.isa_index() if few and form != AMX else module.isas().index(form)


def few_rows(q_len: int, heads: int, kv_heads: int, sequences: int = 1) -> bool:
    """Say whether a key meets so few query rows that the kernels pack nothing.

    >>> few_rows(1, 32, 8), few_rows(1, 32, 1), few_rows(24, 8, 8, sequences=8)
    (True, False, True)
    """
    group = 1 if sequences > 1 else heads // max(kv_heads, 1)
    return q_len * group <= FEW_ROWS * max(sequences, 1)


def chosen(here: Sequence[str], found: Mapping[str, float], refusal: str | None = None) -> Form:
    """Return the form for bfloat16 among those that are here, best first, by their peaks.

    `found` holds the GF/s of one thread of those that were measured, or nothing. `refusal`: why
    AMX, which the processor has, was not among them.

    >>> chosen(["avx512bf16", "avx512", "generic"], {"avx512bf16": 65.0, "avx512": 130.5}).name
    'avx512'
    """
    best, without = here[0], f"; no AMX: {refusal}" if refusal else ""
    if best not in found:
        why = "no bfloat16 products: converted to float32 while packing"
        return Form(best, why + without)
    others = sorted((name for name in found if name != best), key=lambda name: -found[name])
    if others and found[others[0]] > MARGIN * found[best]:
        rivals = [best, *others[1:]]
        told = ", ".join(f"{_means(name, best)} {found[name]:.0f}" for name in rivals)
        first = _means(others[0], best) if others[0] == AMX else _CONVERTED
        kept = f"one or two rows in {best}" if others[0] == AMX else f"few rows keep {best}"
        why = f"{first}: {found[others[0]]:.0f} GF/s a thread, {told}; {kept}"
        return Form(others[0], why + without, dict(found))
    told = "".join(f", {_means(name, best)} {found[name]:.0f}" for name in others)
    why = f"pairs of bfloat16: {found[best]:.0f} GF/s a thread{told}"
    return Form(best, why + without, dict(found))


_CONVERTED = "converted to float32 while packing"


def _means(name: str, best: str) -> str:
    """Return how a form multiplies bfloat16."""
    if name == AMX:
        return "pairs in tiles of AMX"
    return f"pairs in {name}" if name == best else f"float32 in {name}"


def peaks(here: Sequence[str], spin: Spin, tiles: bool = False) -> dict[str, float]:
    """Measure what each form that could run bfloat16 does from registers, GF/s of one thread.

    `tiles`: whether AMX is among them. Empty where the best form has no bfloat16 products. Short
    blocks of the forms take turns, and the best of each counts: what disturbs one can only make it
    slower.
    """
    if not spin(0, True, 1, 1)[0]:
        return {}
    forms = {place: place == 0 for place in range(min(2, len(here)))}
    if tiles:
        forms[here.index(AMX)] = True
    best = dict.fromkeys(forms, 0.0)
    for _ in range(_BLOCKS):
        for place, pairs in forms.items():
            operations, seconds = spin(place, pairs, _ITERATIONS, 1)
            best[place] = max(best[place], operations / max(seconds, 1e-9) / 1e9)
    return {here[place]: gflops for place, gflops in best.items()}


_lock = kept_free(threading.Lock())
_found: Form | None = None


def for_bfloat16() -> Form:
    """Return the form of bfloat16 problems with many rows; measured at the first call."""
    global _found
    if settings.current().native_isa != "best":
        return Form(module.isas()[module.isa_index()], "POLYATTN_NATIVE_ISA")
    if _found is None:
        with _lock:
            if _found is None:
                here, kernels = module.isas(), module.load()
                refusal = kernels.refusal(here.index(AMX)) if AMX in here else None
                tiles = AMX in here and refusal is None
                _found = chosen(here, peaks(here, kernels.spin, tiles), refusal)
    return _found


def described() -> dict[str, Any]:
    """Return the form of bfloat16 problems as plain data, for records."""
    form = for_bfloat16()
    return {"form": form.name, "why": form.why, "peaks_gflops": dict(form.peaks)}

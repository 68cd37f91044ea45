"""Which of the native kernels' forms a processor runs, by its instruction sets.

The extension asks the processor itself (native/src/dispatch.cpp); this is the same rule for dry
runs, where the processor is only told of.
"""

from __future__ import annotations

from polyattn.problem.machine import Facts
from polyattn.selection.registry import Available, Missing, Probe

__all__ = ["foretell", "forms"]

_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"bmi2", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
_PRODUCTS = _AVX512 | {"avx512_bf16", "avx512_vnni", "avx512vbmi"}
_NEEDS = {
    "avx512bf16": _PRODUCTS, "avx512": _AVX512, "avx2": _AVX2,
    "neon": frozenset({"neon"}), "generic": frozenset[str](),
    "amx": _PRODUCTS | {"amx_tile", "amx_bf16", "amx_int8"},
    "amx_twin": frozenset[str](),
}  # fmt: skip


def forms(instructions: frozenset[str]) -> tuple[str, ...]:
    """Return the forms that such a processor runs, best first, then those that are never the best.

    >>> forms(frozenset({"avx2", "fma", "f16c"}))
    ('avx2', 'generic', 'amx_twin')
    """
    return tuple(name for name, needs in _NEEDS.items() if needs <= instructions)


def foretell(facts: Facts) -> Probe:
    """Answer for another machine as :func:`polyattn.native.module.status` does for this one."""
    if facts.instructions is None:
        return Available("")
    best = forms(facts.instructions)[0]
    if best == "generic":
        return Missing(
            "this processor runs none of the vector instruction sets of the kernels, only their "
            "plain form, which is slower than torch's own kernel",
            "set POLYATTN_NATIVE_ISA=generic to use it all the same",
        )
    return Available("", f"in its {best} form, where the extension is built")

"""Facts of a machine: what a dry run is told instead of looking."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from polyattn.errors import InvalidProblem, near_matches
from polyattn.problem.processor import INSTRUCTION_SETS

__all__ = ["DEVICES", "Facts"]

DEVICES = ("cpu", "cuda", "rocm", "tpu", "mps", "xpu")
"""The kinds of devices that facts can be about."""


@dataclass(frozen=True)
class Facts:
    """A machine one does not have, as far as backends ask about it.

    `device`: one of :data:`DEVICES`. `arch`: what its accelerator is: ``"sm_90"`` (cuda),
    ``"gfx942"`` (rocm), ``"v5e"`` (tpu), ``"m3"`` (mps), ``"pvc"`` (xpu), or None. `instructions`:
    the processor's instruction sets, or None where they are not known. `packages`: versions of
    what is installed there; a package mapped to None is known to be absent, one that is not
    named is assumed present. `builds`: what a framework there was built for, by its name, as
    ``{"torch": "cpu"}``; one that is not named is assumed to fit the device. `vendor` and `family`:
    who made the processor and which it is (see `polyattn.problem.processor`), None: not known.

    >>> Facts.parse("h100").arch, Facts.parse("zen4").vendor, Facts.parse("zen4").family
    ('sm_90', 'AuthenticAMD', 25)
    >>> sorted(Facts.parse("cpu:avx2").instructions)
    ['avx', 'avx2', 'bmi2', 'f16c', 'fma']
    """

    device: str
    arch: str | None = None
    instructions: frozenset[str] | None = None
    packages: Mapping[str, str | None] = field(default_factory=dict)
    builds: Mapping[str, str] = field(default_factory=dict)
    vendor: str | None = None
    family: int | None = None

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise _unknown(self.device)
        pattern, example = _ARCHS.get(self.device, (None, "none"))
        if self.arch is not None and not (pattern and re.fullmatch(pattern, self.arch)):
            raise InvalidProblem(
                f"got the architecture {self.arch!r} of a {self.device} device, expected {example}."
            )
        for name in self.instructions or ():
            if name not in INSTRUCTION_SETS:
                raise InvalidProblem(
                    f"got the instruction set {name!r}, expected some of "
                    f"{', '.join(INSTRUCTION_SETS)}.{near_matches(name, INSTRUCTION_SETS)}"
                )
        if self.instructions is not None:
            object.__setattr__(self, "instructions", frozenset(self.instructions))

    @classmethod
    def parse(
        cls,
        text: str,
        packages: Mapping[str, str | None] | None = None,
        builds: Mapping[str, str] | None = None,
    ) -> Facts:
        """Read a device (``cpu``, ``cuda:sm_90``, ``rocm:gfx942``, ``tpu:v5e``, ``mps:m3``,
        ``xpu:pvc``), a processor by what it computes with (``cpu:amx_bf16``, ``cpu:sve+bf16``) or a
        product's name (``h100``, ``mi300x``, ``zen4``).

        An instruction set stands for the processors that have it: ``avx2`` brings FMA, and
        ``avx512_bf16`` all that came before. Raises :class:`~polyattn.errors.InvalidProblem`.
        """
        if not isinstance(text, str):
            raise InvalidProblem(
                f"got a machine of type {type(text).__name__}, expected text such as 'cuda:sm_90'."
            )
        name = re.sub(r"[\s_-]+", "", text.lower())
        device, _, detail = _PRODUCTS.get(name, text.strip().lower()).partition(":")
        if device not in DEVICES:
            raise _unknown(text)
        if device != "cpu":
            return cls(device, detail or None, None, packages or {}, builds or {})
        named = frozenset(part.strip() for part in detail.split("+")) if detail else None
        maker = _MAKERS.get(name, (None, None))
        return cls("cpu", None, _with_implied(named), packages or {}, builds or {}, *maker)

    def lacks_build(self, framework: str) -> str | None:
        """Return what the framework there was built for, if that leaves out this device."""
        build = self.builds.get(framework, self.device)
        return None if build == self.device or self.device == "cpu" else build


_ARCHS = {
    "cuda": (r"sm_\d{2,3}[af]?", "sm_XX, as sm_90"),
    "rocm": (r"gfx[0-9a-f]{3,4}", "gfxXXX, as gfx942"),
    "tpu": (r"v\d+[a-z]?", "a generation, as v5e"),
    "mps": (r"m\d+", "a generation, as m3"),
    "xpu": (r"[a-z][a-z0-9_]*", "a name such as pvc or bmg"),
}

_PRODUCTS = {
    "v100": "cuda:sm_70", "t4": "cuda:sm_75", "a100": "cuda:sm_80", "rtx3090": "cuda:sm_86",
    "a10": "cuda:sm_86", "l4": "cuda:sm_89", "l40s": "cuda:sm_89", "rtx4090": "cuda:sm_89",
    "h100": "cuda:sm_90", "h200": "cuda:sm_90", "b200": "cuda:sm_100", "b300": "cuda:sm_103",
    "rtx5090": "cuda:sm_120",
    "mi210": "rocm:gfx90a", "mi250x": "rocm:gfx90a", "mi300x": "rocm:gfx942",
    "mi325x": "rocm:gfx942", "mi355x": "rocm:gfx950", "rx7900xtx": "rocm:gfx1100",
    "max1550": "xpu:pvc", "b580": "xpu:bmg",
    "haswell": "cpu:avx2", "skylakex": "cpu:avx512f", "icelake": "cpu:avx512_vnni",
    "sapphirerapids": "cpu:amx_bf16+amx_int8+avx512_fp16", "zen3": "cpu:avx2",
    "zen4": "cpu:avx512_bf16", "zen5": "cpu:avx512_bf16+avx_vnni",
    "graviton2": "cpu:neon", "graviton3": "cpu:sve+bf16+i8mm",
}  # fmt: skip

_MAKERS = {
    "haswell": ("GenuineIntel", 6), "skylakex": ("GenuineIntel", 6), "icelake": ("GenuineIntel", 6),
    "sapphirerapids": ("GenuineIntel", 6), "zen3": ("AuthenticAMD", 25),
    "zen4": ("AuthenticAMD", 25), "zen5": ("AuthenticAMD", 26),
    "graviton2": ("ARM", 0xD0C), "graviton3": ("ARM", 0xD40),
}  # fmt: skip
"""Vendor and family of the processors among the products, as they tell it themselves."""

_IMPLIED = {
    "fma": ("avx",), "f16c": ("avx",), "avx2": ("avx", "fma", "f16c", "bmi2"),
    "avx512f": ("avx2", "avx512bw", "avx512dq", "avx512vl"), "avx512bw": ("avx512f",),
    "avx512dq": ("avx512f",), "avx512vl": ("avx512f",), "avx512_vnni": ("avx512f",),
    "avx512vbmi": ("avx512_vnni",), "avx512_bf16": ("avx512vbmi",),
    "avx512_fp16": ("avx512_bf16",), "avx_vnni": ("avx2",),
    "amx_tile": ("avx512_bf16",), "amx_bf16": ("amx_tile",), "amx_int8": ("amx_tile",),
    "amx_fp16": ("amx_tile",), "bf16": ("neon",), "i8mm": ("neon",), "sve": ("neon",),
    "sve2": ("sve",), "sme": ("sve2",),
}  # fmt: skip
"""What every processor with an instruction set has beside it; avx512f as from Skylake-X on.

Only Cooper Lake has avx512_bf16 and no avx512vbmi."""


def _with_implied(named: frozenset[str] | None) -> frozenset[str] | None:
    if named is None:
        return None
    found, rest = set[str](), list(named)
    while rest:
        if (name := rest.pop()) not in found:
            found.add(name)
            rest.extend(_IMPLIED.get(name, ()))
    return frozenset(found)


def _unknown(text: str) -> InvalidProblem:
    known = (*DEVICES, *_PRODUCTS)
    near = near_matches(str(text).partition(":")[0], known)
    return InvalidProblem(
        f"got the machine {text!r}, expected {', '.join(DEVICES)}, with an architecture or "
        f"instruction sets behind a colon (cuda:sm_90, cpu:avx512_bf16), or one of "
        f"{', '.join(sorted(_PRODUCTS))}.{near}"
    )

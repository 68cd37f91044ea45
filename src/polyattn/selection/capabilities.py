"""What a backend can do, declared once and denied by default; one check gives every reason."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polyattn.errors import PolyattnError
from polyattn.masks import ALL_KINDS
from polyattn.problem import DEMANDS, Problem

__all__ = ["ALL_MASKS", "Capabilities", "Reason", "arch_number"]

ALL_MASKS: frozenset[str] = ALL_KINDS
"""Every kind of mask, for backends that take them all."""


@dataclass(frozen=True)
class Reason:
    """Why a backend refuses: what was got, what it takes, and what would change that.

    >>> print(Reason("dtype", "float64", "float16 or bfloat16", "cast the inputs"))
    dtype: got float64, takes float16 or bfloat16 (cast the inputs)
    """

    fact: str
    got: str
    takes: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f" ({self.fix})" if self.fix else ""
        return f"{self.fact}: got {self.got}, takes {self.takes}{fix}"


def arch_number(arch: str) -> int:
    """Return 90 for ``sm_90`` and ``sm_90a``; 0 for what is no compute capability of CUDA."""
    number = arch.removeprefix("sm_").rstrip("af")
    return int(number) if arch.startswith("sm_") and number.isdigit() else 0


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    r"""The problems a backend runs exactly; everything not declared is refused.

    `archs` bounds CUDA compute capabilities, e.g. ``(80, 121)``, or names the architectures of
    other devices, e.g. ``{"gfx90a", "gfx942"}``. `instructions` are the processor's instruction
    sets that the backend needs, all of them, e.g. ``{"amx_bf16"}``. `head_dims` is (smallest,
    largest, multiple). `exactness` other than ``"exact"`` marks a quantised backend, which is
    never chosen automatically. `isolates_compiled`: also in compiled code a NaN in a key that only
    some queries see stays from the others, as it does in eager code with every backend.

    >>> can = Capabilities(devices={"cpu"}, dtypes={"float32"}, head_dims=(1, 256, 1))
    >>> small = Problem(batch=1, q_len=4, kv_len=4, heads=1, kv_heads=1, head_dim=8)
    >>> can.check(small)
    ()
    >>> print(*can.check(small.with_(dtype="float64", lse=True)), sep="\n")
    dtype: got float64, takes float32
    lse: got return_lse=True, takes no log-sum-exp output
    """

    devices: frozenset[str] | set[str]
    dtypes: frozenset[str] | set[str]
    head_dims: tuple[int, int, int] = (1, 0, 1)
    archs: tuple[int, int] | frozenset[str] | set[str] | None = None
    instructions: frozenset[str] | set[str] = frozenset()
    layouts: frozenset[str] | set[str] = frozenset({"BTNH", "BNTH"})
    masks: frozenset[str] | set[str] = frozenset()
    biases: frozenset[str] | set[str] = frozenset()
    bias_grad: bool = False
    scale: bool = False
    softcap: bool = False
    sinks: bool = False
    sinks_grad: bool = False
    dropout: bool = False
    gqa: bool = False
    value_dim: bool = False
    lse: bool = False
    backward: bool = False
    deterministic: bool = False
    deterministic_backward: bool = False
    strided: bool = False
    compiled: bool = False
    isolates_compiled: bool = False
    paged: bool = False
    quantized: bool = False
    spread: bool = False
    higher: bool = False
    exactness: str = "exact"

    def __post_init__(self) -> None:
        for name in ("devices", "dtypes", "layouts", "masks", "biases", "instructions"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise PolyattnError(f"got {name}={value!r}, expected a set of names.")
            object.__setattr__(self, name, frozenset(value))
        if not _is_range(self.head_dims, 3) or not (
            self.archs is None
            or isinstance(self.archs, (set, frozenset))
            or _is_range(self.archs, 2)
        ):
            raise PolyattnError(
                f"got head_dims={self.head_dims!r} and archs={self.archs!r}, expected (smallest, "
                "largest, multiple), and (lowest, highest) or a set of names."
            )

    def check(self, problem: Problem) -> tuple[Reason, ...]:
        """Return every reason against running `problem`; none means that it runs exactly."""
        if self._takes(problem):
            return ()
        facts = problem.beside_lengths
        found = self._checked.get(facts)
        if found is None:
            if len(self._checked) >= _MOST_CHECKED:
                self._checked.clear()
            found = (*self._sets(problem), *self._dims(problem), *self._features(problem))
            self._checked[facts] = found
        return found

    def _takes(self, p: Problem) -> bool:
        """Whether nothing speaks against an ordinary problem, without a word why.

        A False is no refusal: :meth:`check` looks at each fact then. Every first call of a kind
        asks each backend, and most take it.
        """
        low, high, step = self.head_dims
        return (
            p.device in self.devices
            and p.dtype in self.dtypes
            and p.layout in self.layouts
            and not self.archs
            and (p.mask is None or p.mask.kinds <= self._masks)
            and p.bias is None
            and p.value_dim == p.head_dim
            and low <= p.head_dim <= high
            and not p.head_dim % step
            and p.demands <= self._offered
        )

    @functools.cached_property
    def _masks(self) -> frozenset[str]:
        return frozenset(self.masks | {"Full"})

    @functools.cached_property
    def _offered(self) -> frozenset[str]:
        """The demands of a problem that are met."""
        met = {name for name in DEMANDS if getattr(self, name)}
        if not self.deterministic:
            met.discard("deterministic_backward")
        return frozenset(met)

    @functools.cached_property
    def _checked(self) -> dict[tuple[object, ...], tuple[Reason, ...]]:
        """What was said of problems, which rests on no length: growing ones ask again and again."""
        return {}

    def check_processor(self, instructions: frozenset[str] | None) -> tuple[Reason, ...]:
        """Return the reason against a processor with these instruction sets (None: not known).

        >>> can = Capabilities(devices={"cpu"}, dtypes={"float32"}, instructions={"amx_bf16"})
        >>> print(*can.check_processor(frozenset({"avx2"})))
        instruction sets: got none of amx_bf16, takes a processor with amx_bf16
        """
        lacking = frozenset() if instructions is None else self.instructions - instructions
        if not lacking:
            return ()
        names = " and ".join(sorted(lacking))
        return (Reason("instruction sets", f"none of {names}", f"a processor with {names}"),)

    def _sets(self, p: Problem) -> Iterator[Reason]:
        for fact, got, allowed in (
            ("device", p.device, self.devices),
            ("dtype", p.dtype, self.dtypes),
            ("layout", p.layout, self.layouts),
        ):
            if got not in allowed:
                yield Reason(fact, got, _or(allowed))
        if p.mask is not None and (extra := p.mask.kinds - self.masks - {"Full"}):
            yield Reason("mask", p.mask.signature, f"no {_or(extra)}")
        if p.bias_structure is not None and p.bias_structure.kind not in self.biases:
            yield Reason("bias", str(p.bias), _or(self.biases))
        if isinstance(self.archs, tuple):
            low, high = self.archs
            if p.device == "cuda" and p.arch and not low <= arch_number(p.arch) <= high:
                yield Reason("compute capability", p.arch, f"sm_{low} to sm_{high}")
        elif self.archs and p.arch is not None and p.arch not in self.archs:
            yield Reason("architecture", p.arch, _or(self.archs))

    def _dims(self, p: Problem) -> Iterator[Reason]:
        low, high, step = self.head_dims
        for fact, size in (("head dim", p.head_dim), ("value dim", p.value_dim)):
            if not low <= size <= high or size % step:
                of = f" in multiples of {step}" if step > 1 else ""
                yield Reason(fact, str(size), f"{low} to {high}{of}", "pad the heads" if of else "")
        if p.value_dim != p.head_dim and not self.value_dim:
            yield Reason("value dim", f"{p.value_dim} for head dim {p.head_dim}", "equal ones")

    def _features(self, p: Problem) -> Iterator[Reason]:
        for name in sorted(p.demands - self._offered, key=list(DEMANDS).index):
            if name == "deterministic_backward" and not self.deterministic:
                continue  # said already
            fact, got, takes = DEMANDS[name]
            yield Reason(fact, got.format(p=p), takes)


_MOST_CHECKED = 256


def _is_range(value: object, length: int) -> bool:
    if not isinstance(value, tuple) or len(value) != length:
        return False
    return all(type(one) is int for one in value)


def _or(names: frozenset[str] | set[str]) -> str:
    return " or ".join(sorted(names)) or "none"

"""The frozen facts of one attention call: all that a choice of backend may depend on."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from polyattn.errors import InvalidProblem
from polyattn.masks.structure import Structure, structure_of

__all__ = ["CODES", "DTYPES", "LAYOUTS", "MaskFacts", "Problem", "rounded_up"]

Layout = Literal["BTNH", "BNTH", "packed"]
LAYOUTS: tuple[str, ...] = ("BTNH", "BNTH", "packed")
DTYPES: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
CODES: tuple[str, ...] = ("int8", "float8_e4m3fn")
"""The dtypes of quantised keys and values."""
_SHORT = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}
_SHORT |= {"float": "float32", "fp64": "float64", "double": "float64"}


@dataclass(frozen=True)
class MaskFacts:
    """What a problem keeps of a mask: its signature, the kinds in it, and the alignment."""

    signature: str
    kinds: frozenset[str]
    align: str | None

    @classmethod
    def parse(cls, signature: str, align: str | None) -> MaskFacts:
        """Take the facts from a signature.

        >>> sorted(MaskFacts.parse("Causal() & Window(left=1, right=None)", None).kinds)
        ['And', 'Causal', 'Window']
        """
        return cls(signature, frozenset(_kinds(structure_of(signature))), align)

    @classmethod
    def of(cls, mask: Any) -> MaskFacts | None:
        """Take the facts from a :class:`polyattn.masks.Mask` or None."""
        return None if mask is None else cls(mask.signature, mask.kinds, mask.align)

    @property
    def structure(self) -> Structure:
        """What the mask is made of."""
        return structure_of(self.signature)

    def is_causal(self, align: str | None = None) -> bool:
        """Whether the mask is causal and nothing else; `align`: in this alignment only."""
        found = self.structure
        return found.kind == "Causal" and align in (None, *(found.arguments or ("bottom_right",)))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One call's facts; hashable and JSON-able.

    Letters: `B` batch, `T` query length, `S` key length, `N` query heads, `K` key/value heads,
    `H` head dim. When packed, `q_len` and `kv_len` are totals and `batch` counts sequences. When
    `paged`, `kv_len` is what the page table has room for; when `quantized`, `dtype` is that of the
    query, and keys and values are codes of the dtype that is named. Where it is `spread`, the
    lengths are those of this device.

    >>> p = Problem(batch=1, q_len=128, kv_len=128, heads=8, kv_heads=2, head_dim=64, dtype="bf16")
    >>> p.value_dim, p.dtype, p.gqa, p.mode
    (64, 'bfloat16', True, 'prefill')
    >>> Problem.from_json(p.to_json()) == p
    True
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = -1
    dtype: str = "float32"
    device: str = "cpu"
    arch: str | None = None
    framework: str = "torch"
    layout: str = "BTNH"
    mask: MaskFacts | None = None
    bias: str | None = None
    bias_grad: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: int = 0
    sinks_grad: bool = False
    dropout_p: float = 0.0
    grad: bool = False
    lse: bool = False
    deterministic: bool = False
    contiguous: bool = True
    compiled: bool = False
    paged: int | None = None  # keys in each page
    quantized: str | None = None  # the dtype of the codes that keys and values are
    spread: str | None = None  # the mesh axes over which the rows of the sequence lie
    higher: bool = False  # forward mode, or derivatives of derivatives, by function transforms

    def __post_init__(self) -> None:
        if self.value_dim == -1:
            object.__setattr__(self, "value_dim", self.head_dim)
        object.__setattr__(self, "dtype", _SHORT.get(self.dtype, self.dtype))
        device, _, arch = self.device.partition(":")
        if arch and not arch.isdigit():
            object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "device", device)
        self._check()

    def _check(self) -> None:
        for name in ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "value_dim"):
            size = getattr(self, name)
            if not isinstance(size, int) or size < 0:
                hint = ""
                if hasattr(size, "scope"):  # as of jax.export.symbolic_shape
                    hint = "; a choice needs sizes that are known: export with numbers"
                raise InvalidProblem(f"got {name}={size!r}, expected a size >= 0{hint}.")
        if self.heads and (self.kv_heads == 0 or self.heads % self.kv_heads):
            raise InvalidProblem(
                f"got {self.heads} query heads with {self.kv_heads} key/value heads, expected a "
                "multiple: query head n uses key/value head n // (N // K)."
            )
        if self.dtype not in DTYPES:
            raise InvalidProblem(f"got dtype {self.dtype!r}, expected one of {', '.join(DTYPES)}.")
        if self.layout not in LAYOUTS:
            raise InvalidProblem(
                f"got layout {self.layout!r}, expected one of {', '.join(LAYOUTS)}."
            )
        if self.quantized is not None and self.quantized not in CODES:
            raise InvalidProblem(
                f"got quantized={self.quantized!r}, expected None or one of {', '.join(CODES)}."
            )
        if not 0.0 <= self.dropout_p <= 1.0:
            raise InvalidProblem(f"got dropout_p={self.dropout_p!r}, expected 0 <= p <= 1.")
        if self.softcap is not None and not self.softcap > 0:
            raise InvalidProblem(f"got softcap={self.softcap!r}, expected a number > 0 or None.")

    @property
    def gqa(self) -> bool:
        """Whether several query heads share a key/value head."""
        return self.heads != self.kv_heads

    @property
    def bias_structure(self) -> Structure | None:
        """What the bias is: its class, and in the brackets sizes and dtype."""
        return None if self.bias is None else structure_of(self.bias)

    @property
    def empty(self) -> bool:
        """Whether there is nobody to attend or nothing to attend to: no kernel is asked."""
        return not (self.batch and self.q_len and self.kv_len and self.heads)

    @property
    def mode(self) -> str:
        """``train``, ``decode`` (few queries, many keys) or ``prefill``."""
        if self.grad:
            return "train"
        return "decode" if self.q_len <= 16 < self.kv_len else "prefill"

    @functools.cached_property
    def beside_lengths(self) -> tuple[Any, ...]:
        """Every fact but the batch and the lengths: all that capabilities look at."""
        return tuple(getattr(self, name) for name in _BESIDE_LENGTHS)

    @functools.cached_property
    def demands(self) -> frozenset[str]:
        """What the problem asks for that a backend has to declare, as `Capabilities` names it.

        >>> Problem(
        ...     batch=1, q_len=1, kv_len=9, heads=4, kv_heads=1, head_dim=8, scale=1.0
        ... ).demands == {"gqa", "scale"}
        True
        """
        asked = (
            self.heads != self.kv_heads, self.bias_grad, self.scale is not None,
            self.softcap is not None, self.sinks > 0, self.sinks_grad, self.dropout_p > 0, self.lse,
            self.grad, self.deterministic, self.deterministic and self.grad, not self.contiguous,
            self.compiled, self.paged is not None, self.quantized is not None,
            self.spread is not None, self.higher,
        )  # fmt: skip
        return frozenset(itertools.compress(DEMANDS, asked))

    @functools.cached_property
    def class_sizes(self) -> tuple[int, int, int]:
        """Batch, T and S as a class of problems has them: rounded up to powers of two.

        What is measured of one of a class counts for all, and all get the same automatic choice.
        """
        return rounded_up(self.batch), rounded_up(self.q_len), rounded_up(self.kv_len)

    @property
    def shapes(self) -> str:
        """The shapes of query, key and value in the call's layout, for error messages."""
        t, s, n, k, h, v = (
            self.q_len, self.kv_len, self.heads, self.kv_heads, self.head_dim, self.value_dim,
        )  # fmt: skip
        if self.layout == "packed":
            shapes = (t, n, h), (s, k, h), (s, k, v)
        elif self.layout == "BTNH":
            b = self.batch
            shapes = (b, t, n, h), (b, s, k, h), (b, s, k, v)  # type: ignore[assignment]
        else:
            b = self.batch
            shapes = (b, n, t, h), (b, k, s, h), (b, k, s, v)  # type: ignore[assignment]
        return f"query {shapes[0]}, key {shapes[1]}, value {shapes[2]} ({self.layout})"

    def __str__(self) -> str:
        extras = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in fields(self)
            if f.name in _OPTIONAL and getattr(self, f.name) != f.default
        ]
        where = self.device + (f":{self.arch}" if self.arch else "")
        mask = f", mask={self.mask.signature}" if self.mask else ""
        return f"{self.shapes}, {self.dtype}, {where}{mask}{''.join(', ' + e for e in extras)}"

    def with_(self, **changes: Any) -> Problem:
        """Return a copy with some facts changed."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Return canonical JSON: equal problems give equal text."""
        data = asdict(self)
        for later in ("paged", "quantized", "spread"):  # as it was written before there were these
            if data[later] is None:
                del data[later]
        if not self.higher:
            del data["higher"]
        if self.mask is not None:
            data["mask"]["kinds"] = sorted(self.mask.kinds)
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Problem:
        """Read what :meth:`to_json` wrote; raise :class:`InvalidProblem` for anything else."""
        try:
            data = json.loads(text)
            _check_kinds(data)
            if data.get("mask") is not None:
                mask = data["mask"]
                kinds = frozenset(map(str, mask["kinds"]))
                align = None if mask["align"] is None else str(mask["align"])
                data["mask"] = MaskFacts(str(mask["signature"]), kinds, align)
            return cls(**data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, InvalidProblem):
                raise
            raise InvalidProblem(
                f"got {text[:80]!r}, expected the JSON of a Problem as Problem.to_json() writes "
                f"it ({error})."
            ) from error


_KINDS: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "bool": (bool,), "str": (str,),
}  # fmt: skip


def _check_kinds(data: dict[str, Any]) -> None:
    """Raise ValueError where a text holds another kind of value than the field: they are keys."""
    for field in fields(Problem):
        kind, optional, _ = str(field.type).partition(" | None")
        value = data.get(field.name, field.default)
        if kind not in _KINDS or field.name not in data or (optional and value is None):
            continue
        large = type(value) is int and abs(value) >= 1 << 62
        if type(value) not in _KINDS[kind] or large:
            raise ValueError(f"{field.name} is {value!r:.60}")


def _kinds(mask: Structure) -> Iterator[str]:
    yield mask.kind
    for part in mask.parts:
        yield from _kinds(part)


def rounded_up(size: int) -> int:
    """Return the power of two that stands for a class of sizes; up to 2 the size itself.

    >>> [rounded_up(size) for size in (0, 1, 2, 3, 1024, 1025)]
    [0, 1, 2, 4, 1024, 2048]
    """
    return size if size <= 2 else 1 << (size - 1).bit_length()


DEMANDS: dict[str, tuple[str, str, str]] = {
    # as Capabilities calls it: the fact, what was got, what is taken without it
    "gqa": ("GQA", "{p.heads} query and {p.kv_heads} key/value heads",
            "as many key/value as query heads"),
    "bias_grad": ("bias gradient", "a bias that needs a gradient", "biases without gradient"),
    "scale": ("scale", "scale={p.scale}", "1/sqrt(head dim)"),
    "softcap": ("soft cap", "softcap={p.softcap}", "none"),
    "sinks": ("sinks", "{p.sinks} sinks a head", "none"),
    "sinks_grad": ("sinks gradient", "sinks that need a gradient", "sinks without gradient"),
    "dropout": ("dropout", "dropout_p={p.dropout_p}", "0"),
    "lse": ("lse", "return_lse=True", "no log-sum-exp output"),
    "backward": ("backward", "inputs that need gradients", "inference only"),
    "deterministic": ("determinism", "deterministic=True", "no promise of bitwise equal results"),
    "deterministic_backward": ("determinism", "deterministic=True with gradients",
                               "no promise of bitwise equal gradients"),
    "strided": ("strides", "a last dim that is not contiguous", "contiguous last dims"),
    "compiled": ("torch.compile", "a call traced by the compiler", "eager calls"),
    "paged": ("paged keys", "keys in pages of {p.paged}", "keys in one array"),
    "quantized": ("quantized keys", "{p.quantized} codes of keys and values",
                  "plain keys and values"),
    "spread": ("sequence", "the rows of a sequence spread over {p.spread}", "whole sequences"),
    "higher": ("derivatives", "function transforms for forward mode or beyond first derivatives",
               "first derivatives in reverse mode"),
}  # fmt: skip
_BESIDE_LENGTHS = tuple(
    field.name for field in fields(Problem) if field.name not in ("batch", "q_len", "kv_len")
)
_OPTIONAL = frozenset(
    {
        "bias", "bias_grad", "scale", "softcap", "sinks", "sinks_grad", "dropout_p",
        "grad", "lse", "deterministic", "contiguous", "compiled", "paged",
        "quantized", "spread", "higher",
    }
)  # fmt: skip

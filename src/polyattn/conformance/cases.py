"""A case: everything needed to make one attention call again from a line of text.

The line is JSON without what is default; arrays are not in it, they follow from `seed`:

>>> case = Case.from_spec('{"seed":7,"t":3,"s":5,"mask":["Causal","bottom_right"]}')
>>> case.spec
'{"seed":7,"b":1,"t":3,"s":5,"mask":["Causal","bottom_right"]}'
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from polyattn.errors import InvalidProblem
from polyattn.problem import CODES, DTYPES, LAYOUTS

__all__ = ["Case", "Tree"]

Tree = tuple[Any, ...]
"""A mask as nested tuples: ``("and", ("Causal", "top_left"), ("Window", 3, None))``.

Also ``("not", tree)``. Leaves: the name of a class of masks, and the numbers that its `draw` gives; none are those of the
example that explains the class.
"""


@dataclass(frozen=True)
class Case:
    """One call. `seed` determines all arrays; sizes and the rest are as in `attention`.

    `bias`: ``("dense", dims, dtype, with -inf)`` or ``("alibi", per batch, dtype)``. `sinks`: 0
    none, 1 (N,), M (N, M). `strides`: a letter each for q, k, v: c contiguous, t transposed
    storage, e expanded (stride 0), s strided last dim, o cut out of a larger storage.
    `grad`: which of ``qkv`` plus ``b`` (bias) and ``s`` (sinks) want gradients. `poison`: also
    run with NaN, and with huge numbers, in what is masked. `quantized`: keys and values are
    codes, ``(dtype, block size)``.
    """

    seed: int = 0
    b: int = 1
    t: int = 4
    s: int = 4
    n: int = 1
    k: int = 1
    h: int = 8
    v: int = 8
    dtype: str = "float32"
    layout: str = "BTNH"
    mask: Tree | None = None
    bias: Tree | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: int = 0
    strides: str = "ccc"
    grad: str = ""
    lse: bool = False
    deterministic: bool = False
    poison: bool = False
    quantized: Tree | None = None

    @property
    def spec(self) -> str:
        """The line from which :meth:`from_spec` makes this case again."""
        kept = {"seed": self.seed, "b": self.b, "t": self.t, "s": self.s}
        for f in fields(self):
            if (value := getattr(self, f.name)) != f.default:
                kept[f.name] = value
        return json.dumps(kept, separators=(",", ":"))

    @classmethod
    def from_spec(cls, text: str) -> Case:
        """Read a line that :attr:`spec` wrote; raise :class:`InvalidProblem` for others."""
        try:
            data = json.loads(text)
            case = cls(**{name: _tuples(value) for name, value in data.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidProblem(
                f"got the case {text[:80]!r}, expected a line that polyattn fuzz printed ({error})."
            ) from error
        case._check(text)
        return case

    def _check(self, text: str) -> None:
        sizes = (self.b, self.t, self.s, self.n, self.k, self.h, self.v)
        known = self.dtype in DTYPES and self.layout in LAYOUTS
        ints = all(type(size) is int and size >= 0 for size in (*sizes, self.sinks, self.seed))
        letters = len(self.strides) == 3 and set(self.strides) <= set("cteso")
        codes = self.quantized is None or (
            not self.packed
            and len(self.quantized) == 2
            and self.quantized[0] in CODES
            and type(self.quantized[1]) is int
            and self.quantized[1] > 0
        )
        if not (known and ints and letters and codes and set(self.grad) <= set("qkvbs")):
            raise InvalidProblem(
                f"got the case {text[:200]!r} with a dtype, layout, size, strides, grad or "
                "codes that mean nothing, expected a line that polyattn fuzz printed."
            )

    def with_(self, **changes: Any) -> Case:
        """Return a copy with some fields changed."""
        return replace(self, **changes)

    @property
    def packed(self) -> bool:
        """Whether `b` sequences lie in one row of tokens."""
        return self.layout == "packed"


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value

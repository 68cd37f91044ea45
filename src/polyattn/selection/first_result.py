"""The first result of a kernel from another package, checked before it reaches the caller.

What this package's own backends give is tested on random problems; of a plugin nothing is known.
Shape, dtype, device and structure are compared once; from the next plan on the kernel is bare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polyattn.errors import PolyattnError
from polyattn.problem import Problem
from polyattn.selection.platforms import Described

__all__ = ["FirstResult", "check_result", "expected_results"]

Describe = Callable[[Any], Described | None]


def expected_results(problem: Problem, q: Described, v: Described) -> tuple[Described, ...]:
    """Return what out, and the lse if the problem wants it, have to be for this query and value.

    >>> q = Described((2, 5, 4, 8), "float32", "cpu")
    >>> p = Problem(batch=2, q_len=5, kv_len=5, heads=4, kv_heads=4, head_dim=8, lse=True)
    >>> print(*expected_results(p, q, q), sep=", ")
    (2, 5, 4, 8) float32 on cpu, (2, 4, 5) float32 on cpu
    """
    out = Described((*q.shape[:-1], v.shape[-1]), q.dtype, q.device)
    if not problem.lse:
        return (out,)
    *rest, a, b = q.shape[:-1]
    rows = (*rest, a, b) if problem.layout == "BNTH" else (*rest, b, a)
    return out, Described(rows, "float64" if q.dtype == "float64" else "float32", q.device)


def check_result(
    backend: str, problem: Problem, result: Any, q: Any, v: Any, describe: Describe
) -> None:
    """Raise PolyattnError unless `result` is what a call with query `q` and value `v` gives."""
    query, value = describe(q), describe(v)
    if query is None or value is None:
        return  # arrays that the front cannot tell of; it has admitted them
    expected = expected_results(problem, query, value)
    parts = result if problem.lse and isinstance(result, (tuple, list)) else (result,)
    if tuple(map(describe, parts)) == expected:
        return
    got = " and ".join(str(describe(part) or type(part).__name__) for part in parts)
    names = "a pair (out, lse): " if problem.lse else ""
    raise PolyattnError(
        f"got {got or 'nothing'} from the backend {backend!r}, expected {names}"
        f"{' and '.join(map(str, expected))}. Mend or uninstall the package that brings it, or ask "
        f"for another backend.\n  {problem}"
    )


class FirstResult:
    """A kernel whose results are checked until one is right; then it is as good as bare."""

    def __init__(
        self,
        kernel: Callable[..., Any],
        backend: str,
        problem: Problem,
        describe: Describe,
        note: Callable[[], None],
    ) -> None:
        self.kernel, self.right = kernel, False
        self._about = backend, problem
        self._describe, self._note = describe, note

    def __call__(self, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        """Run the kernel; raise PolyattnError for a result that cannot be one."""
        result = self.kernel(q, k, v, *rest)
        if not self.right:
            check_result(*self._about, result, q, v, self._describe)
            self.right = True
            self._note()
        return result

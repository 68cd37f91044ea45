"""Run the installed extension once for each instruction set and compare with NumPy in float64.

For wheels in an environment without the tests and torch:   python scripts/try_native.py
"""

import sys
import time

import numpy as np

from polyattn.native import module

B, T, N, K, H, HV = 2, 150, 6, 2, 40, 24
CAUSAL = ((1, -(2**62), 0, 0),)


def described(array: np.ndarray) -> tuple[int, int, int, int]:
    """Pointer and strides in elements of a (batch, length, heads, dim) array."""
    batch, row, head, _ = (stride // array.itemsize for stride in array.strides)
    return array.ctypes.data, batch, head, row


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Causal attention by its definition."""
    k, v = (np.repeat(x, N // K, axis=2).astype(np.float64) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q.astype(np.float64), k) / np.sqrt(H)
    scores[:, :, np.triu(np.ones((T, T), dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(np.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v))


def main() -> int:
    """Return 1 if an instruction set is further from the definition than float32 explains."""
    random = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, HV))
    q, k, v = (random.standard_normal(shape, dtype=np.float32) for shape in shapes)
    want = expected(q, k, v)
    native, info = module.load(), module.build_info()
    print(f"polyattn {info.version}, {info.compiler}: {', '.join(info.compiled)}; {sys.platform}")
    wrong = False
    for index, name in enumerate(module.isas()):
        out = np.full((B, T, N, HV), np.nan, dtype=np.float32)
        begin = time.perf_counter()
        native.forward(
            index, 2, 0, (B, N, K, T, T, H, HV), H**-0.5, 0.0,
            *map(described, (q, k, v, out)), None, CAUSAL, None, None, None, None, None, None,
        )  # fmt: skip
        took = (time.perf_counter() - begin) * 1e3
        error = float(np.abs(out - want).max())
        right = error < 1e-5  # sums of at most 150 weighted values around 1, in float32
        wrong |= not right
        print(f"{name}: error {error:.1e}, {took:.2f} ms{'' if right else '  WRONG'}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

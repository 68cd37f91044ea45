"""Options and arrays of float64 that float32, in which the kernels compute, does not hold."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from polyattn import DenseBias, numpy_attention
from polyattn.native import module
from polyattn.selection.registry import Available

pytestmark = pytest.mark.skipif(
    not isinstance(module.status(), Available), reason="the extension is not built"
)

X = np.random.default_rng(0).standard_normal((1, 5, 2, 8), dtype=np.float32)


@pytest.mark.parametrize("cap", [1e-46, 1e-300])
def test_a_soft_cap_that_rounds_to_0_is_a_cap(cap: float) -> None:
    mean = np.broadcast_to(X.mean(1, keepdims=True), X.shape)
    np.testing.assert_allclose(numpy_attention(X, X, X, softcap=cap), mean, atol=1e-6)


def test_the_least_of_float64_is_no_infinity() -> None:
    least = np.finfo(np.float64).min
    bias = np.where(np.arange(5)[:, None] == 4, least, np.where(np.arange(5) < 2, 0, least))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = numpy_attention(X, X, X, bias=DenseBias(bias))
    seen = numpy_attention(X, X[:, :2], X[:, :2])
    np.testing.assert_allclose(out[:, :4], seen[:, :4], atol=1e-6)
    np.testing.assert_allclose(out[:, 4], X.mean(1), atol=1e-6)  # alike: not a row without keys

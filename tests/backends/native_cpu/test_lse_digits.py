"""The lse is float32 whatever the type of the inputs, and has that many digits."""

import math

import pytest
import torch

from polyattn.native import module
from polyattn.selection.registry import Available
from polyattn.torch import attention

if not isinstance(module.status(), Available):
    pytest.skip("the extension is not built", allow_module_level=True)

TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("queries", [1, 70], ids=["few queries", "tiles of them"])
@pytest.mark.parametrize("isa", module.isas())
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_the_lse_has_the_digits_of_float32(monkeypatch, dtype, isa, queries):
    monkeypatch.setenv("POLYATTN_NATIVE_ISA", isa)

    def lse_of(q, k, **options):
        return attention(q, k, k, return_lse=True, backend="native_cpu", **options)[1].double()

    for keys in (1, 2, 7, 64, 1000):
        q = torch.zeros(1, queries, 2, 32, dtype=dtype)
        k = torch.zeros(1, keys, 2, 32, dtype=dtype)
        equal = lse_of(q, k)  # the log of how many there are
        assert torch.allclose(equal, torch.tensor(math.log(keys)).double(), rtol=0, atol=3e-6)
        k[..., 0], q[..., 0] = torch.randn(keys).to(dtype)[None, :, None], 1
        exact = k[0, :, 0, 0].double().logsumexp(0)
        assert torch.allclose(lse_of(q, k, scale=1.0), exact, rtol=0, atol=3e-6)

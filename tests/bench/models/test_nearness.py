"""A model that asks for float32 by itself is run in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor

from polyattn.bench.models.nearness import in_float64

X = torch.randn(3, 4, dtype=torch.float64)
KEPT = torch.randn(4, 4)
"""What a model holds past its buffers, and ``.double()`` does not reach."""

ASKED: dict[str, Callable[[], Tensor]] = {
    "float": lambda: X.float(),
    "float of integers": lambda: torch.arange(3).float(),
    "to": lambda: X.to(torch.float32),
    "to, of integers": lambda: torch.arange(3).to(torch.float32),
    "to, by name": lambda: X.to(dtype=torch.float32),
    "made": lambda: torch.zeros(3, dtype=torch.float32),
    "made of NumPy": lambda: torch.tensor(np.zeros(3, np.float32)),
    "from NumPy, where it is used": lambda: X + torch.from_numpy(np.zeros(4, np.float32)),
    "kept, in a product": lambda: X @ KEPT,
    "kept, in a list": lambda: torch.cat([X, KEPT]),
}


@pytest.mark.parametrize("name", ASKED)
def test_float64_stays(name: str) -> None:
    with in_float64():
        assert ASKED[name]().dtype is torch.float64


def test_bits_and_what_is_written_in_place_are_left() -> None:
    bits, held = torch.zeros(2, dtype=torch.int32), torch.zeros(3, 4)
    with in_float64():
        assert bits.view(torch.float32).shape == (2,)
        held.copy_(X)
    torch.testing.assert_close(held, X.float())

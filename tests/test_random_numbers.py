"""Every test draws the same random numbers, whichever tests ran before it in its process."""

import random
from typing import Any

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")

RNG = np.random.default_rng(0)
FIRST: list[list[Any]] = []


def draw() -> list[Any]:
    """One number of each generator that tests share."""
    return [random.random(), np.random.rand(), torch.rand(()).item(), RNG.random()]


@pytest.fixture
def drawn() -> list[Any]:
    return draw()


@pytest.mark.parametrize("turn", range(3))
def test_fixtures_and_tests_draw_the_same_every_time(turn: int, drawn: list[Any]) -> None:
    found = [drawn, draw()]
    if FIRST:
        assert found == FIRST
    FIRST[:] = found
    draw()

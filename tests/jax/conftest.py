"""Compiling takes most of the time of these tests."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def short_compilation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep it short, but for kernels: these and the conformance suite compile as users do."""
    jax = pytest.importorskip("jax")
    before = jax.config.read("jax_disable_most_optimizations")
    kernels = "backends" in request.path.parts
    jax.config.update("jax_disable_most_optimizations", before or not kernels)
    yield
    jax.config.update("jax_disable_most_optimizations", before)

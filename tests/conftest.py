"""Settings for all tests: an own cache, no settings from outside, one thread per process."""

import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported. Tests run in parallel as processes; threads on top make them wait.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

settings.register_profile(
    "repeatable",
    derandomize=True,  # the suite must give the same answer twice; `polyattn fuzz` goes further
    database=None,
    deadline=None,  # the first call of a kernel compiles
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("repeatable")

_SAVED = pytest.StashKey[dict[str, str]]()
_CACHE = pytest.StashKey[tempfile.TemporaryDirectory]()

SEED = 20_251
_STARTS: dict[int, dict[str, Any]] = {}
"""How the NumPy generators of the test modules stood before their first test."""


def pytest_configure(config: pytest.Config) -> None:
    """Give this process an empty cache directory and take away the caller's POLYATTN_* settings."""
    config.stash[_SAVED] = {
        key: value for key, value in os.environ.items() if key.startswith("POLYATTN_")
    }
    config.stash[_CACHE] = tempfile.TemporaryDirectory(
        prefix="polyattn-tests-", ignore_cleanup_errors=True
    )
    for key in config.stash[_SAVED]:
        del os.environ[key]
    os.environ["POLYATTN_CACHE_DIR"] = config.stash[_CACHE].name
    os.environ["POLYATTN_CALIBRATION"] = "off"  # for the processes that tests start


@pytest.fixture(autouse=True, scope="session")
def native_kernels_are_the_faster() -> Iterator[None]:
    """Let choices rest on the same evidence wherever the tests run, and nothing be calibrated."""
    from polyattn.selection.evidence import KINDS, Evidence, Figure
    from polyattn.selection.evidence.of_machine import assume

    figure = Figure(1.3, 1.4, 1.5, "as these tests assume")
    dtypes = ("float32", "bfloat16", "float16")
    kinds = [kind for kind in KINDS if not kind.startswith("small")]
    with assume(Evidence({(dtype, kind): figure for dtype in dtypes for kind in kinds})):
        yield


_FROZEN = -600.0
"""When what had been made so far was last put out of the collector's sight."""


@pytest.fixture(autouse=True, scope="module")
def what_earlier_modules_made_is_not_searched_again() -> None:
    """Keep collections short: with the modules of thousands of tests, one takes seconds."""
    global _FROZEN
    if time.monotonic() - _FROZEN > 30:
        gc.collect()
        gc.freeze()
        _FROZEN = time.monotonic()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Put the environment back and remove the cache directory."""
    for variable in ("POLYATTN_CACHE_DIR", "POLYATTN_CALIBRATION"):
        os.environ.pop(variable, None)
    os.environ.update(config.stash[_SAVED])
    config.stash[_CACHE].cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let fixtures draw the same random numbers every time."""
    _start_generators(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Let the test draw the same random numbers every time, whatever its fixtures drew."""
    _start_generators(item)


def _start_generators(item: pytest.Item) -> None:
    """Start all generators that tests share anew, those of the test's module among them.

    Which tests ran before in this process is a matter of chance where they run in parallel.
    """
    random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(SEED)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(SEED)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(SEED)
        for value in vars(getattr(item, "module", None) or object).values():
            if isinstance(value, numpy.random.Generator):
                bits = value.bit_generator
                bits.state = _STARTS.setdefault(id(value), bits.state)


@pytest.fixture(autouse=True)
def torchs_switches_as_they_were() -> Iterator[None]:
    """Fail a test that leaves one of torch's global switches changed; see polyattn.torch.flags.

    A test that is the first to import torch in its process has nothing to compare with.
    """
    before = _switches()
    yield
    if before:
        from polyattn.torch.flags import diff

        left = diff(before, _switches())
        assert not left, f"the test left torch's switches changed (before, now): {left}"


def _switches() -> dict[str, Any]:
    """How torch's switches stand; nothing where torch is not loaded, so as not to load it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    from polyattn.torch.flags import snapshot

    found = {name: v for name, v in snapshot().items() if not name.startswith("env.")}
    if torch.cuda.is_available():  # its first use adds rows, and torch's first call an order
        found = {name: v for name, v in found.items() if not name.startswith(_OF_A_DEVICE)}
        found["polyattn.flags"] = found["polyattn.flags"] | {"unreadable": {}}
    return found


_OF_A_DEVICE = ("cuda.cufft_plan_cache", "cuda.sdp_priority")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is no CUDA device."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_cuda():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _has_cuda() -> bool:
    try:
        import torch
    except ModuleNotFoundError:
        return False
    return torch.cuda.is_available()

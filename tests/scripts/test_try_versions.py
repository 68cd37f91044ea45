"""Which versions `scripts/try_versions` tries, and what it makes of pytest's report."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("try_versions", ROOT / "scripts/try_versions.py")
assert SPEC is not None and SPEC.loader is not None
try_versions = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = try_versions  # dataclasses look their module up
SPEC.loader.exec_module(try_versions)

PYPROJECT = """
[project]
requires-python = ">=3.11,<3.14"
[project.optional-dependencies]
torch = ["torch>=2.9", "numpy>=1.26"]
jax = ["jax>=0.8"]
"""
REPORT = """<testsuites><testsuite tests="5" failures="1" errors="1" skipped="1">
<testcase classname="tests.a" name="test_one"/><testcase classname="tests.a" name="test_two"/>
<testcase classname="tests.a" name="test_three"><failure/></testcase>
<testcase classname="tests.a" name="test_four"><error/></testcase>
<testcase classname="tests.a" name="test_five"><skipped/></testcase>
</testsuite></testsuites>"""


def test_the_corners_are_both_ends_of_torch_every_python_and_the_oldest_jax() -> None:
    found = [(c.python, c.tried) for c in try_versions.corners(PYPROJECT, "2.13.0", "2.15.0")]
    assert found == [
        ("3.11", "torch==2.9.0"), ("3.11", "torch==2.15.0"), ("3.12", "torch==2.13.0"),
        ("3.13", "torch==2.15.0"), ("3.11", "jax==0.8.0"),
    ]  # fmt: skip


def test_our_own_pyproject_can_be_read() -> None:
    pythons, oldest = try_versions.declared((ROOT / "pyproject.toml").read_text())
    assert pythons[0] == "3.11" and oldest.startswith("2.")


def test_a_report_is_counted_and_its_failures_named() -> None:
    corner = try_versions.Corner("3.12", "2.13.0")
    try_versions.count(corner, REPORT)
    assert corner.counts == {"passed": 2, "failed": 1, "errors": 1, "skipped": 1}
    assert corner.failed == ["tests.a::test_three", "tests.a::test_four"]
    assert not corner.passes
    assert "FAILS" in try_versions.table([corner]) and "test_four" in try_versions.table([corner])


@pytest.mark.parametrize(
    ("counts", "trouble", "passes"),
    [
        ({"passed": 3, "failed": 0, "errors": 0, "skipped": 1}, "", True),
        ({"passed": 0, "failed": 0, "errors": 0, "skipped": 4}, "", False),
        ({"passed": 3, "failed": 0, "errors": 0, "skipped": 1}, "no wheel", False),
        ({}, "no such torch", False),
    ],
)
def test_a_corner_passes_where_tests_ran_and_none_failed(
    counts: dict[str, int], trouble: str, passes: bool
) -> None:
    corner = try_versions.Corner("3.11", "2.9.0", counts=counts, trouble=trouble)
    assert corner.passes is passes


def test_every_test_of_the_core_is_there() -> None:
    every = (*try_versions.CORE, *try_versions.CORE_OF_JAX)
    assert [name for name in every if not (ROOT / name).exists()] == []

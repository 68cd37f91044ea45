"""The pytest plugin, in pytest processes of its own."""

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

# Not importorskip: pytester forgets the modules that a test imports, and torch loads only once.
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")

PLUGIN = ("-p", "polyattn_pytest", "-p", "no:cacheprovider", "-p", "no:randomly")

MODELS = """
import pytest
import torch
from torch import nn

def model(activation):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 8)).eval()

X = torch.linspace(-1, 1, 32).view(4, 8)
"""


def run(pytester: pytest.Pytester, test: str, *options: str) -> tuple[pytest.RunResult, str]:
    pytester.makepyfile(test)
    result = pytester.runpytest_subprocess(*PLUGIN, *options)
    return result, result.stdout.str()


def test_it_is_an_entry_point_of_the_distribution() -> None:
    points = importlib.metadata.entry_points(group="pytest11")
    assert [one.value for one in points if one.name == "polyattn_pytest"] == ["polyattn_pytest"]


def test_loading_it_loads_nothing_of_polyattn(pytester: pytest.Pytester) -> None:
    result, _ = run(
        pytester,
        """
        import sys

        def test_nothing_is_loaded(request):
            assert request.config.pluginmanager.hasplugin("polyattn_pytest")
            heavy = {"polyattn", "torch", "jax", "numpy"}
            assert not heavy & sys.modules.keys()
        """,
        "-W",
        "error",
        # the plugin of another package, which may be here beside it
        "-p",
        "no:jaxtyping",
        # of an editable install, whose import hook is a file of the plugin's distribution
        "-W",
        "ignore:Module already imported so cannot be rewritten; _editable",
    )
    result.assert_outcomes(passed=1)


def test_it_may_be_named_by_a_conftest_too(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("pytest_plugins = ['polyattn_pytest']")
    result, _ = run(pytester, "def test_one(): pass")
    result.assert_outcomes(passed=1)


def test_polyattns_own_asserts_are_not_rewritten(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        marks="""
        def pytest_addoption(parser, pluginmanager):  # as pytest does for an installed wheel
            pluginmanager.rewrite_hook.mark_rewrite("polyattn", "polyattn_pytest", "another")
        """,
        another="",
    )
    pytester.makepyfile(
        """
        def test_loader(request):
            import another, polyattn.errors
            hook = request.config.pluginmanager.rewrite_hook
            assert another.__loader__ is hook and polyattn.errors.__loader__ is not hook
        """
    )
    result = pytester.runpytest_subprocess("-p", "marks", *PLUGIN)
    result.assert_outcomes(passed=1)


@needs_torch
def test_what_failed_is_reported_and_kept(pytester: pytest.Pytester) -> None:
    result, said = run(
        pytester,
        MODELS
        + """
def test_wrong(assert_same_activations):
    assert_same_activations(model(nn.GELU()), model(nn.GELU(approximate="tanh")), X)

def test_right(assert_same_activations, tmp_path):
    assert assert_same_activations(model(nn.GELU()), model(nn.GELU()), X).equal
    assert list(tmp_path.iterdir()) == []

class Checks(nn.Module):
    def forward(self, x):
        assert x.shape == (1, 1), "the model's own"
        return x

def test_own(assert_same_activations):
    assert_same_activations(model(Checks()), model(Checks()), X)

def test_expected(assert_same_activations):
    with pytest.raises(AssertionError, match="the output of '1'") as caught:
        assert_same_activations(model(nn.GELU()), model(nn.SiLU()), X)
    assert caught.value.verdict.culprit.module == "1"
""",
        "--basetemp=base",
    )
    result.assert_outcomes(failed=2, passed=2)
    wrong, own = said.split("_ test_own _")
    result.stdout.fnmatch_lines(
        [
            "E       AssertionError: different: the output of '1'; its inputs agree",
            "*Captured polyattn call*",
            "different: the output of '1'; its inputs agree",
            "1 * culprit",
            "polyattn trace diff *reference.jsonl *port.jsonl --all",
            "*verdict.html",
        ]
    )
    assert wrong.count("\nE  ") == 3  # the verdict, where it shows, and the error: no table
    assert "assertion.py" not in said and "polyattn_pytest" not in wrong.split("FAILURES")[1]
    assert "the model's own" in own and "Captured polyattn" not in own
    kept = pytester.path / "base" / "test_wrong0" / "activations"
    assert sorted(one.name for one in kept.iterdir()) == [
        "port.jsonl",
        "reference.jsonl",
        "verdict.html",
    ]


@needs_torch
def test_traces_go_where_the_option_says(pytester: pytest.Pytester) -> None:
    result, said = run(
        pytester,
        MODELS
        + """
@pytest.mark.parametrize("name", ["a", "../../b"])
def test_wrong(assert_same_activations, name, tmp_path):
    try:
        assert_same_activations(model(nn.GELU()), model(nn.ReLU()), X)
    finally:
        assert list(tmp_path.iterdir()) == []
""",
        "--polyattn-traces",
        "traces",
    )
    result.assert_outcomes(failed=2)
    assert "Captured polyattn call" in said
    traces = pytester.path / "traces"
    folders = sorted(one.name for one in traces.iterdir())
    assert len(folders) == 2 and not [name for name in folders if ".." in Path(name).parts]
    assert all((traces / name / "reference.jsonl").is_file() for name in folders)
    assert str(traces / folders[0] / "verdict.html") in said


def test_without_torch_the_fixture_says_what_is_missing(pytester: pytest.Pytester) -> None:
    result, said = run(
        pytester,
        """
        import sys

        def test_without(assert_same_activations, monkeypatch):
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
            assert_same_activations(1, 2, 3)
        """,
    )
    result.assert_outcomes(failed=1)
    assert "pip install 'polyattn[torch]'" in said

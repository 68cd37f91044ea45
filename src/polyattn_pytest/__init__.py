"""pytest plugin of polyattn: the fixture ``assert_same_activations``. PYTEST_DONT_REWRITE

pytest loads this in every project that has polyattn installed. So it is a package beside polyattn
that imports nothing of it before the fixture is used: not polyattn, torch or numpy. Its entry point
has the module's name, so that ``-p polyattn_pytest`` and ``pytest_plugins`` work beside it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["assert_same_activations", "pytest_addoption"]

_SECTION = "polyattn"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options."""
    _leave_polyattn_as_it_is(pluginmanager)
    group = parser.getgroup("polyattn", "comparing models' activations")
    group.addoption(
        "--polyattn-traces",
        metavar="DIR",
        default=None,
        help="keep the traces of failing comparisons in DIR, in a folder for each test, and not in "
        "the test's tmp_path",
    )


@pytest.fixture
def assert_same_activations(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """``polyattn.hooks.assert_same_activations``, which keeps the traces of what fails.

    The error says who is the culprit; a section of the report has the table and where the traces
    are, with a page to look at: in ``tmp_path / "activations"``, or below the folder of
    ``--polyattn-traces``.
    """

    def check(reference: Any, port: Any, inputs: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        from polyattn import hooks

        options.setdefault("folder", _folder(request, tmp_path))
        try:
            return hooks.assert_same_activations(reference, port, inputs, **options)
        except AssertionError as error:
            verdict = getattr(error, "verdict", None)
            if verdict is None:  # the model's own
                raise
            short = AssertionError(str(error).partition("\n\n")[0])
            short.verdict = verdict  # type: ignore[attr-defined]
            _report(request.node, str(error), verdict)
        raise short

    return check


def _folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    chosen = request.config.getoption("--polyattn-traces")
    if chosen is None:
        return tmp_path / "activations"
    name = re.sub(r"[^\w.-]+", "-", request.node.nodeid).strip(".-")
    return Path(chosen).absolute() / name[-120:]


def _report(item: pytest.Item, said: str, verdict: Any) -> None:
    """Put the verdict and what to do next into the test's report."""
    from polyattn.errors import TraceError
    from polyattn.report.verdict import write_page

    lines = [said, ""]
    if verdict.reference and verdict.port:
        both = shlex.join((verdict.reference, verdict.port))
        lines.append(f"polyattn trace diff {both} --all")
    if verdict.port:
        try:
            lines.append(str(write_page(verdict, Path(verdict.port).with_name("verdict.html"))))
        except TraceError as error:
            lines.append(str(error))
    item.add_report_section("call", _SECTION, "\n".join(lines))


def _leave_polyattn_as_it_is(pluginmanager: pytest.PytestPluginManager) -> None:
    """Take polyattn off pytest's list of packages whose asserts are rewritten.

    Everything in the distribution of a plugin is on it. So each import of polyattn would be parsed
    and compiled anew in every test run (0.5 s where no bytecode is written), and it would run other
    code under test than in use. There is no public way; where this one is gone, it is only slower.
    """
    hook = getattr(pluginmanager, "rewrite_hook", None)
    names = getattr(hook, "_must_rewrite", None)
    if isinstance(names, set):
        names.discard("polyattn")

"""Examples in docstrings run and print what they show; public modules say what they are for."""

import doctest

import pytest

from polyattn.native import module as native
from polyattn.selection.registry import Missing
from tests.public_modules import import_or_skip, public_module_names

OPTIONS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
NEED_NATIVE = {"polyattn.numpy.api"}  # examples that call the kernels


@pytest.mark.parametrize("name", public_module_names())
def test_examples_run(name: str) -> None:
    module = import_or_skip(name)
    if name in NEED_NATIVE and isinstance(native.status(), Missing):
        pytest.skip("the extension is not built")
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


@pytest.mark.parametrize("name", public_module_names())
def test_module_says_what_it_is_for(name: str) -> None:
    assert (import_or_skip(name).__doc__ or "").strip(), f"{name} has no docstring"

"""docs/knobs.md says what the tables say."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "knobs_page.py"


def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("knobs_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_page_is_up_to_date(framework):
    pytest.importorskip(framework)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), framework], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_every_row_has_one_line_and_a_lost_one_comes_back(framework):
    pytest.importorskip(framework)
    page = script().PAGE.read_text(encoding="utf-8")
    begin = page.index(script().BEGIN.format(framework))
    part = page[begin : page.index(script().END.format(framework))]
    flags = importlib.import_module(f"polyattn.{framework}.flags")
    lines = part.splitlines(keepends=True)
    for knob in script().of_every_machine(row.knob for row in flags.table()):
        (line,) = (line for line in lines if line.startswith(f"| `{knob.name}` |"))
    assert script().filled(page.replace(part, part.replace(line, "")), framework) == page


def test_what_markdown_would_take_for_markup_is_escaped():
    prose = script().prose
    assert prose("cuda.*_sdp_enabled, and *this*") == r"`cuda.*_sdp_enabled`, and \*this\*"
    assert prose("use `a_b | c` or f_g(...)") == r"use `a_b \| c` or `f_g(...)`"
    assert prose("plain, [i] <b>") == r"plain, \[i\] \<b>"


def test_what_only_some_machines_have_is_written_once():
    from polyattn.flags import Knob

    names = ["cuda.cache[0].size", "cuda.cache[1].size", "python_native.future.enabled", "x"]
    rows = [Knob(name=n, kind="knob", type="int", about="For device 1.", where=n) for n in names]
    found = list(script().of_every_machine(rows))
    assert [knob.name for knob in found] == ["cuda.cache[i].size", "x"]
    assert found[0].about == "For device i."

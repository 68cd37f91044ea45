"""Every snippet of README.md and docs/ runs.

A page becomes one program, run in its own process and an empty folder: its ```python blocks stay on
the lines where they are (so a traceback names the line of the page), and each line `$ polyattn ...`
of a ```console block becomes a call of that command, which must exit 0. A fence with `no-run` after
the language is left out, for what needs a device or a network.
"""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from itertools import takewhile
from pathlib import Path

import pytest

from tests.xla_flags import short_compilation

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>\w*)(?P<options>.*)$")
PROMPT = "$ polyattn "
LIMIT_SECONDS = 600
NEEDS = {"docs/diffusers.md": "diffusers"}
"""What a page is about, where that need not be installed."""
SHORT_COMPILATION = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": short_compilation()}
"""Of JAX, which is most of its pages' time and the subject of none."""

RUN_PAGE = """\
import runpy, subprocess, sys

def run_polyattn(*arguments):
    code = "import sys; sys.argv[0] = 'polyattn'; from polyattn.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *arguments])
    if done.returncode != 0:
        raise SystemExit(f"polyattn {' '.join(arguments)}: exit code {done.returncode}, expected 0")

runpy.run_path(sys.argv[1], init_globals={"run_polyattn": run_polyattn}, run_name="__main__")
"""


def console_program(lines: list[str]) -> list[str]:
    """Calls of run_polyattn in place of the `$ polyattn` lines; the output shown is dropped.

    >>> console_program(["$ polyattn doctor --json", "{...}"])
    ["run_polyattn('doctor', '--json')", '']
    """
    program = [""] * len(lines)
    command, start = "", 0
    for number, line in enumerate(lines):
        if command:
            command += line.strip()
        elif line.startswith(PROMPT):
            command, start = line.removeprefix(PROMPT), number
        if command.endswith("\\"):
            command = command[:-1] + " "
        elif command:
            arguments = ", ".join(map(repr, shlex.split(command, comments=True)))
            program[start] = f"run_polyattn({arguments})"
            command = ""
    return program


def page_program(text: str) -> str:
    """The page as a Python program with as many lines as the page has."""
    program: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        program.append("")
        if not (fence := FENCE.match(line)):
            continue
        ticks = fence["ticks"]
        block = list(takewhile(lambda line, ticks=ticks: line.strip() != ticks, lines))
        block = textwrap.dedent("\n".join(block)).split("\n") if block else []
        if "no-run" in fence["options"] or fence["language"] not in ("python", "console"):
            block = [""] * len(block)
        elif fence["language"] == "console":
            block = console_program(block)
        program += [*block, ""]
    return "\n".join(program) + "\n"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_runs(page: Path, tmp_path: Path) -> None:
    program = page_program(page.read_text(encoding="utf-8"))
    if not program.strip():
        pytest.skip("no snippets")
    if name_of(page) in NEEDS:
        pytest.importorskip(NEEDS[name_of(page)])
    for name in ("README.md", "docs", "examples"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    script = tmp_path / f"{page.stem.replace('-', '_')}_page.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE, script.name],
        cwd=tmp_path,
        env=os.environ | SHORT_COMPILATION,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, (
        f"{name_of(page)}, same line numbers:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    )


def test_page_program_keeps_lines_order_and_one_namespace() -> None:
    page = textwrap.dedent(
        """\
        # Title
        ```python
        x = 1
        ```
        Then:
        ```console
        $ polyattn run --times 2 \\
            "a b.py"
        output
        $ ls
        ```
        - a list
          ```python
          y = x
          ```
        ```python no-run
        boom
        ```
        ```text
        boom
        ```
        """
    )
    expected = {3: "x = 1", 7: "run_polyattn('run', '--times', '2', 'a b.py')", 14: "y = x"}
    program = page_program(page).splitlines()
    assert len(program) == len(page.splitlines())
    assert {number: line for number, line in enumerate(program, 1) if line} == expected

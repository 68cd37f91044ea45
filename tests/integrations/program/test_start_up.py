"""What every Python of a program runs first: nothing to be noticed, and the user's own after it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.program.programs import GIVE_UP_S, SRC, START_UP


def python(code, *paths, run=None, flags=()):
    """Run code with these folders in PYTHONPATH, the start-up's first."""
    env = {k: v for k, v in os.environ.items() if k != "POLYATTN_RUN"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, [START_UP, *paths]))
    if run is not None:
        env["POLYATTN_RUN"] = str(run)
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        capture_output=True, text=True, timeout=GIVE_UP_S, env=env,
    )  # fmt: skip


def said(folder):
    lines = [line for path in folder.glob("*.said") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


@pytest.fixture
def run(tmp_path):
    """A folder of a run, and one for modules of the program."""
    folder, modules = tmp_path / "run", tmp_path / "modules"
    folder.mkdir()
    modules.mkdir()
    (folder / "run.json").write_text('{"supervisor": 1, "asked": []}')
    return folder, modules


LOOK = (
    "import sys; print([type(f).__name__ for f in sys.meta_path if 'Waiting' in type(f).__name__],"
    "[p for p in sys.path if 'start_up' in p], 'polyattn' in sys.modules,"
    "getattr(sys.modules.get('sitecustomize'), 'MINE', None))"
)


def test_without_the_variable_nothing_happens(run):
    assert python(LOOK).stdout == "[] [] False None\n"
    assert python(LOOK, run="/nowhere").stdout == "[] [] False None\n"


def test_with_it_torch_is_waited_for_and_nothing_of_polyattn_imported(run):
    folder, _ = run
    done = python(LOOK, run=folder, flags=["-X", "dev"])
    assert done.stdout == "['_Waiting'] [] False None\n"
    assert done.stderr == ""
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]


def test_the_users_own_sitecustomize_runs(run):
    folder, modules = run
    own = modules / "sitecustomize.py"
    own.write_text("import sys\nMINE = [p for p in sys.path if 'start_up' in p]\n")
    assert python(LOOK, modules, run=folder).stdout == "['_Waiting'] [] False []\n"
    assert python(LOOK, modules).stdout == "[] [] False []\n"
    own.write_text("raise RuntimeError('theirs')\n")
    assert "RuntimeError: theirs" in python(LOOK, modules, run=folder).stderr


NOT_INSTALLED = (
    "import sys\n"
    "sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]\n"
    f"sys.path[:] = [p for p in sys.path if 'site-packages' not in p and p != {str(SRC)!r}]\n"
)
"""As in a Python that has not the packages that ours has, however polyattn is installed there."""


def test_another_polyattn_or_none_is_said(run):
    folder, modules = run
    (modules / "torch.py").write_text("HERE = True\n")
    code = NOT_INSTALLED + "import torch; print(torch.HERE)"
    assert python(code, modules, run=folder).stdout == "True\n"
    (modules / "polyattn").mkdir()
    (modules / "polyattn/__init__.py").write_text("raise SystemExit('imported')\n")
    assert python(code, modules, run=folder).stdout == "True\n"
    whys = [one["why"] for one in said(folder)]
    where = modules.resolve() / "polyattn"
    assert sorted(why.partition(" has ")[2] for why in whys) == [
        f"another polyattn, in {where}", "no polyattn",
    ]  # fmt: skip


def test_what_cannot_be_routed_is_said_and_the_program_goes_on(run):
    """A torch that is none: polyattn cannot be brought in there."""
    folder, modules = run
    (modules / "torch.py").write_text("HERE = True\n")
    done = python("import torch; print(torch.HERE)", modules, SRC, run=folder)
    assert done.stdout == "True\n"
    (one,) = said(folder)
    assert "torch was imported, but not routed" in one["why"]


def test_where_nothing_can_be_said_the_program_goes_on(run, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(START_UP)
    import polyattn_start_up

    polyattn_start_up.say(str(tmp_path / "gone"), "what", "why")  # the run is over
    polyattn_start_up.say(os.devnull, "what", "why")
    assert not (tmp_path / "gone").exists()


def test_a_module_is_as_if_nobody_waited(run):
    folder, modules = run
    (modules / "jax.py").write_text("assert __spec__.loader is __loader__\n")
    code = (
        "import importlib.util, jax\n"
        "print(type(jax.__loader__).__name__, jax.__spec__.loader is jax.__loader__)\n"
        "found = importlib.util.find_spec('flash_attn')\n"
        "print(found.origin, found.loader.get_filename('flash_attn') == found.origin)\n"
    )
    (modules / "flash_attn.py").write_text("raise ImportError('no such device')\n")
    done = python(code, modules, run=folder)
    assert done.stdout == f"SourceFileLoader True\n{modules / 'flash_attn.py'} True\n", done.stderr
    assert [one["what"] for one in said(folder)] == ["jax"]  # flash_attn was only looked for


def test_what_failed_to_import_is_waited_for_again(run):
    folder, modules = run
    (modules / "xformers").mkdir()
    (modules / "xformers/__init__.py").write_text("")
    (modules / "xformers/ops.py").write_text(
        "import os\nif 'READY' not in os.environ:\n    raise ImportError('not yet')\n"
    )
    code = (
        "import os\n"
        "try:\n    import xformers.ops\n"
        "except ImportError:\n    os.environ['READY'] = '1'\n"
        "import xformers.ops\nimport xformers.ops\n"
    )
    done = python(code, modules, run=folder)
    assert done.returncode == 0, done.stderr
    assert [one["what"] for one in said(folder)] == ["xformers"]


def test_children_that_cannot_be_reached_are_said(run):
    folder, _ = run
    code = (
        "import os, subprocess, sys\n"
        "me = sys.executable\n"
        "subprocess.run([me, '-c', 'pass'])\n"
        "subprocess.run([me, '-I', '-c', 'pass'])\n"
        "subprocess.run([me, '-c', 'pass'], env={'PATH': os.environ['PATH']})\n"
        "subprocess.check_output('true', shell=True)\n"
        "subprocess.Popen(args=[me, '-uE', '-c', 'pass']).wait()\n"
        "try:\n    subprocess.run(['/no/such/program'])\n"
        "except FileNotFoundError as error:\n    print(error.filename)\n"
    )
    done = python(code, run=folder)
    assert done.stdout == "/no/such/program\n", done.stderr
    assert [one["why"] for one in said(folder)] == [
        "python -I reads no PYTHONPATH, by which programs are reached",
        "it was started with another environment, whose POLYATTN_RUN is not the run's",
        "python -E reads no PYTHONPATH, by which programs are reached",
    ]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python3 x.py", None),  # a string is the name of a program, which this is not
        (["python3.12", "-S", "x.py"], "-S runs no sitecustomize"),
        (["python", "x.py", "-I"], None),
        (["python", "-m", "x", "-I"], None),
        (["python", "-c", "pass", "-I"], None),
        (["python", "-Wignore", "-Xdev", "-u", "x.py"], None),
        (["python", "-OI", "x.py"], "-I reads no PYTHONPATH"),
        ([b"python", b"-I"], "-I reads no PYTHONPATH"),
        ([Path("/usr/bin/python3"), "-I"], "-I reads no PYTHONPATH"),
        (["bash", "-I"], None),
        (["pythonic", "-I"], None),
        ([], None),
        (None, None),
        ([3], None),
    ],
)
def test_which_commands_are_known_to_be_out_of_reach(command, why, monkeypatch):
    monkeypatch.syspath_prepend(START_UP)
    import polyattn_start_up

    env = {"POLYATTN_RUN": "folder", "PYTHONPATH": str(START_UP)}
    found = polyattn_start_up.unreachable(command, env, "folder")
    assert (found is None) == (why is None), found
    assert why is None or why in found[1]
    as_bytes = {os.fsencode(k): os.fsencode(v) for k, v in env.items()}
    assert polyattn_start_up.unreachable(command, as_bytes, "folder") == found

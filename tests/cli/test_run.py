"""`polyattn run`: as Python would run it, and what it says and writes."""

import json
import sys
from pathlib import Path

import pytest

from polyattn.cli import main
from polyattn.integrations.program.record_file import read_record
from tests.integrations.program.programs import calls, polyattn, ran, reported

pytest.importorskip("torch")

ASKS = """
import sys
import torch, torch.nn.functional as F
q = torch.randn(1, 2, 8, 8)
for _ in range(3):
    F.scaled_dot_product_attention(q, q, q, is_causal=True)
F.scaled_dot_product_attention(q[0, 0], q[0, 0], q[0, 0])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one, with the program in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(ASKS)
    return tmp_path


class TestAsPython:
    def test_no_torch_at_all(self, folder):
        text = (
            "import sys\nprint('torch' in sys.modules, 'polyattn' in sys.modules, sys.argv[1:])\n"
        )
        (folder / "plain.py").write_text(text)
        done = polyattn("run", "plain.py", "--json", "x")
        assert (done.returncode, done.stdout) == (0, "False False ['--json', 'x']\n")
        assert "no attention call" in done.stderr
        assert "The program imported no torch." in " ".join(done.stderr.split())

    def test_options_of_python_path_main_and_input(self, folder):
        (folder / "looks.py").write_text(
            "import sys\n"
            "print(sys.flags.optimize, __name__, __file__, sys.path[0], sys.stdin.read())\n"
            "sys.exit('a message')\n"
        )
        done = polyattn("run", "looks.py", input="typed")
        assert done.stdout == f"0 __main__ {folder / 'looks.py'} {folder} typed\n"
        assert (done.returncode, "a message" in done.stderr) == (1, True)

    @pytest.mark.parametrize("dash", ["-", "-c"])
    def test_from_standard_input_and_as_a_text(self, folder, dash):
        text = "import sys\nprint(__name__, sys.argv, repr(sys.path[0]))\n"
        code = [text] if dash == "-c" else []
        done = polyattn("run", dash, *code, "--json", input=None if code else text)
        assert (done.returncode, done.stdout) == (0, f"__main__ ['{dash}', '--json'] ''\n")
        assert "no attention call" in done.stderr

    def test_a_command_in_place_of_a_program(self, folder, monkeypatch, capsys):
        monkeypatch.setattr("shutil.which", {"python3": "/b/python3", "launch": "/b/launch"}.get)
        assert main(["run", "python3", "program.py"]) == 2
        assert "leave 'python3' out" in capsys.readouterr().err
        assert main(["run", "launch", "program.py"]) == 2
        assert "/b/launch" in capsys.readouterr().err
        assert main(["run", "-c"]) == 2
        assert "got no program" in capsys.readouterr().err

    def test_what_a_program_sets_before_it_imports_torch_holds(self, folder):
        text = "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n"
        (folder / "threads.py").write_text(text + "print(torch.get_num_threads())\n")
        done = polyattn("run", "threads.py", env={"OMP_NUM_THREADS": "2"})
        assert done.stdout == "1\n"

    def test_polyattn_imported_first_and_torch_in_a_thread(self, folder):
        text = """
import threading, polyattn.torch
def ask():
    import torch, torch.nn.functional as F
    q = torch.randn(1, 2, 8, 8)
    F.scaled_dot_product_attention(q, q, q)
    polyattn.torch.attention(q, q, q)
thread = threading.Thread(target=ask)
thread.start()
thread.join()
ask()
"""
        report = reported(folder, text, options=["--backend", "sdpa_math"])
        assert report["calls"] >= 3  # attention() in another thread is the program's own
        assert {backend for backend, _ in ran(report)} == {"sdpa_math"}

    def test_executors_that_nobody_shut_down(self, folder):
        text = (
            "from concurrent.futures import ThreadPoolExecutor\n"
            "pool = ThreadPoolExecutor(2)\n"
            "print(pool.submit(lambda: 3).result())\n"
        )
        (folder / "pool.py").write_text(text)
        assert polyattn("run", "pool.py").stdout == "3\n"

    def test_a_program_that_replaces_itself(self, folder):
        (folder / "first.py").write_text(
            "import os, sys, torch\nos.execv(sys.executable, [sys.executable, 'program.py'])\n"
        )
        done = polyattn("run", "--json=said.json", "first.py")
        assert done.returncode == 0, done.stderr
        report = json.loads(Path("said.json").read_text())
        assert sum(calls(report).values()) == 4
        assert {one["state"] for one in report["processes"]} == {"ended"}

    def test_ends_by_a_crash(self, folder):
        text = ASKS + "import os, signal\nos.kill(os.getpid(), signal.SIGABRT)\n"
        report = reported(folder, text, code=134)
        assert report["calls"] == 4
        assert report["processes"][0]["state"] == "cut short"

    def test_a_python_that_reads_no_environment(self, folder):
        import subprocess

        done = subprocess.run(
            [sys.executable, "-I", "-m", "polyattn", "run", "program.py"],
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 2
        assert "expected one that reads PYTHONPATH" in done.stderr


class TestReports:
    def test_lines_fit_a_terminal_of_80_columns(self, folder):
        done = polyattn("run", "program.py")
        assert done.returncode == 0, done.stderr
        assert "4 attention calls, 3 (75 %) on its backends, 1 not" in done.stderr
        assert "inputs of 2, 2 and 2 dims" in done.stderr
        assert max(map(len, done.stderr.splitlines())) <= 80
        narrow = polyattn("run", "program.py", env={"COLUMNS": "60"})
        assert max(map(len, narrow.stderr.splitlines())) <= 60

    def test_a_record_gives_the_same_report_later(self, folder, capsys):
        first = polyattn("run", "--record", "r.jsonl", "--html", "r.html", "program.py")
        assert first.returncode == 0, first.stderr
        assert main(["run", "--from-record", "r.jsonl", "--html", "again.html"]) == 0
        err = capsys.readouterr().err
        said = first.stderr.partition("polyattn: ")[2].partition("record: ")[0]
        assert said in err
        assert Path("again.html").read_text() == Path("r.html").read_text()
        assert read_record("r.jsonl").calls == 4

    def test_gains_are_measured_and_kept(self, folder, capsys):
        assert polyattn("run", "--record", "r.jsonl", "program.py").returncode == 0
        command = ["run", "--from-record", "r.jsonl", "--gains=60", "--record", "g.jsonl"]
        assert main([*command, "--json=said.json"]) == 0
        report = json.loads(Path("said.json").read_text())
        gained = report["gained"]
        assert (gained["calls"], gained["measured"], gained["wrong"]) == (3, 3, 0)
        assert gained["times"]["low"] <= gained["times"]["about"] <= gained["times"]["high"]
        (one,) = report["classes"]
        assert len(one["gain"]["seconds"]) == len(one["gain"]["stock_seconds"]) >= 3
        assert main(["run", "--from-record", "g.jsonl"]) == 0
        err = capsys.readouterr().err
        assert "Attention took about" in err
        assert "100 % of the routed calls" in " ".join(err.split())

    def test_rank_is_said_where_each_rank_has_a_report(self, folder):
        done = polyattn("run", "program.py", env={"RANK": "3"})
        assert "rank 3:" in done.stderr


class TestWrongUse:
    @pytest.mark.parametrize(
        ("args", "said"),
        [
            (["--from-record", "r.jsonl"], "No such file"),
            (["--from-record", "program.py"], "record"),
            (["--from-record", "r.jsonl", "program.py"], "a program"),
            (["--from-record", "r.jsonl", "--backend", "flex"], "a request"),
            (["--gains=0", "program.py"], "expected seconds"),
            (["--html", "program.py", "program.py"], "holds something else"),
            (["--backend", "sdpa_mth", "program.py"], "sdpa_math"),
            (["--html", "r.html"], "got no program"),
        ],
    )
    def test_is_said_before_anything_runs(self, folder, capsys, args, said):
        (folder / "program.py").write_text("open('ran', 'w')\n")
        assert main(["run", *args]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert "Traceback" not in err
        assert not (folder / "ran").exists()


def test_tune_reaches_children_too(folder):
    """The parent asks nothing: all is asked by a child."""
    (folder / "parent.py").write_text(
        "import subprocess, sys\nsubprocess.run([sys.executable, 'program.py'], check=True)\n"
    )
    done = polyattn("tune", "--prepare-total", "0", "--json=t.json", "parent.py")
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(Path("t.json").read_text())["classes"]
    assert one["calls"] == 3

"""`polyattn trace record`: unchanged programs, what is said of them, and what ends them."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyattn.cli import main
from polyattn.trace import read

pytest.importorskip("torch")

SRC = Path(__file__).resolve().parents[2] / "src"
PROGRAM = """
import sys
import torch
from torch import nn
from polyattn.hooks import trace_step

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)
    def forward(self, x):
        return self.down(self.act(self.up(x)) * (1.1 if "--wrong" in sys.argv else 1))

if __name__ == "__main__":
    torch.manual_seed(0)
    net, x = Net(), torch.randn(4, 8)
    with torch.no_grad():
        for step in range(2):
            with trace_step(step):
                net(x)
    print("args", sys.argv[1:])
    if "--wait" in sys.argv:
        import time
        print("ready", flush=True)
        time.sleep(60)
    sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one, with the program in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    return tmp_path


def trace(capsys, *arguments):
    """Exit code, stdout, stderr of `polyattn trace ...`."""
    code = main(["trace", *map(str, arguments)])
    return code, *capsys.readouterr()


class TestRecord:
    def test_an_unchanged_program(self, folder, capsys):
        code, out, err = trace(capsys, "record", "--out", "run.jsonl", "program.py", "--fail", "x")
        assert code == 3
        assert out == "args ['--fail', 'x']\n"
        assert "Net: run.jsonl: 16 records of 8 calls of 4 modules in steps 0-1" in err
        run = read("run.jsonl")
        assert run.ended
        assert run.header.argv == ("program.py", "--fail", "x")
        assert {record.module for record in run.records} == {"", "up", "act", "down"}

    @pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
    def test_a_program_that_goes_to_another_folder(self, folder, capsys, first):
        """Before or after its first model is called; what was named is meant from where we were."""
        pytest.importorskip("safetensors")
        call = "net(torch.ones(1, 2)); "
        Path("away.py").write_text(
            "import inspect, os, sys, torch\nnet = torch.nn.Linear(2, 2)\ndef here(): pass\n"
            f"{'' if first else call}os.mkdir('away'); os.chdir('away'); {call}\n"
            "print(len(open(__file__).read()), inspect.getsource(here), sys.argv)\n"
        )
        code, out, err = trace(
            capsys, "record", "--out", "run.jsonl", "--tensors", "", "--json=said.json", "away.py"
        )
        assert code == 0, err
        assert out.startswith(f"{Path('away.py').stat().st_size} def here()")
        assert "['away.py']" in out
        assert "Linear: run.jsonl: " in err
        assert json.loads(Path("said.json").read_text())["problems"] == []
        assert all(Path(one.file).is_file() for one in read("run.jsonl").records)
        assert not list(Path("away").iterdir())

    def test_an_executor_that_nobody_shut_down(self, folder):
        """Its threads end with the interpreter only; what they have to do is waited for."""
        Path("pools.py").write_text(
            "import os, time, torch\n"
            "from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor\n"
            "threads, processes = ThreadPoolExecutor(1), ProcessPoolExecutor(1)\n"
            "net = torch.nn.Linear(2, 2)\n"
            "def late():\n"
            "    time.sleep(0.5)\n"
            "    net(torch.ones(1, 2))\n"
            "    print('done', flush=True)\n"
            "for _ in range(3):\n"
            "    threads.submit(late)\n"
            "processes.submit(os.getpid).result()\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "polyattn", "trace", "record", "--out", "run.jsonl", "pools.py"],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("done") == 3
        assert "3 calls" in done.stderr

    def test_a_module_and_json(self, folder, capsys, monkeypatch):
        code, _, _ = trace(
            capsys, "record", "--json=said.json", "--out", "run.jsonl", "--layers", "^up$|^act$",
            "--stats", "l2,sketch", "--steps", "1", "--gradients", "--parameters",
            "-m", "program", "--layers",
        )  # fmt: skip
        assert code == 0
        said = json.loads(Path("said.json").read_text())
        (one,) = said["traces"]
        assert (said["exit_code"], said["problems"], one["model"]) == (0, [], "Net")
        assert (one["modules"], one["calls"], one["steps"], one["ended"]) == (2, 2, [1], True)
        records = read("run.jsonl").records
        assert len(records) == one["records"]
        assert {r.phase for r in records} == {"in", "out", "param"}
        assert all(r.mean is None and r.sketch for r in records)

    def test_json_does_not_take_the_program(self, folder, capsys):
        code, out, _ = trace(capsys, "record", "--out", "run.jsonl", "--json", "program.py")
        assert code == 0
        assert json.loads(out.partition("\n")[2])["traces"][0]["path"] == "run.jsonl"

    def test_whole_tensors(self, folder, capsys):
        pytest.importorskip("safetensors")
        code, _, err = trace(
            capsys, "record", "--out", "run.jsonl", "--tensors", "(?i)^U", "--tensors", "ow",
            "--json=said.json", "program.py",
        )  # fmt: skip
        assert code == 0
        kept = [record for record in read("run.jsonl").records if record.file]
        assert {record.module for record in kept} == {"up", "down"}
        assert all(Path(record.file).is_file() for record in kept)
        size = sum(Path(record.file).stat().st_size for record in kept)
        assert len(kept) == 8
        assert f": 8 tensors kept whole, {size / 1e3:.1f} kB, in run.tensors\n" in err
        assert json.loads(Path("said.json").read_text())["tensors"] == {
            "tensors": 8,
            "bytes": size,
            "folders": ["run.tensors"],
        }

    @pytest.mark.parametrize("pattern", ["", ".*"])
    def test_all_tensors_whole(self, folder, capsys, pattern):
        pytest.importorskip("safetensors")
        code, _, err = trace(
            capsys, "record", "--out", "run.jsonl", "--tensors", pattern, "program.py"
        )
        assert code == 0
        records = read("run.jsonl").records
        assert all(r.file for r in records if r.same is None)
        files = {r.file for r in records if r.file}
        assert f": {len(files)} tensors kept whole" in err

    def test_tensors_that_match_nothing(self, folder, capsys):
        pytest.importorskip("safetensors")
        code, _, err = trace(
            capsys, "record", "--out", "run.jsonl", "--tensors", "dwn", "program.py"
        )
        assert code == 2
        assert "got tensors='dwn', which matches none of the 4 modules of this Net." in err
        assert "0 tensors kept whole" in err
        assert len(read("run.jsonl").records) == 16

    def test_a_file_is_not_replaced_unasked(self, folder, capsys):
        Path("run.jsonl").write_text("mine\n")
        code, out, err = trace(capsys, "record", "--out", "run.jsonl", "program.py")
        assert (code, out) == (2, "")
        assert "holds 5 bytes already" in err
        assert "--overwrite" in err
        assert Path("run.jsonl").read_text() == "mine\n"
        assert trace(capsys, "record", "--out", "run.jsonl", "--overwrite", "program.py")[0] == 0
        assert read("run.jsonl").ended

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--layers", "("], "expected a regular expression"),
            (["--tensors", "up", "--tensors", "("], "got --tensors '('"),
            (["--perturb", "x"], "got --perturb 'x', expected a seed"),
            (["--perturb=-1"], "got --perturb '-1', expected a seed"),
            (["--perturb", str(2**40)], "expected a seed"),
            (["--stats", "maxx"], "did you mean 'max'"),
            (["--steps", "x"], "got steps='x'"),
            (["--out", "."], "which is a folder"),
        ],
    )
    def test_wrong_options_before_the_program_runs(self, folder, capsys, options, said):
        code, out, err = trace(capsys, "record", *options, "program.py")
        assert (code, out) == (2, "")
        assert said.lower() in err.lower()
        assert "Traceback" not in err
        assert len(err.splitlines()) == 1

    def test_layers_that_match_nothing(self, folder, capsys):
        code, out, err = trace(
            capsys, "record", "--layers", "dwn", "--out", "r.jsonl", "program.py"
        )
        assert (code, out) == (2, "args []\n")  # the program's own run is not disturbed
        assert "Traceback" not in err
        assert "matches none of the 4 modules" in err
        assert "NOTHING WAS RECORDED" in err
        assert not Path("r.jsonl").exists()

    def test_a_program_that_fails_keeps_its_exit_code(self, folder, capsys):
        code, _, err = trace(
            capsys, "record", "--layers", "dwn", "--out", "r.jsonl", "program.py", "--fail"
        )
        assert code == 3
        assert "matches none" in err

    def test_models_without_the_layers_are_left_out(self, folder, capsys):
        Path("two.py").write_text(
            "import torch, program\n"
            "small = torch.nn.Sequential(torch.nn.Linear(8, 8))\n"
            "small(program.Net()(small(torch.ones(4, 8))))\n"
            "torch.nn.Sequential(torch.nn.Linear(8, 8))(torch.ones(4, 8))\n"
        )
        code, _, err = trace(
            capsys, "record", "--layers", "^up$", "--out", "r.jsonl", "--json=said.json", "two.py"
        )
        assert code == 0
        assert "Net: r.jsonl: 2 records" in err
        assert "Sequential: not traced (2 of them): got layers='^up$', which matches none" in err
        left = json.loads(Path("said.json").read_text())["left_out"]
        assert [one["model"] for one in left] == ["Sequential", "Sequential"]
        code, _, err = trace(capsys, "record", "--layers", "upp", "--out", "s.jsonl", "two.py")
        assert code == 2
        assert "fits no module of the 3 models that were called (2 of Sequential, Net)." in err
        assert "Did you mean 'up'?" in err
        assert "NOTHING WAS RECORDED" in err
        assert not Path("s.jsonl").exists()

    def test_perturbed_weights(self, folder, capsys):
        for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
            code, _, err = trace(
                capsys,
                "record",
                "--out",
                f"{name}.jsonl",
                "--perturb",
                seed,
                f"--json={name}.json",
                "program.py",
            )
            assert code == 0
            assert f"polyattn trace record: 4 weights perturbed with seed {seed}\n" in err
        said = json.loads(Path("c.json").read_text())["perturbed"]
        assert said == {"seed": 2, "changed": 4, "left": []}
        a, b, c = (read(f"{name}.jsonl") for name in "abc")
        assert a.records == b.records
        assert a.records != c.records
        assert a.header.selection["perturb"] == 1
        assert a.header.weights == b.header.weights != c.header.weights

    def test_steps_that_do_not_come(self, folder, capsys):
        code, _, err = trace(capsys, "record", "--steps", "7", "--out", "r.jsonl", "program.py")
        assert code == 0
        assert err.count("none of the 8 calls of modules ran in such a step") == 1
        assert "NOTHING WAS RECORDED" in err

    def test_a_program_without_a_model(self, folder, capsys):
        Path("plain.py").write_text("print(1)")
        Path("old.jsonl").write_text("old")
        code, out, err = trace(capsys, "record", "--out", "new.jsonl", "plain.py")
        assert (code, out) == (0, "1\n")
        assert "NOTHING WAS RECORDED: the program called no torch model" in err
        code, _, err = trace(capsys, "record", "--out", "old.jsonl", "--overwrite", "plain.py")
        assert "old.jsonl is of an earlier run" in err

    @pytest.mark.parametrize("dash", ["-", "-c"])
    def test_from_standard_input_and_as_a_text(self, folder, capsys, monkeypatch, dash):
        text = (
            "import sys\nprint(__name__, sys.argv, repr(sys.path[0]))\n"
            "import program, torch\nprogram.Net()(torch.ones(4, 8))\nsys.exit(4)\n"
        )
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        code = [text] if dash == "-c" else []
        got, out, err = trace(capsys, "record", "--out", "r.jsonl", dash, *code, "x")
        assert (got, out) == (4, f"__main__ ['{dash}', 'x'] ''\n"), err
        assert "of 4 calls of 4 modules" in err

    def test_no_program(self, folder, capsys):
        assert "expected SCRIPT" in trace(capsys, "record", "--layers", "x")[2]
        assert "does not exist" in trace(capsys, "record", "none.py")[2]

    def test_an_error_of_the_program_is_its_own(self, folder, capsys):
        Path("broken.py").write_text("import program, torch\nprogram.Net()(torch.ones(4, 8))\n1/0")
        code, _, err = trace(capsys, "record", "--out", "r.jsonl", "broken.py")
        assert code == 1
        assert "ZeroDivisionError" in err
        assert "8 records" in err
        assert read("r.jsonl").ended

    @pytest.mark.skipif(sys.platform == "win32", reason="SIGINT as a terminal sends it")
    def test_interrupted(self, folder):
        command = [sys.executable, "-m", "polyattn", "trace", "record", "--out", "run.jsonl"]
        environ = {**os.environ, "PYTHONPATH": str(SRC)}
        with subprocess.Popen(
            [*command, "program.py", "--wait"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            cwd=folder,
        ) as process:
            assert any(line == "ready\n" for line in process.stdout)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "16 records" in err
        run = read(folder / "run.jsonl")
        assert run.ended
        assert len(run.records) == 16

    def test_the_first_wrong_module_of_a_real_run(self, folder, capsys):
        assert trace(capsys, "record", "--out", "a.jsonl", "program.py")[0] == 0
        assert trace(capsys, "record", "--out", "b.jsonl", "program.py", "--wrong")[0] == 0
        for seed in "123":
            again = ("record", "--out", f"r{seed}.jsonl", "--perturb", seed, "program.py")
            assert trace(capsys, *again)[0] == 0
        reruns = [f"r{seed}.jsonl" for seed in "123"]
        code, out, err = trace(capsys, "calibrate", "a.jsonl", *reruns, "--out", "floor.json")
        assert (code, err) == (0, "")
        assert "float32" in out
        code, out, _ = trace(capsys, "diff", "a.jsonl", "b.jsonl", "--floor", "floor.json")
        assert code == 1
        assert out.startswith("different: the code of the model itself: what it hands to 'down'")
        code, out, err = trace(capsys, "calibrate", "a.jsonl", "b.jsonl", "--out", "no.json")
        assert code == 2
        assert "although its weights are the very same" in err
        assert not Path("no.json").exists()

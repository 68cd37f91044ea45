"""`polyattn trace`: showing, comparing and calibrating traces; no framework is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from polyattn.cli import main
from polyattn.trace import TraceWriter, read

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trace(capsys, *arguments):
    """Exit code, stdout, stderr of `polyattn trace ...`."""
    code = main(["trace", *map(str, arguments)])
    return code, *capsys.readouterr()


def write(path, *, factor=1.0, noise=0.0, first=1.0, seed=0, dtype=np.float32, **header):
    """A trace of two steps of x -> up(x) -> down(factor * up(x)), without any framework."""
    x = np.linspace(-1, 1, 256, dtype=dtype).reshape(16, 16) * dtype(first)
    random = np.random.default_rng(seed)

    def near(value):
        return (value * (1 + noise * random.uniform(-1, 1, value.shape))).astype(dtype)

    with TraceWriter(path, **header) as run:
        for step in range(2):
            with run.step(step):
                run.add("", "in", "args[0]", x, cls="Net")
                run.add("up", "in", "args[0]", x, cls="Linear")
                middle = near(x @ x)
                run.add("up", "out", "out", middle, cls="Linear")
                run.add("down", "in", "args[0]", middle, cls="Linear")
                out = near(middle * dtype(factor) + 1)
                run.add("down", "out", "out", out, cls="Linear")
                run.add("", "out", "out", out, cls="Net")
    return str(path)


class TestDiff:
    def test_same_different_and_cannot_say(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl", factor=1.5)
        c = write("c.jsonl", first=2.0)
        assert trace(capsys, "diff", a, a)[:2][0] == 0
        code, out, err = trace(capsys, "diff", a, b)
        assert (code, err) == (1, "")
        assert out.splitlines()[0] == "different: the output of 'down'; its inputs agree"
        code, out, _ = trace(capsys, "diff", a, c)
        assert code == 2
        assert out.startswith("cannot say whether they are the same:\n")
        assert "give both runs the same inputs and seed" in out

    def test_json_does_not_take_a_file(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl", factor=1.5)
        before = Path(a).read_bytes()
        code, out, _ = trace(capsys, "diff", "--json", a, b)
        assert code == json.loads(out)["exit_code"] == 1
        assert json.loads(out)["culprit"]["module"] == "down"
        assert trace(capsys, "diff", a, b, "--json=v.json")[:2] == (1, "")
        assert json.loads(Path("v.json").read_text())["equal"] is False
        assert Path(a).read_bytes() == before

    def test_all_rows_in_whole_lines(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl", factor=1.5)
        code, out, _ = trace(capsys, "diff", "--all", a, b)
        assert code == 1
        assert sum("culprit" in line for line in out.splitlines()) >= 1
        assert sum("Linear" in line for line in out.splitlines()) == 4

    def test_tolerances_rules_and_renames(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl", factor=1.5)
        assert trace(capsys, "diff", a, b, "--tolerance", "9")[0] == 0
        accepted = ("--tolerance", "^down$=9", "--tolerance", "^$=9")
        assert trace(capsys, "diff", a, b, *accepted)[0] == 0
        assert trace(capsys, "diff", a, b, "--tolerance", "up=9", "--tolerance", "1e-6")[0] == 1
        Path("rules.json").write_text(json.dumps({"^none": "x"}))
        code, out, _ = trace(
            capsys, "diff", a, b, "--rules", "rules.json", "--rename", "^(?=q)no=y"
        )
        assert code == 1
        assert "the rule ^(?=q)no -> y matches no" in out
        assert "the rule ^none -> x matches no" in out

    def test_whether_each_side_repeats_itself(self, folder, capsys):
        a, b = write("a.jsonl", noise=1e-3), write("b.jsonl", noise=1e-3, seed=1)
        again = [write(f"{n}.jsonl", noise=1e-3, seed=n) for n in (2, 3, 4)]
        assert trace(capsys, "diff", a, b)[0] == 1
        code, out, _ = trace(
            capsys, "diff", a, b, "--reruns-of-a", *again[:2], "--reruns-of-b", again[2], "--json"
        )
        assert code == 0, out
        guards = json.loads(out)["guards"]
        assert guards["determinism"]["holds"] is False
        assert "the reference differs from its rerun by up to" in guards["determinism"]["said"]
        assert "the port differs from its rerun by up to" in guards["determinism"]["said"]
        # a fault that is larger than what the sides do not repeat is seen as before
        wrong = write("wrong.jsonl", noise=1e-3, seed=1, factor=1.5)
        assert trace(capsys, "diff", a, wrong, "--reruns-of-a", *again)[0] == 1
        # and a side with dropout has no verdict
        wild = write("wild.jsonl", noise=0.5, seed=9)
        code, out, _ = trace(capsys, "diff", a, wrong, "--reruns-of-b", wild)
        assert code == 2, out
        assert "the port differs from its rerun" in out

    def test_reruns_that_are_none(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl")
        for reruns in (["--reruns-of-a", "./a.jsonl"], ["--reruns-of-b", "a.jsonl", "a.jsonl"]):
            code, _, err = trace(capsys, "diff", a, b, *reruns)
            assert code == 2
            assert "expected the trace of another run each" in err
        assert "none.jsonl" in trace(capsys, "diff", a, b, "--reruns-of-b", "none.jsonl")[2]

    def test_flags_that_differ_are_named(self, folder, capsys):
        from polyattn.flags import make

        flags = [make("torch", {"cudnn.benchmark": on}, {}) for on in (False, True)]
        a, b = (write(f"{at}.jsonl", flags=one) for at, one in enumerate(flags))
        code, out, _ = trace(capsys, "diff", a, b)
        assert code == 0
        assert "cudnn.benchmark" in out
        assert "polyattn flags diff 0.jsonl 1.jsonl" in out
        assert main(["flags", "diff", a, b]) == 1

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--rename", "x"], "expected REGEX=REPLACEMENT"),
            (["--rename", "(=x"], "no regular expression"),
            (["--tolerance", "little"], "expected a number"),
            (["--tolerance", "-1"], "expected a relative error"),
            (["--tolerance", "(=1"], "expected a number, or PATTERN=NUMBER"),
            (["--rules", "none.json"], "cannot be read"),
            (["--floor", "a.jsonl"], "cannot be read"),
            (["--json=no/where.json"], "cannot be written"),
        ],
    )
    def test_wrong_options(self, folder, capsys, options, said):
        a = write("a.jsonl")
        code, out, err = trace(capsys, "diff", a, a, *options)
        assert (code, out) == (2, "")
        assert said in err
        assert "Traceback" not in err

    def test_what_is_no_trace(self, folder, capsys):
        a = write("a.jsonl")
        Path("no.jsonl").write_text('{"a": 1}\n')
        for other, said in (("no.jsonl", "not a trace of polyattn"), ("gone", "no such file")):
            code, _, err = trace(capsys, "diff", a, other)
            assert code == 2
            assert said in err


class TestCalibrate:
    def test_a_floor_that_diff_takes(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl", noise=1e-6, seed=9)
        reruns = [write(f"r{seed}.jsonl", noise=1e-6, seed=seed) for seed in (1, 2, 3)]
        code, out, err = trace(capsys, "calibrate", a, *reruns, "--out", "floor.json")
        assert (code, err) == (0, "")
        assert "floor: floor.json" in out
        assert trace(capsys, "diff", a, b, "--floor", "floor.json")[0] == 0
        code, out, _ = trace(capsys, "calibrate", "--json", a, *reruns, "--out", "floor.json")
        said = json.loads(out)
        assert (said["runs"], said["floor"]) == (3, "floor.json")
        noise = {row["depth"]: row for row in said["noise"]}
        assert noise.keys() == {0, 1}
        assert 0 < noise[1]["median"] <= noise[1]["largest"] < 1e-5

    @pytest.mark.parametrize(
        ("rerun", "said"),
        [
            ({}, "number by number"),
            ({"first": 1.5}, "args[0] (in) of the model is not as in the reference"),
            ({"factor": 3.0, "noise": 1e-6}, "which is more than rounding"),
            ({"dtype": np.float64, "noise": 1e-6}, "is float64 in it and float32"),
        ],
    )
    def test_unsuitable_reruns(self, folder, capsys, rerun, said):
        a, b = write("a.jsonl"), write("b.jsonl", **rerun)
        code, out, err = trace(capsys, "calibrate", a, b, "--out", "floor.json")
        assert (code, out) == (2, "")
        assert "b.jsonl, which is of no use" in err
        assert said in err
        assert not Path("floor.json").exists()

    def test_other_modules_the_same_file_and_a_trace_as_output(self, folder, capsys):
        a, b = write("a.jsonl"), write("b.jsonl", noise=1e-6)
        with TraceWriter("c.jsonl") as run:
            run.add("else", "out", "out", np.ones(3))
        for others, out, said in (
            (["c.jsonl"], "f.json", "0 of the 12 records"),
            ([a], "f.json", "more than once"),
            ([b, f"./{b}"], "f.json", "more than once"),
            ([b], a, "one of the traces"),
            ([b], "no/where.json", "cannot be written"),
        ):
            code, _, err = trace(capsys, "calibrate", a, *others, "--out", out)
            assert code == 2
            assert said in err
        assert read(a).ended


class TestShow:
    def test_what_is_in_it(self, folder, capsys):
        a = write("a.jsonl", versions={"mine": "7"}, seed=0)
        code, out, _ = trace(capsys, "show", a)
        assert code == 0
        assert "mine 7" in out
        assert "3: 2 Linear, 1 Net" in out
        assert "12 in steps 0-1" in out
        rows = [line for line in out.splitlines() if "16x16" in line]
        assert len(rows) == 12

    @pytest.mark.parametrize("seed", [0, 7])
    def test_perturbed_weights_are_named(self, folder, capsys, seed):
        write("plain.jsonl")
        write("moved.jsonl", selection={"perturb": seed})
        assert "perturb" not in trace(capsys, "show", "plain.jsonl")[1]
        code, out, _ = trace(capsys, "show", "moved.jsonl")
        assert code == 0 and f"--perturb {seed}" in " ".join(out.split())
        code, out, _ = trace(capsys, "diff", "plain.jsonl", "moved.jsonl", "--html", "page.html")
        assert code == 0 and f"the port was recorded with --perturb {seed}" in out
        assert f"--perturb {seed}" in (folder / "page.html").read_text()
        said = json.loads(trace(capsys, "diff", "plain.jsonl", "moved.jsonl", "--json")[1])
        assert said["guards"]["perturbation"]["holds"] is False

    def test_choosing(self, folder, capsys):
        a = write("a.jsonl")
        code, out, _ = trace(capsys, "show", a, "--module", "^do", "--step", "1", "--limit", "1")
        assert code == 0
        assert sum("16x16" in line for line in out.splitlines()) == 1
        assert "and 1 records more" in out
        assert "none of 12 fits" in trace(capsys, "show", a, "--step", "none")[1]
        code, out, _ = trace(capsys, "show", "--json", a, "--module", "up")
        said = json.loads(out)
        assert (said["ended"], said["records_in_all"], said["records_chosen"]) == (True, 12, 4)
        assert {record["module"] for record in said["records"]} == {"up"}
        assert said["header"]["framework"] == "numpy"

    def test_nan_and_a_killed_run(self, folder, capsys):
        run = TraceWriter("a.jsonl")
        run.add("fine", "out", "out", np.ones(3, np.float32))
        run.add("bad", "out", "out", np.array([1, np.nan, np.inf], np.float32))
        Path("b.jsonl").write_bytes(Path("a.jsonl").read_bytes()[:-20])
        code, out, _ = trace(capsys, "show", "a.jsonl")
        run.close()
        assert code == 0
        assert "no: the process was killed, or still runs" in out
        assert "in 1 records, first in record 1: out (out) of 'bad'" in out
        assert sum("1!" in line for line in out.splitlines()) == 1
        code, out, _ = trace(capsys, "show", "b.jsonl")
        assert code == 0
        assert "was cut off" in out

    def test_names_cannot_drive_the_terminal(self, folder, capsys):
        for name in ("a", "b"):
            with TraceWriter(f"{name}.jsonl") as run:
                run.add("x\x1b[2J[red]\ny", "out", "out", np.ones(3) * (1 + (name == "b")))
        for command in (["show", "a.jsonl"], ["diff", "a.jsonl", "b.jsonl", "--all"]):
            _, out, err = trace(capsys, *command)
            assert "\x1b" not in out + err
            assert "[red]" in out

    def test_wrong_options(self, folder, capsys):
        a = write("a.jsonl")
        assert trace(capsys, "show", a, "--module", "(")[0] == 2
        assert trace(capsys, "show", a, "--limit", "-1")[0] == 2
        assert trace(capsys, "show", a, "--step", "x")[0] == 2
        assert "no such file" in trace(capsys, "show", "gone.jsonl")[2]


def test_help_and_unknown_actions(capsys):
    code, out, _ = trace(capsys, "--help")
    assert code == 0
    assert all(name in out for name in ("record", "show", "diff", "calibrate"))
    assert trace(capsys)[0] == 2
    code, _, err = trace(capsys, "dif")
    assert code == 2
    assert "did you mean 'diff'" in err.lower()
    for name in ("record", "show", "diff", "calibrate"):
        assert trace(capsys, name, "--help")[0] == 0


def test_no_framework_is_imported(folder):
    write("a.jsonl")
    write("r.jsonl", noise=1e-6)
    code = (
        "import sys; from polyattn.cli import main\n"
        "calibrate = 'calibrate a.jsonl r.jsonl --out f.json'\n"
        "for command in ('show a.jsonl', 'diff a.jsonl r.jsonl', calibrate):\n"
        "    assert main(['trace', *command.split()]) == 0, command\n"
        "assert not {'torch', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert done.returncode == 0, done.stderr

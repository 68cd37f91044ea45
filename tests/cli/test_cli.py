import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn.cli import main
from polyattn.masks import LEAVES, Packed
from polyattn.selection.capabilities import Capabilities
from polyattn.selection.registry import Backend, Missing, registry

SRC = Path(__file__).resolve().parents[2] / "src"
PROGRAM = """
import sys, threading
import torch, torch.nn.functional as F
from torch.nn.functional import scaled_dot_product_attention
q = torch.randn(1, 2, 8, 8)
scaled_dot_product_attention(q, q, q, is_causal=True)
thread = threading.Thread(target=lambda: F.scaled_dot_product_attention(q, q, q)); thread.start()
assert __name__ == "__main__"
print("args", sys.argv[1:])
sys.exit(int(sys.argv[1]))
"""


def run(*args, **options):
    environ = {**os.environ, "PYTHONPATH": str(SRC), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "polyattn", *args],
        capture_output=True,
        text=True,
        timeout=300,
        env=environ,
        **options,
    )


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def processor_time(command: list[str]) -> float:
    before = os.times()
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=env, timeout=300)
    after = os.times()
    assert done.returncode == 0
    return (
        after.children_user + after.children_system - before.children_user - before.children_system
    )


def test_version_and_help_are_quick_and_import_no_framework():
    """Of the processor's time, which others on a machine do not lengthen much."""
    bare_s = processor_time([sys.executable, "-c", "pass"])
    for flag in ("--version", "--help"):
        took = processor_time([sys.executable, "-m", "polyattn", flag])
        assert took < max(0.5, 10 * bare_s)
    code = (
        "import sys; from polyattn.cli import main; main(['--help']); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        timeout=300,
    )
    assert done.stdout.endswith("False\n")


def test_unknown_commands_get_near_matches(capsys):
    assert main(["expalin"]) == 2
    assert "Did you mean 'explain'?" in capsys.readouterr().err
    assert main([]) == 2
    assert main(["--hepl"]) == 2


def test_broken_pipe_is_no_traceback():
    code = f"PYTHONPATH={SRC} {sys.executable} -m polyattn doctor --json | head -c 10"
    done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


class TestExplain:
    def test_a_machine_one_does_not_have(self, capsys):
        args = "explain --q 1,4096,16,128 --kv 4096,4 --dtype bf16 --causal --device h100 --json"
        assert main(args.split()) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["backend"] == "sdpa_cudnn"
        assert not answer["decisions"]["flex"].get("reasons")

    def test_nobody_can(self, capsys):
        assert (
            main(
                [
                    "explain",
                    "--q",
                    "1,8,2,8",
                    "--softcap",
                    "2",
                    "--backend",
                    "sdpa_flash",
                    "--device",
                    "cpu",
                ]
            )
            == 1
        )
        assert "soft cap" in capsys.readouterr().out

    @pytest.mark.parametrize(
        ("args", "said"),
        [
            ("--q 1,2,3", "expected B,T,N,H"),
            ("--q 1,8,2,x", "expected B,T,N,H"),
            ("--q 1,8,3,8 --kv 8,2", "multiple"),
            ("--q 1,8,2,8 --dropout 2", "expected a probability"),
            ("--q 1,8,2,8 --dtype float8", "expected one of"),
            ("--q 1,8,2,8 --backend sdpa_flsh", "Did you mean 'sdpa_flash'"),
            ("--q 1,8,2,8 --mask segmnets", "Did you mean 'Segments'"),
            ("--q 1,8,2,8 --device h1000", "h100"),
            ("--q 1,8,2,8 --window 3", "expected L,R"),
            ("--q 1,8,2,8 --sinks -3", "expected sinks: an integer >= 0"),
            ("--q 8,2,8 --layout packed --sequences 0", "expected sequences: an integer >= 1"),
            ("--from-record /none.jsonl", "none.jsonl"),
            ("--from-record /none.jsonl --q 1,2,3,4", "--q and --from-record"),
            ("--from-record /none.jsonl --causal", "--causal and --from-record"),
            ("--from-record /none.jsonl --value-dim 3", "--value-dim and --from-record"),
            ("--q 1,2,3,4 --bias-grad", "without --bias"),
            ("--q 1,2,3,4 --sequences 5", "--layout packed"),
            ("", "expected --q"),
        ],
    )
    def test_wrong_usage(self, args, said, capsys):
        assert main(["explain", *args.split()]) == 2
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        "name",
        [kind.__name__ for kind in LEAVES if kind is not Packed] + ["~FirstKeys", "~padding"],
    )
    def test_every_mask(self, name, capsys):
        assert (
            main(
                [
                    "explain",
                    "--q",
                    "2,64,2,8",
                    "--mask",
                    name,
                    "--causal",
                    "--json",
                    "--device",
                    "cpu",
                ]
            )
            == 0
        )
        assert "backend" in json.loads(capsys.readouterr().out)

    def test_packed(self, capsys):
        args = "explain --q 64,2,8 --layout packed --sequences 3 --causal --device cpu --lse"
        assert main(args.split()) in (0, 1)
        assert "Packed(q=4, kv=4) & Causal()" in capsys.readouterr().out


class TestDoctor:
    def test_json(self, capsys):
        assert main(["doctor", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert {row["name"] for row in report["backends"]} >= {"reference", "sdpa_flash"}
        lacking = [row for row in report["backends"] if not row["available"]]
        assert all(row["how_to_get_it"] for row in lacking)

    def test_asked_for_and_unknown(self, capsys):
        assert main(["doctor", "reference"]) == 0
        assert main(["doctor", "refrence"]) == 2
        assert "Did you mean 'reference'" in capsys.readouterr().err

    def test_a_misspelt_setting_is_amiss(self, capsys, monkeypatch):
        monkeypatch.setenv("POLYATTN_TUNNING", "off")
        assert main(["doctor", "--json"]) == 1
        assert "'POLYATTN_TUNING'" in " ".join(json.loads(capsys.readouterr().out)["amiss"])

    def test_a_bad_setting_is_amiss(self):
        done = run("doctor", env={"POLYATTN_TUNING": "perhaps"})
        assert done.returncode == 1
        assert "POLYATTN_TUNING" in done.stdout
        assert "Traceback" not in done.stderr

    def test_a_bad_setting_of_plugins_hides_nothing_of_the_tree(self):
        done = run("doctor", "--json", env={"POLYATTN_PLUGINS": "perhaps"})
        assert done.returncode == 1
        report = json.loads(done.stdout)
        assert {row["name"] for row in report["backends"]} >= {"native_cpu", "flex", "reference"}
        assert any("POLYATTN_PLUGINS" in line for line in report["amiss"])

    def test_a_name_of_two_frameworks_is_two_rows(self, capsys):
        declared = Capabilities(devices={"cpu"}, dtypes={"float32"})
        missing = Missing("not here", "build it")
        registry.register(Backend("flex", "jax", declared, lambda: missing, lambda: None))
        try:
            assert main(["doctor", "flex", "--json"]) == 0  # torch's is here
            rows = json.loads(capsys.readouterr().out)["backends"]
            found = {row["framework"]: row["available"] for row in rows if row["name"] == "flex"}
            assert found == {"torch": True, "jax": False}
        finally:
            registry.unregister("flex", "jax")

    def test_without_torch(self):
        code = (
            "import sys; sys.modules['torch'] = None; from polyattn.cli import main; "
            "sys.exit(main(['doctor']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        assert done.returncode == 0, done.stderr
        assert "not installed: pip install" in done.stdout


class TestRun:
    def test_as_python_would(self, program, tmp_path):
        done = run("run", "--record", str(tmp_path / "r.jsonl"), program, "7", "--json")
        assert done.returncode == 7
        assert done.stdout == "args ['7', '--json']\n"
        assert "2 attention calls" in done.stderr
        assert "sdpa_flash" in done.stderr or "native_cpu" in done.stderr

    def test_json_requests_and_modules(self, program, tmp_path):
        done = run("run", "--json", "--backend", "sdpa_math", "-m", "program", "0", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout.partition("\n")[2])
        assert report["calls"] == 2
        ran = [ran for one in report["classes"] for ran in one["ran"]]
        assert {(r["backend"], r["source"]) for r in ran} == {("sdpa_math", "SCOPE")}

    def test_wrong_usage_and_failing_programs(self, tmp_path):
        assert run("run", "none.py").returncode == 2
        assert run("run").returncode == 2
        assert run("run", "--backend", "sdpa_flsh", __file__).returncode == 2
        path = tmp_path / "fails.py"
        path.write_text("def inner():\n    raise ValueError('mine')\ninner()\n")
        done = run("run", str(path))
        assert done.returncode == 1
        assert "ValueError: mine" in done.stderr
        assert "polyattn/cli" not in done.stderr


class TestTune:
    def test_record_tune_show_export_import_forget(self, program, tmp_path, capsys):
        record = str(tmp_path / "r.jsonl")
        assert run("run", "--record", record, program, "0").returncode == 0
        assert main(["tune", "--from-record", record, "--prepare-total", "0", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert len(found["classes"]) == 2
        assert found["regret"] >= 1.0
        assert main(["tune", "--show", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        rows = shown["rows"]
        assert all(row["verified"] for row in rows)
        assert {row["flags"] for row in rows} == set(shown["flags"]) == set(found["flags"])
        exported = str(tmp_path / "x.json")
        assert main(["tune", "--export", exported]) == 0
        assert main(["tune", "--forget", "all"]) == 0
        assert main(["tune", "--import", exported]) == 0
        assert f"{len(rows)} rows of" in capsys.readouterr().out
        assert main(["tune", "--forget", "backend=sdpa_math"]) == 0
        assert main(["tune", "--forget", "all"]) == 0

    @pytest.mark.parametrize(
        "args",
        [
            ["--forget", "everything"],
            ["--from-record", "none"],
            ["--from-record", "none", "--record", "some"],
            ["--show", "x.py"],
            [],
            ["--rounds", "2", "x.py"],
            ["--import", "none"],
            ["--merge", "none"],
        ],
    )
    def test_wrong_usage(self, args, capsys):
        assert main(["tune", *args]) == 2
        assert "Traceback" not in capsys.readouterr().err

"""`polyattn flags` and `polyattn doctor --flags`: what they show, compare and refuse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyattn.cli import main
from polyattn.errors import FlagsError
from polyattn.flags import META, make, read
from polyattn.flags.snapshot import read_all

SRC = Path(__file__).resolve().parents[2] / "src"
TORCH = make("torch", {"cudnn.benchmark": False, "num_threads": 2}, {"x": "not here"})
OTHER = {**TORCH, "cudnn.benchmark": True}
JAX = make("jax", {"jax_enable_x64": False}, {})


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)

    def put(name, content):
        path = tmp_path / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return name

    return put


def flags(capsys, *arguments):
    """Exit code, stdout, stderr of `polyattn flags ...`."""
    code = main(["flags", *arguments])
    return code, *capsys.readouterr()


class TestDiff:
    def test_the_same_and_not_the_same(self, write, capsys):
        a, b = write("a.json", TORCH), write("b.json", OTHER)
        assert flags(capsys, "diff", a, a)[:2] == (0, "torch: the same, 2 values\n")
        code, out, err = flags(capsys, "diff", a, b)
        assert (code, err) == (1, "")
        (line,) = (line for line in out.splitlines() if "cudnn.benchmark" in line)
        assert line.index("False") < line.index("True")
        assert "num_threads" not in out

    def test_json_does_not_take_a_file_for_its_own(self, write, capsys):
        a, b = write("a.json", TORCH), write("b.json", OTHER)
        code, out, _ = flags(capsys, "diff", "--json", a, b)
        assert code == 1
        assert json.loads(out)["differ"] == {"torch": {"cudnn.benchmark": [False, True]}}
        assert json.loads(Path(a).read_text()) == TORCH
        assert flags(capsys, "diff", a, b, "--json=c.json")[:2] == (1, "")
        assert json.loads(Path("c.json").read_text())["same"] is False

    def test_records_and_traces_of_two_frameworks(self, write, capsys):
        record = write("record.json", {"schema": 3, "flags": {"torch": OTHER, "jax": JAX}})
        trace = write("t.jsonl", json.dumps({"flags": {"torch": TORCH, "jax": JAX}}) + "\n{}\nrub")
        code, out, _ = flags(capsys, "diff", record, trace, "--json")
        assert code == 1
        assert json.loads(out)["differ"] == {"torch": {"cudnn.benchmark": [True, False]}, "jax": {}}
        assert flags(capsys, "diff", record, trace, "--framework", "jax")[0] == 0
        code, _, err = flags(capsys, "diff", record, write("a.json", OTHER))
        assert code == 0
        assert "record.json holds flags of jax, and the other file does not" in err

    def test_different_frameworks_cannot_be_compared(self, write, capsys):
        a, b = write("a.json", TORCH), write("b.json", JAX)
        code, out, err = flags(capsys, "diff", a, b)
        assert (code, out) == (2, "")
        assert "a.json holds flags of torch" in err
        assert "b.json holds flags of jax" in err
        code, _, err = flags(capsys, "diff", a, a, "--framework", "jax")
        assert code == 2
        assert "none of jax" in err

    def test_two_files_need_no_framework(self, write):
        a = write("a.json", TORCH)
        code = (
            "import sys; from polyattn.cli import main\n"
            f"assert main(['flags', 'diff', {a!r}, {a!r}]) == 0\n"
            "print({'torch', 'jax', 'numpy'} & set(sys.modules))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        assert done.stdout.endswith("set()\n"), done.stdout + done.stderr

    def test_a_file_and_now(self, write, capsys):
        torch = pytest.importorskip("torch")
        assert flags(capsys, "snapshot", "--json=now.json")[:2] == (0, "")
        assert flags(capsys, "diff", "now.json")[0] == 0
        before = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = not before
        try:
            code, out, _ = flags(capsys, "diff", "now.json", "--json")
        finally:
            torch.backends.cudnn.benchmark = before
        assert code == 1
        assert json.loads(out)["differ"]["torch"] == {"cudnn.benchmark": [before, not before]}

    def test_now_of_a_framework_that_is_not_here(self, write, capsys):
        code, _, err = flags(capsys, "diff", write("a.json", make("other", {}, {})))
        assert code == 2
        assert "other is not installed here" in err

    def test_what_neither_could_read_is_no_difference(self, write, capsys):
        other = make("torch", dict(list(TORCH.items())[1:]), {"x": "for another reason"})
        code, _, _ = flags(capsys, "diff", write("a.json", TORCH), write("b.json", other))
        assert code == 0


META_TEXT = '"polyattn.flags": {"schema": 1, "framework": "torch", "unreadable": {}}'
HOSTILE = {
    "empty": ("", "no JSON"),
    "binary": (bytes(range(256)), "cannot be read"),
    "utf-16": ("{}".encode("utf-16"), "cannot be read"),
    "not JSON": ("flags", "no JSON"),
    "an array": ("[1, 2]", "a list"),
    "a number": ("3", "(3)"),
    "null": ("null", "(None)"),
    "other JSON": ("{}", "expected a snapshot"),
    "deep": ("[" * 200_000, "no JSON"),
    "a deep value": ("{" + META_TEXT + ', "x": ' + "[" * 800 + "]" * 800 + "}", "a list"),
    "a deep schema": ('{"polyattn.flags": {"schema": ' + "[" * 800 + "]" * 800 + "}}", "schema"),
    "a table": ("{" + META_TEXT + ', "x": {}}', "a dict"),
    "NaN": ("{" + META_TEXT + ', "x": NaN}', "finite"),
    "infinity": ("{" + META_TEXT + ', "x": 1e999}', "finite"),
    "a huge integer": ("{" + META_TEXT + ', "x": ' + "9" * 9000 + "}", "no JSON"),
    "half a character": ("{" + META_TEXT + ', "\\ud800": 1}', "\\ud800"),
    "an escape": ("{" + META_TEXT + ', "\\u001b[2J": 1}', "\\x1b"),
    "a framework of escapes": (META_TEXT.replace("torch", "\\u001b[2J").join("{}"), "damaged"),
    "newer": (META_TEXT.replace("1", "2").join("{}"), "schema 2, expected 1"),
    "a schema of true": (META_TEXT.replace("1", "true").join("{}"), "schema True"),
    "no reasons": (META_TEXT.replace("{}", '{"x": 1}').join("{}"), "damaged"),
    "no flags": ('{"flags": {}}', "neither torch nor jax"),
    "flags of nothing": ('{"flags": null}', "expected a snapshot"),
    "another's name": ('{"flags": {"jax": {' + META_TEXT + "}}}", "'torch' under 'jax'"),
    "half damaged": (
        '{"flags": {"torch": {' + META_TEXT + '}, "jax": []}}',
        "flags of 'jax', (a list)",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_snapshot_is_a_message(name, write, capsys):
    content, said = HOSTILE[name]
    file = write("file", content)
    for arguments in (("diff", file), ("diff", write("good", TORCH), file, "--json")):
        code, out, err = flags(capsys, *arguments)
        assert (code, out) == (2, "")
        assert said in err
        assert "\x1b" not in err


def test_files_that_are_none(tmp_path, capsys):
    for path in (tmp_path, tmp_path / "missing.json"):
        code, _, err = flags(capsys, "diff", str(path))
        assert code == 2
        assert "cannot be read" in err


def test_a_mark_that_windows_writes_is_no_harm(write):
    assert read(write("a.json", b"\xef\xbb\xbf" + json.dumps(TORCH).encode())) == TORCH


def test_only_the_first_line_of_a_trace_is_read(write, monkeypatch):
    monkeypatch.setattr("polyattn.flags.snapshot._LIMIT", 4096)
    trace = write("t.jsonl", json.dumps({"flags": {"torch": TORCH}}) + "\n" + "x" * 9000)
    assert read(trace) == TORCH
    with pytest.raises(FlagsError, match="too large"):
        read(write("big.json", " " * 9000))


def test_reading_one_of_several(write):
    file = write("r.json", {"flags": {"torch": TORCH, "jax": JAX}})
    assert read(file, "jax") == JAX
    assert list(read_all(file)) == ["torch", "jax"]
    with pytest.raises(FlagsError, match="torch and jax"):
        read(file)
    with pytest.raises(FlagsError, match="expected jax"):
        read(write("t.json", TORCH), "jax")


class TestShow:
    @pytest.fixture(autouse=True)
    def _torch(self):
        pytest.importorskip("torch")

    def test_everything_fits_and_carries_every_row(self, capsys, monkeypatch):
        from polyattn.torch.flags import table

        monkeypatch.delenv("COLUMNS", raising=False)
        code, out, _ = flags(capsys, "show")
        assert code == 0
        assert max(map(len, out.splitlines())) <= 140
        code, plain, _ = flags(capsys, "show", "--json")
        assert json.loads(plain) == json.loads(
            json.dumps({"torch": [r.to_dict() for r in table()]})
        )
        for row in table():
            leaf = row.name.rpartition(".")[2]
            assert any(leaf in line for line in out.splitlines()), row.name

    def test_a_named_knob_with_all_that_is_known(self, capsys):
        code, out, _ = flags(capsys, "show", "--framework", "torch", "cuda.matmul.allow_tf32")
        assert code == 0
        for text in ("False, True", "whole process", "2.9", "fp32_precision", "trap"):
            assert text in out

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("torch.backends.cudnn.benchmark", "cudnn.benchmark"),
            ("cuda.enable_flash_sdp", "cuda.flash_sdp_enabled"),
            ("torch.set_num_threads", "num_threads"),
        ],
    )
    def test_other_spellings(self, name, found, capsys):
        code, out, _ = flags(capsys, "show", name, "--json")
        assert code == 0
        assert [row["name"] for row in json.loads(out)["torch"]] == [found]

    def test_groups_and_names_are_shown_once(self, capsys):
        _, out, _ = flags(capsys, "show", "mkldnn", "mkldnn.enabled", "--json")
        names = [row["name"] for row in json.loads(out)["torch"]]
        assert len(names) == len(set(names)) > 5
        assert all(name.startswith("mkldnn.") for name in names)
        _, whole, _ = flags(capsys, "show", "torch.backends.mkldnn", "--json")
        assert {row["name"] for row in json.loads(whole)["torch"]} == set(names)

    def test_near_matches(self, capsys):
        code, out, err = flags(capsys, "show", "cudnn.benchmrk")
        assert (code, out) == (2, "")
        assert "'cudnn.benchmark'" in err
        assert "Did you mean 'cudnn'" in flags(capsys, "show", "cudn")[2]
        assert flags(capsys, "show", "zzz")[0] == 2
        assert flags(capsys, "show", "num_thread")[2].count("Did you mean") == 1

    def test_jax_where_it_is(self, capsys):
        pytest.importorskip("jax")
        code, out, _ = flags(capsys, "show", "jax_enable_x64", "cudnn.enabled", "--json")
        assert code == 0
        assert {name: len(rows) for name, rows in json.loads(out).items()} == {"jax": 1, "torch": 1}
        assert flags(capsys, "show", "cudnn.enabled", "--framework", "jax")[0] == 2
        _, out, _ = flags(capsys, "snapshot", "--framework", "jax")
        assert json.loads(out)[META]["framework"] == "jax"


class TestSnapshotAndPresets:
    def test_snapshot_is_plain_json_that_python_takes(self, write, capsys):
        pytest.importorskip("torch")
        from polyattn.torch.flags import diff, snapshot

        code, out, err = flags(capsys, "snapshot")
        assert (code, err) == (0, "")
        assert diff(read(write("a.json", out)), snapshot()) == {}

    def test_presets_say_what_they_set(self, capsys):
        pytest.importorskip("torch")
        from polyattn.torch.flags import fastest, snapshot

        before = snapshot()
        code, out, _ = flags(capsys, "preset")
        assert code == 0
        assert [line for line in out.splitlines() if line.endswith(":") and line[0] != " "] == [
            "deterministic:",
            "fastest:",
            "full_precision:",
        ]
        code, out, _ = flags(capsys, "preset", "fastest", "--json")
        assert json.loads(out)["fastest"]["changes"] == fastest().changes
        code, _, err = flags(capsys, "preset", "fastst")
        assert code == 2
        assert "'fastest'" in err
        assert snapshot() == before


def test_wrong_use(capsys):
    assert flags(capsys)[0] == 2
    assert flags(capsys, "--help")[0] == 0
    code, _, err = flags(capsys, "dif")
    assert code == 2
    assert "Did you mean 'diff'?" in err
    assert flags(capsys, "diff")[0] == 2


def test_without_a_framework_it_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for action in ("show", "snapshot", "preset"):
        code, _, err = flags(capsys, action)
        assert code == 2
        assert "pip install 'polyattn[torch]'" in err


class TestDoctor:
    def test_flags_are_shown_when_asked_for(self, capsys, monkeypatch):
        pytest.importorskip("torch")
        monkeypatch.delenv("COLUMNS", raising=False)
        assert "cudnn.benchmark" not in doctor(capsys)
        out = doctor(capsys, "--flags")
        assert "cudnn.benchmark" in out
        assert "it is a fact of the build or the machine" in out
        plain = json.loads(doctor(capsys, "--flags", "--json"))["flags"]
        from polyattn.torch.flags import table

        assert [row["name"] for row in plain["torch"]] == [row.name for row in table()]
        assert set(plain) == {"torch", "jax"}

    def test_an_absent_jax_is_said(self, capsys, monkeypatch):
        monkeypatch.setattr("polyattn.cli.doctor.installed", lambda: ())
        assert "jax's flags: jax is not installed" in doctor(capsys, "--flags")


def doctor(capsys, *arguments):
    main(["doctor", *arguments])
    return capsys.readouterr().out

"""Files of records: written, read again, of the schema before, and wrong ones."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from polyattn import TuningError
from polyattn.integrations.program.asked import Gain, Passed, Process, Ran, Record, Unseen
from polyattn.integrations.program.record_file import read_record, write_record
from tests.integrations.program.test_ledger import case

OF_SCHEMA_1 = """\
{"application": "polyattn-record", "schema": 1, "program": ["p1.py"]}
{"kind": "case", "problem": {"arch": null, "batch": 1, "bias": null, "bias_grad": false, \
"compiled": false, "contiguous": true, "deterministic": false, "device": "cpu", "dropout_p": 0.0, \
"dtype": "float32", "framework": "torch", "grad": false, "head_dim": 64, "heads": 8, \
"kv_heads": 8, "kv_len": 256, "layout": "BNTH", "lse": false, "mask": {"align": "top_left", \
"kinds": ["Causal"], "signature": "Causal('top_left')"}, "q_len": 256, "scale": null, "sinks": 0, \
"sinks_grad": false, "softcap": null, "value_dim": 64}, \
"strides": [[131072, 16384, 64, 1], [131072, 16384, 64, 1], [131072, 16384, 64, 1]], \
"needs_grad": [false, false, false], "attn_mask": null, "calls": 3, \
"ran": [{"backend": "native_cpu", "version": "0.1.0", "source": "HEURISTIC", \
"reason": "faster here", "fallback": null, "calls": 3}]}
{"kind": "passed", "reason": "inputs of 2, 2 and 2 dims", "shapes": "(256, 64)", "calls": 1}
{"kind": "end", "lines": 2}
"""
"""As `polyattn run --record` wrote it before there were processes."""


def whole():
    ran = Ran("sdpa_math", "2", "SCOPE", "asked", None, 1)
    one = replace(case(), calls=5, ran=Counter({ran: 4, replace(ran, process=0): 1}))
    return Record(
        [one],
        [Passed("2 dims", "(2, 3)", 3, 1)],
        ("train.py", "--steps", "3"),
        [
            Process("rank 0", "rank", 11, 10, "ended", 2),
            Process("rank 1", "rank", 12, 10, "cut short", None),
        ],
        [Unseen("a child", "its flags", 2), Unseen("GPTJModel", "its own", 1, 0)],
        [Gain(0, "sdpa_math", (1e-3, 2e-3), (2e-3, 3e-3), 2, 0.1)],
        "a machine",
    )


def test_everything_comes_back(tmp_path):
    write_record(whole(), tmp_path / "r.jsonl")
    assert read_record(tmp_path / "r.jsonl") == whole()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"program": ["p1.py"]', '"program": -1'),
        ('"bias": null', '"bias": 1.5'),
        ('"backend": "native_cpu"', '"backend": ""'),
    ],
)
def test_values_of_another_kind_are_refused(tmp_path, old, new):
    path = tmp_path / "r.jsonl"
    path.write_text(OF_SCHEMA_1.replace(old, new))
    with pytest.raises(TuningError, match="record"):
        read_record(path)


def test_a_file_of_the_schema_before(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(OF_SCHEMA_1)
    record = read_record(path)
    assert (record.calls, record.program, record.processes) == (4, ("p1.py",), [])
    assert record.cases[0].ran == Counter(
        {Ran("native_cpu", "0.1.0", "HEURISTIC", "faster here"): 3}
    )
    write_record(record, path)
    assert json.loads(path.read_text().splitlines()[0])["schema"] == 2
    assert read_record(path) == record


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("case", {"strides": [[1]]}, "strides"),
        ("case", {"calls": -1}, "calls"),
        ("case", {"calls": True}, "calls"),
        ("case", {"refused": 3}, "line 4"),
        ("case", {"ran": [{"backend": "x"}]}, "no member"),
        ("case", {"problem": None}, "line 4"),
        ("passed", {"process": 7}, "process 7"),
        ("passed", {"calls": "3"}, "calls"),
        ("process", {"state": "lost"}, "expected one of ended, running, cut short"),
        ("process", {"pid": -4}, "process id"),
        ("unseen", {"times": 1.5}, "times"),
        ("unseen", {"process": 2}, "process 2"),
        ("gain", {"case": 1}, "times of a case"),
        ("gain", {"seconds": [1.0]}, "pairs"),
        ("gain", {"seconds": [0.0, 1.0]}, "seconds > 0"),
        ("gain", {"threads": "two"}, "threads"),
        ("end", {"kind": "other"}, "cut short"),
    ],
)
def test_wrong_lines_are_named(tmp_path, kind, change, said):
    path = tmp_path / "r.jsonl"
    write_record(whole(), path)
    changed = [{**line, **change} if line.get("kind") == kind else line for line in lines(path)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in changed))
    with pytest.raises(TuningError, match="record") as error:
        read_record(path)
    assert said in str(error.value)


def test_a_schema_of_later_says_what_to_do(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(OF_SCHEMA_1.replace('"schema": 1', '"schema": 3'))
    with pytest.raises(TuningError, match="expected 1 or 2; record again, or read it with"):
        read_record(path)


def test_reading_imports_no_torch(tmp_path):
    from tests.integrations.program.programs import polyattn

    write_record(whole(), tmp_path / "r.jsonl")
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = polyattn("run", "--from-record", "r.jsonl", "--html", "r.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "8 attention calls" in done.stderr
    assert (tmp_path / "r.html").exists()

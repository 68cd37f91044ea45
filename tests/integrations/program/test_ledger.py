"""What a process has counted is there however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from polyattn.integrations.program.asked import Case, Passed, Process, Ran, Unseen
from polyattn.integrations.program.fragments import record_of_folder
from polyattn.integrations.program.ledger import FileLedger, Ledger, RanOn, is_locked
from polyattn.problem import Problem
from tests.integrations.program.programs import GIVE_UP_S, SRC

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks of another kind")


def process(asked=True, name="me"):
    return Process(name, name, os.getpid(), os.getppid(), threads=1 if asked else None)


def case(q_len=4):
    problem = Problem(batch=1, q_len=q_len, kv_len=4, heads=2, kv_heads=2, head_dim=8)
    return Case(problem, None, (False, False, False), None, refused={"flex": "slow"})


def ran(backend="sdpa_math"):
    return Ran(backend, "1", "HEURISTIC", "why")


WRITES = """
import os, signal, sys
from pathlib import Path
from polyattn.integrations.program.asked import Passed, Process
from polyattn.integrations.program.ledger import FileLedger
ledger = FileLedger(Path(sys.argv[1]), lambda asked: Process("me", "me", os.getpid(), os.getppid()))
place = ledger.add(Passed("reason", "", 0))
ledger.count(place, 41)
print("wrote", flush=True)
if sys.argv[2] == "killed":
    ledger.count(place, 1)
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "waits":
    ledger.count(place, 1)
    sys.stdin.read()
    ledger.end()
"""


def start(folder, how):
    return subprocess.Popen(
        [sys.executable, "-c", WRITES, str(folder), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )


def test_a_killed_process_loses_nothing(tmp_path):
    with start(tmp_path, "killed") as writer:
        assert writer.wait(GIVE_UP_S) == -signal.SIGKILL
    record = record_of_folder(tmp_path)
    assert [(one.reason, one.calls) for one in record.passed] == [("reason", 42)]
    assert record.processes[0].state == "cut short"


def test_a_process_that_goes_on_is_told_from_one_that_ended(tmp_path):
    with start(tmp_path, "waits") as writer:
        assert writer.stdout.readline() == b"wrote\n"
        assert record_of_folder(tmp_path).processes[0].state == "running"
        writer.stdin.close()
        assert writer.wait(GIVE_UP_S) == 0
    record = record_of_folder(tmp_path)
    assert record.processes[0].state == "ended"
    assert record.passed[0].calls == 42


def test_counts_grow_with_what_is_counted(tmp_path):
    ledger = FileLedger(tmp_path, process)
    places = [ledger.add(Passed(f"reason {at}", "", 0)) for at in range(1500)]
    for place in places:
        ledger.count(place, place)
    found = {one.reason: one.calls for one in record_of_folder(tmp_path).passed}
    assert found == {f"reason {at}": place for at, place in enumerate(places)}


def test_cases_come_back_with_what_they_ran_on(tmp_path):
    ledger = FileLedger(tmp_path, process)
    at = ledger.add(case())
    place = ledger.add(RanOn(at, ran()))
    ledger.count(place, 3)
    ledger.count(ledger.add(Unseen("a child", "its flags")), 2)
    record = record_of_folder(tmp_path, ["x.py"])
    (found,) = record.cases
    assert (found.calls, found.ran, found.refused) == (3, Counter({ran(): 3}), {"flex": "slow"})
    assert found.problem == case().problem
    assert record.unseen == [Unseen("a child", "its flags", 2, 0)]
    assert record.program == ("x.py",)


def test_a_line_that_was_not_finished_is_none(tmp_path):
    ledger = FileLedger(tmp_path, process)
    ledger.count(ledger.add(Passed("whole", "", 0)), 1)
    (lines,) = tmp_path.glob("*.jsonl")
    with lines.open("a") as file:
        file.write('{"at": 2, "kind": "pas')
    assert [one.reason for one in record_of_folder(tmp_path).passed] == ["whole"]


def test_a_name_that_is_known_later_counts(tmp_path):
    names = iter(["python", "rank 0", "rank 0"])
    ledger = FileLedger(tmp_path, lambda asked: process(asked, next(names)))
    ledger.begin()
    ledger.count(ledger.add(Passed("one", "", 0)), 1)
    ledger.count(ledger.add(Passed("two", "", 0)), 1)
    (found,) = record_of_folder(tmp_path).processes
    assert (found.name, found.threads) == ("rank 0", 1)


def test_a_folder_that_is_gone_or_full_does_not_end_the_program(tmp_path, capsys, monkeypatch):
    gone = FileLedger(tmp_path / "gone", process)
    place = gone.add(Passed("one", "", 0))
    gone.count(place, 1)
    assert capsys.readouterr().err == ""  # the run is over, and nobody reads
    full = FileLedger(tmp_path, process)
    full.begin()
    monkeypatch.setattr(os, "write", lambda file, text: len(text) // 2)
    for reason in ("one", "two"):
        full.count(full.add(Passed(reason, "", 0)), 1)
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 1
    assert "not in the report" in err


def test_the_lock_ends_with_the_process_and_is_no_forks(tmp_path):
    ledger = FileLedger(tmp_path, process)
    for at in range(1500):  # the counts are mapped anew meanwhile
        ledger.add(Passed(f"reason {at}", "", 0))
    (lines,) = tmp_path.glob("*.jsonl")
    child = os.fork()
    if child == 0:  # the parent's, seen from another process
        ledger.close()
        os._exit(0 if is_locked(lines) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with subprocess.Popen(["sleep", "600"]) as other:  # which inherits no lock
        ledger.close()
        assert not is_locked(lines)
        other.kill()


def test_in_memory():
    ledger = Ledger()
    place = ledger.add(Passed("one", "", 0))
    ledger.count(place, 1)
    assert ledger.entries == [Passed("one", "", 0)]
    assert list(ledger.counts) == [0, 1]


def test_lines_are_json(tmp_path):
    ledger = FileLedger(tmp_path, process)
    ledger.add(case())
    (lines,) = tmp_path.glob("*.jsonl")
    kinds = [json.loads(line)["kind"] for line in lines.read_text().splitlines()]
    assert kinds == ["process", "case"]

"""What several processes wrote, as one record."""

import os

from polyattn.integrations.program.asked import Passed, Process
from polyattn.integrations.program.fragments import MOST_CASES_OF_A_CLASS, record_of_folder
from polyattn.integrations.program.ledger import FileLedger, RanOn
from polyattn.integrations.program.run_folder import Asked, run_folder, told
from tests.integrations.program.test_ledger import case, ran


def wrote(folder, name, pid, cases=(), passed=(), group=None, ended=True):
    """Let a process of this name write its file."""
    process = Process(name, group or name, pid, os.getppid())
    ledger = FileLedger(folder, lambda asked: process)
    ledger.begin()
    for entry, on, count in cases:
        ledger.count(ledger.add(RanOn(ledger.add(entry), on)), count)
    for reason, count in passed:
        ledger.count(ledger.add(Passed(reason, "", 0)), count)
    if ended:
        ledger.end()


def test_a_problem_that_many_processes_had_is_one_case(tmp_path):
    wrote(tmp_path, "rank 0", 11, [(case(), ran(), 3)], group="rank")
    wrote(tmp_path, "rank 1", 12, [(case(), ran(), 4), (case(), ran("flex"), 1)], group="rank")
    record = record_of_folder(tmp_path)
    (one,) = record.cases
    assert one.calls == 8
    assert {(on.backend, on.process): n for on, n in one.ran.items()} == {
        ("sdpa_math", 0): 3, ("sdpa_math", 1): 4, ("flex", 1): 1,
    }  # fmt: skip
    assert [(p.name, p.group, p.pid) for p in record.processes] == [
        ("rank 0", "rank", 11), ("rank 1", "rank", 12),
    ]  # fmt: skip


def test_of_a_class_the_first_cases_are_kept_and_all_calls(tmp_path):
    for at, length in enumerate((5, 6, 7, 8)):  # one class: rounded up to 8
        wrote(tmp_path, f"p{at}", at + 1, [(case(length), ran(), 1 + at)])
    record = record_of_folder(tmp_path)
    assert len(record.cases) == MOST_CASES_OF_A_CLASS
    assert [one.calls for one in record.cases] == [1, 2 + 3 + 4]


def test_reasons_keep_their_process(tmp_path):
    wrote(tmp_path, "a", 1, passed=[("2 dims", 2)])
    wrote(tmp_path, "b", 2, passed=[("2 dims", 3), ("never", 0)])
    record = record_of_folder(tmp_path)
    assert [(p.reason, p.calls, p.process) for p in record.passed] == [
        ("2 dims", 2, 0), ("2 dims", 3, 1),
    ]  # fmt: skip
    assert record.calls == 5


def test_one_that_was_replaced_by_exec_ended_by_itself(tmp_path):
    wrote(tmp_path, "before", 7, ended=False)
    wrote(tmp_path, "after", 7, ended=True)
    states = [(one.name, one.state) for one in record_of_folder(tmp_path).processes]
    assert states == [("before", "ended"), ("after", "ended")]


def test_a_folder_is_made_and_removed_and_tells_what_is_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "theirs")
    asked = Asked(("sdpa_math",), ("flex",), "fallback")
    with run_folder(asked, ["x.py"]) as folder:
        env = folder.environment()
        assert env["POLYATTN_RUN"] == str(folder.path)
        first, second = env["PYTHONPATH"].split(os.pathsep)
        assert first.endswith("start_up")
        assert second == "theirs"
        assert told(folder.path).asked == (asked,)
        assert told(folder.path).supervisor == os.getpid()
        assert folder.record(["x.py"]).calls == 0
    assert not folder.path.exists()
    assert "POLYATTN_RUN" not in os.environ


def test_a_run_within_a_run_keeps_its_requests_and_is_said(monkeypatch):
    outer, inner = Asked(never=("flex",)), Asked(("sdpa_math",))
    with run_folder(outer, ["outer.py"]) as around:
        monkeypatch.setenv("POLYATTN_RUN", str(around.path))
        with run_folder(inner, ["inner.py", "3"]) as folder:
            assert told(folder.path).asked == (outer, inner)
        (said,) = around.record([]).unseen
    assert said.what == "polyattn run inner.py 3"
    assert "a report of its own" in said.why

"""The report of a program as text: few lines, which fit, and nothing cut in the middle."""

import json
import re
from dataclasses import replace

import pytest

from polyattn.integrations.program.asked import Gain, Passed, Process, Record
from polyattn.report.program import lines, to_dict
from polyattn.report.program.layout import columns, common_tails, notes, wrapped
from tests.report.program.records import HARM, case, hostile, long, many, one_process, ran


def text(record, width=80):
    return "\n".join(lines(record, width))


def joined(record):
    return " ".join(text(record).split())


@pytest.mark.parametrize("width", [40, 60, 80, 100])
@pytest.mark.parametrize("record", [one_process, many, hostile, long])
def test_lines_fit(record, width):
    found = lines(record(), width)
    assert max(map(len, found)) <= width
    assert all(line == line.rstrip() for line in found)


def test_what_one_process_did():
    assert (
        text(one_process())
        == """\
polyattn: 12 attention calls, all on its backends

  calls  share  on          why
     12  100 %  native_cpu  1

  1  HEURISTIC: 1.6 x torch's kernel on causal problems, by `polyattn bench harm
     --record` on AMD EPYC with AVX2 (family 25), 2 cores, 2 threads

  calls  problems, and what they ran on
     12  B=1 T=S=256 N=8 H=64, float32, cpu, mask=Causal('top_left'): native_cpu"""
    )


def test_processes_in_groups_and_what_became_of_them():
    said = text(many())
    assert "2,260 attention calls in 7 processes, 2,207 (98 %) on its backends,\n53 not" in said
    assert re.search(r"^  2 ranks +2,012  native_cpu >99 %, ", said, re.MULTILINE)
    assert re.search(r"^  4 DataLoader workers +200  native_cpu$", said, re.MULTILINE)
    assert re.search(r"^  server.py +48  not routed$", said, re.MULTILINE)
    assert "1 process with torch made no call" in said
    assert "a signal, a crash or an exec: 1 process (rank 1), counted up to then" in joined(many())
    assert "went on after the program: 1 process" in said


def test_reasons_once_and_what_they_share_once():
    said = text(many())
    assert said.count("polyattn bench harm") == 1
    assert said.count("[a]") == 3
    assert said.count("inputs of 2, 2 and 2 dims") == 1
    assert re.search(r"^ +5 +<1 %  not routed  2 ranks +\d$", said, re.MULTILINE)
    assert "first of shapes (64, 64), (64, 64), (64, 64)" in said


def test_out_of_sight():
    said = text(many())
    assert "out of sight:\n  2 x python -I tool.py: python -I reads no PYTHONPATH\n" in said
    assert "GPTJModel: GPTJAttention is attention written out" in said


def test_gains_in_all_and_by_problem():
    said = joined(many())
    assert "Attention took about 2.21 s (2.01 s to 2.41 s); with stock torch 4.21 s" in said
    assert "1.9 times" in said or "1.90 times" in said
    assert ">99 % of the routed calls" in said
    assert "others took up to 30% of the cores" in said
    assert "not measured: 60 s were used up (7 calls: B=1 T=S=31" in said
    rows = [line for line in lines(many()) if " ms " in line or " us " in line]
    assert any(re.match(r" +2,000 +1.1 ms +2.1 ms +1.91 \(1.83-2.00\)", row) for row in rows)
    assert "measured on cpu:AMD EPYC" in said


def test_a_wrong_result_is_not_hidden():
    record = replace(many(), gains=[Gain(0, "native_cpu", note="WRONG: out is off by 3")])
    said = joined(record)
    assert "WRONG: out is off by 3" in said
    assert to_dict(record)["gained"]["wrong"] == 1


def test_nothing_asked():
    assert "The program imported no torch." in joined(Record([], []))
    with_torch = Record([], [], processes=[Process("the program", "the program", 1, 0)])
    assert "written out by hand" in text(with_torch)
    assert "came to a result" in text(with_torch) and "made no call" not in text(with_torch)
    assert "a call that raises is not counted" in joined(with_torch)


def test_only_what_was_not_routed():
    said = text(Record([], [Passed("2 dims", "", 3)]))
    assert said.startswith("polyattn: 3 attention calls, 0 (0 %) on its backends, 3 not")


def test_a_fallback_is_said():
    fell = replace(ran(why="the next"), fallback="flex cannot run it")
    said = joined(Record([case({fell: 2})], []))
    assert "the next; instead of what was asked for: flex cannot run it" in said


def test_as_data_and_nothing_left_out():
    found = json.loads(json.dumps(to_dict(many())))
    assert found["calls"] == 2260
    assert [one["name"] for one in found["processes"]][:2] == ["rank 0", "rank 1"]
    assert found["processes"][1]["calls"] == {"native_cpu": 1000, "sdpa_math": 7, "not routed": 2}
    assert sum(one["calls"] for one in found["classes"]) == 2207
    assert len(found["left_to_torch"]) == 3
    assert found["unseen"][0]["times"] == 2
    assert found["gained"]["measured"] == 2200
    assert found["classes"][0]["gain"]["backend"] == "native_cpu"


class TestLayout:
    def test_numbers_keep_their_units_and_ranges(self):
        said = "x " * 9 + "took 12 ms and 3 us of 20 cores (1.16 - 1.66), 1.41 x"
        for width in range(20, 50):
            found = wrapped(said, width)
            assert max(map(len, found)) <= width
            for whole in ("12 ms", "3 us", "20 cores", "1.16 - 1.66", "1.41 x"):
                assert any(whole in line for line in found), (width, found)

    def test_a_word_that_is_longer_than_a_line(self):
        assert max(map(len, wrapped("y" * 100, 30))) <= 30

    def test_a_narrow_table_puts_the_last_column_below(self):
        rows = [("a long heading here", "what"), ("1", "some words that go on and on")]
        found = list(columns(rows, 34))
        assert max(map(len, found)) <= 34
        assert "some words" in "\n".join(found)

    def test_tails(self):
        one, two = "2 x, one" + HARM, "3 x, two" + HARM
        assert common_tails([one, two, "apart"]) == [HARM]
        found = "\n".join(notes([one, two, "apart"], 80))
        assert found.count("AMD EPYC") == 1
        assert "  1  2 x, one [a]" in found
        assert "  3  apart" in found
        assert common_tails(["a, b", "c, b"]) == []
        shapes = "; first of shapes (200, 512, 3200), (200, 512, 3200), (200, 512, 3200)"
        assert common_tails([f"one{shapes}", f"two{shapes}"]) == []

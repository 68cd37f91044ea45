import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polyattn.errors import TraceError
from polyattn.trace import Trace, TraceReader, TraceWriter, read
from polyattn.trace.statistics.sketch_text import pack

RNG = np.random.default_rng(4)
RECORD = {
    "seq": 0, "module": "m", "cls": "M", "call": 0, "step": None, "phase": "out", "tensor": "out",
    "shape": [2], "dtype": "float32", "n": 2, "nan": 0, "pinf": 0, "ninf": 0, "zero": 0,
    "min": 1.0, "max": 2, "samples": [1.0, None], "sketch": pack([1.0] * 64),
}  # fmt: skip
HEADER = {"polyattn.trace": {"schema": 1, "framework": "x"}}
END = {"end": {"records": 1, "calls": 1}}


def file_of(folder, *lines):
    path = folder / "run.jsonl"
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(line + "\n" for line in text))
    return path


def test_reads_what_others_write_and_keeps_what_it_does_not_know(tmp_path):
    more = {"schema": 1, "framework": "x", "new": {"deep": [1, {"a": None}]}}
    path = file_of(tmp_path, {"polyattn.trace": more}, {**RECORD, "later": [1, 2]}, END)
    trace = read(path)
    assert trace.header.extra == {"new": {"deep": [1, {"a": None}]}}
    record = trace.records[0]
    assert record.extra == {"later": [1, 2]} and record.max == 2.0
    assert (record.mean, record.global_shape, record.buckets()[3]) == (None, None, 1.0)
    assert record.key == ("m", 0, None, "out", "out") and record.bad == 0
    back = json.loads(json.dumps(record.to_dict()))
    assert read(file_of(tmp_path, HEADER, back)).records == (record,)


def test_records_come_in_the_order_of_their_seq(tmp_path):
    rows = [{**RECORD, "seq": seq} for seq in (3, 1, 2)]
    path = file_of(tmp_path, HEADER, *rows, {**RECORD, "seq": 9, "same": 3})
    assert [r.seq for r in read(path).records] == [1, 2, 3, 9]
    with TraceReader(path) as lines:
        assert [r.seq for r in lines] == [3, 1, 2, 9]


def test_a_cut_last_line_is_forgiven_and_said(tmp_path):
    path = file_of(tmp_path, HEADER, RECORD, {**RECORD, "seq": 1})
    whole = path.read_bytes()
    header = len(json.dumps(HEADER)) + 1
    first = header + len(json.dumps(RECORD)) + 1
    for size in range(len(whole) - 1, header, -37):
        path.write_bytes(whole[:size])
        trace = read(path)
        complete = (size >= first - 1) + (size >= len(whole) - 1)
        assert len(trace.records) == complete and not trace.ended
        cut = size not in (header, first - 1, first, len(whole) - 1)
        assert ("was cut off" in trace.notes[0]) == cut
        assert "killed, or still runs" in trace.notes[-1]
    for size in range(header - 2):
        path.write_bytes(whole[:size])
        with pytest.raises(TraceError, match="line 1"):
            read(path)


def test_an_end_that_counts_otherwise_is_said(tmp_path):
    trace = read(file_of(tmp_path, HEADER, {"end": {"records": 7}}))
    assert trace.ended and "counts 7 records, and there are 0" in trace.notes[0]


FOREIGN = {
    "empty": [],
    "text": ["hello"],
    "other json": [{"a": 1}],
    "a list": [[1]],
    "newer": [{"polyattn.trace": {"schema": 2}}],
    "no schema": [{"polyattn.trace": {}}],
    "true as schema": [{"polyattn.trace": {"schema": True}}],
    "header of text": [{"polyattn.trace": "x"}],
    "rank beyond world": [{"polyattn.trace": {"schema": 1, "rank": 3, "world": 2}}],
    "modules of numbers": [{"polyattn.trace": {"schema": 1, "modules": {"a": 1}}}],
    "infinite flag": ['{"polyattn.trace":{"schema":1,"flags":{"x":1e999}}}'],
    "deep header": ['{"polyattn.trace":{"schema":1,"x":' + "[" * 500 + "]" * 500 + "}}"],
    "weights of lists": [{"polyattn.trace": {"schema": 1, "weights": {"w": []}}}],
    "half a character": ['{"polyattn.trace":{"schema":1,"framework":"\\ud800"}}'],
}


@pytest.mark.parametrize("name", FOREIGN)
def test_files_that_are_no_trace(tmp_path, name):
    with pytest.raises(TraceError, match=r"run.jsonl, line 1: .*expected a trace"):
        read(file_of(tmp_path, *FOREIGN[name]))


def test_a_newer_schema_is_said_as_such(tmp_path):
    with pytest.raises(TraceError, match=r"schema 2, and this version reads up to 1.*newer poly"):
        read(file_of(tmp_path, {"polyattn.trace": {"schema": 2, "all": "else may differ"}}))


HOSTILE = {
    "no json": "{",
    "not an object": "[]",
    "nan": json.dumps({**RECORD, "mean": float("nan")}),
    "overflow": json.dumps(RECORD).replace('"min": 1.0', '"min": 1e999'),
    "huge integer": json.dumps(RECORD).replace('"n": 2', '"n": 1' + "0" * 5000),
    "integer beyond a float": json.dumps(RECORD).replace('"min": 1.0', '"min": 1' + "0" * 400),
    "deep": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "not so deep": json.dumps({**RECORD, "extra": json.loads("[" * 60 + "]" * 60)}),
    "long line": json.dumps({**RECORD, "pad": "x" * 2**20}),
    "second header": json.dumps(HEADER),
    "blank": "",
    "null bytes": "\0" * 50,
    "no seq": json.dumps({k: v for k, v in RECORD.items() if k != "seq"}),
    "half a character": json.dumps({**RECORD, "seq": 1, "module": "\ud800"}),
    **{
        f"{key}: {str(value)[:20]}": json.dumps({**RECORD, "seq": 1, key: value})
        for key, value in [
            ("seq", 0), ("seq", -1), ("seq", 1.0), ("seq", True), ("seq", "1"), ("seq", 2**70),
            ("module", None), ("module", 5), ("module", "m" * 5000), ("tensor", []), ("cls", 1),
            ("phase", "sideways"), ("phase", ["out"]), ("phase", {}), ("call", -1), ("step", "1"),
            ("rank", -1), ("shape", None), ("shape", "2"), ("shape", [-1]), ("shape", [2.0]),
            ("shape", [2**40, 2**40]), ("shape", [1] * 100), ("shape", [True, 2]), ("dtype", 5),
            ("dtype", "f" * 100), ("n", 3), ("n", -2), ("nan", 3), ("nan", -1), ("zero", 1.5),
            ("mean", "1"), ("mean", [1]), ("samples", 5), ("samples", ["a"]), ("samples", [1] * 99),
            ("sketch", "AAAA"), ("sketch", 5), ("sketch", pack([1.0] * 64) + "AAAA"),
            ("same", 7), ("same", 1), ("same", "0"), ("same", -1), ("global_shape", [1]),
            ("global_shape", [2, 2]), ("start", [0]), ("partial", 1), ("partial", "yes"),
            ("file", "../x"), ("file", "/etc/passwd"), ("file", "a/../../b"), ("file", "C:x"),
            ("file", "a\\b"), ("file", ""), ("file", "a//b"), ("file", "a\x00b"), ("file", 5),
        ]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_lines_are_named(tmp_path, name):
    path = file_of(tmp_path, HEADER, RECORD, HOSTILE[name], END)
    with pytest.raises(TraceError, match=r"run.jsonl, line 3: ") as caught:
        read(path)
    assert len(str(caught.value)) < 1000, "a message, not the file again"


def test_lines_after_the_end_are_another_run(tmp_path):
    with pytest.raises(TraceError, match="line 4: a line after the end: two runs in one file"):
        read(file_of(tmp_path, HEADER, RECORD, END, {**RECORD, "seq": 1}))


def test_bytes_that_are_no_utf8(tmp_path):
    path = file_of(tmp_path, HEADER)
    path.write_bytes(path.read_bytes() + b'{"seq": 0, "module": "\xff\xfe"}\n')
    with pytest.raises(TraceError, match="line 2: bytes that are no UTF-8"):
        read(path)


def test_full_tensors_stay_below_the_traces_folder(tmp_path):
    path = file_of(tmp_path, HEADER, {**RECORD, "file": "run.tensors/0.safetensors"}, END)
    trace = read(path)
    folder = tmp_path / "run.tensors"
    assert trace.file_of(trace.records[0]) == folder / "0.safetensors"
    os.symlink("/", folder)
    with pytest.raises(TraceError, match="leads out of"):
        trace.file_of(trace.records[0])


def test_paths_that_hold_no_trace(tmp_path):
    for path in ("missing.jsonl", "none*.jsonl", "a\0b", "x" * 5000):
        with pytest.raises(TraceError, match="got"):
            read(tmp_path / path)
    with pytest.raises(TraceError, match=r"without a \.jsonl file"):
        read(tmp_path)


SHORT = 'z"}]0,:[{-.eN\\u\x00\xff\n'.encode("latin-1")


@pytest.fixture(scope="module")
def real_trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "real.jsonl"
    with TraceWriter(path, weights={"w": np.arange(6.0)}, modules={"a": "A"}) as trace:
        for name in ("a", "b"):
            x = RNG.standard_normal((2, 3))
            trace.add(name, "in", "args[0]", x, cls="A")
            trace.add(name, "out", "out", x, global_shape=(4, 3), start=(2, 0))
    return path.read_bytes()


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_mutated_files_are_a_trace_or_a_trace_error(real_trace, tmp_path, data):
    content = bytearray(real_trace)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        kind = data.draw(st.sampled_from(["cut", "drop", "byte", "insert", "repeat", "word"]))
        if kind == "cut":
            del content[at:]
        elif kind == "drop":
            del content[at : at + data.draw(st.integers(1, 60))]
        elif kind == "byte" and at < len(content):
            content[at] = data.draw(st.sampled_from(list(SHORT)))
        elif kind == "insert":
            content[at:at] = data.draw(st.binary(max_size=8))
        elif kind == "repeat":
            content[at:at] = content[at : at + data.draw(st.integers(1, 400))]
        elif kind == "word":
            words = [b"null", b"[]", b"{}", b"-1", b"1e999", b'"x"', b"true", b"NaN", b"9" * 30]
            content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.sampled_from(words))
    path = tmp_path / "run.jsonl"
    path.write_bytes(bytes(content))
    try:
        trace = read(path)
    except TraceError as error:
        assert str(error).startswith("got ")
        return
    assert isinstance(trace, Trace)
    for record in trace.records:
        json.dumps(record.to_dict(), allow_nan=False).encode()
        record.buckets()
    json.dumps(trace.header.to_dict(), allow_nan=False)


OPTIONAL = ("same", "global_shape", "start", "partial", "file", "end")
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from([*RECORD, "same", "global_shape", "start", "partial", "file", "end"]), values
)
def test_any_value_of_any_field_is_taken_or_refused(tmp_path, field, value):
    path = file_of(tmp_path, HEADER, RECORD, {**RECORD, "seq": 1, field: value})
    try:
        for record in read(path).records:
            json.dumps(record.to_dict(), allow_nan=False).encode()
    except TraceError as error:
        assert "line 3" in str(error)

import json
import threading

import numpy as np
import pytest

from polyattn.errors import TraceError
from polyattn.trace import Header, TraceWriter, read
from polyattn.trace.fingerprints import fingerprint, matches, moments
from polyattn.trace.format.record import DEFAULT_STATISTICS
from polyattn.trace.statistics import statistics

RNG = np.random.default_rng(3)


def x(*shape):
    return RNG.standard_normal(shape or (3, 4)).astype(np.float32)


def test_what_is_written_is_read(tmp_path):
    w, h = x(8, 8), x(2, 8)
    fields = {
        "framework": "mlx", "seed": 2**63 + 5, "dtypes": {"float32": 1}, "modules": {"": "Net"},
        "selection": {"layers": ".*"}, "argv": ("run.py", "--big"), "versions": {"mlx": "1"},
        "flags": {"torch": {"x": True}},
    }  # fmt: skip
    with TraceWriter(tmp_path / "a.jsonl", weights={"w": w, "v": fingerprint(h)}, **fields) as t:
        assert t.add("", "in", "args[0]", h, cls="Net") == 0
        assert t.add("", "out", "out", 2 * h, cls="Net", step=5, note="kept") == 1
    trace = read(tmp_path / "a.jsonl")
    assert trace.ended and trace.notes == ()
    for name, value in fields.items():
        found = getattr(trace.header, name)
        assert (found == value) if name != "versions" else (found["mlx"] == "1")
    assert matches(moments(trace.header.weights["w"]), moments(fingerprint(w)))
    first, second = trace.records
    expected = statistics(h)
    assert {name: getattr(first, name) for name in ("n", "zero", "dtype", "sketch")} == {
        name: expected[name] for name in ("n", "zero", "dtype", "sketch")
    }
    assert first.mean == pytest.approx(expected["mean"], rel=1e-8)
    assert (first.cls, first.call, first.step, first.shape) == ("Net", 0, None, (2, 8))
    assert (second.step, second.extra) == (5, {"note": "kept"})
    last = (tmp_path / "a.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"end": {"records": 2, "calls": 1}}


def test_calls_are_counted(tmp_path):
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        for _ in range(2):
            trace.add("a", "in", "args[0]", x())
            trace.add("a", "in", "kwargs.mask", x())
            trace.add("b", "out", "out", x())
            trace.add("a", "out", "out", x())
        trace.add("a", "in", "kwargs.mask", x())  # an input after an output
        trace.add("a", "grad_out", "out", x(), call=1)
        trace.add("a", "grad_in", "args[0]", x(), call=1)
        trace.add("b", "out", "out", x(), call=7)
        trace.add("b", "out", "out", x())
    records = read(tmp_path / "a.jsonl").records
    assert [r.call for r in records if r.module == "a" and "grad" not in r.phase] == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
    ]
    assert [r.call for r in records if "grad" in r.phase] == [1, 1]
    assert [r.call for r in records if r.module == "b"] == [0, 1, 7, 8]


def test_identical_tensors_are_written_once(tmp_path):
    a, b = x(64, 64), x(64, 64)
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        trace.add("m1", "out", "out", a)
        trace.add("m2", "in", "args[0]", a.copy())
        trace.add("m2", "out", "out", b)
        trace.add("m3", "in", "args[0]", a.T)
        trace.add("m4", "in", "args[0]", a)
    records = read(tmp_path / "a.jsonl").records
    assert [r.same for r in records] == [None, 0, None, None, 0]
    for other in (records[1], records[4]):
        for name in DEFAULT_STATISTICS:
            assert getattr(records[0], name) == getattr(other, name)
    short = (tmp_path / "a.jsonl").read_text().splitlines()[2]
    assert len(short) < 120


def test_steps_nest_and_hold_in_every_thread(tmp_path):
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        with trace.step(1):
            with trace.step(2):
                trace.add("a", "out", "out", x())
            thread = threading.Thread(target=trace.add, args=("a", "out", "out", x()))
            thread.start()
            thread.join()
            with pytest.raises(KeyError), trace.step(3):
                raise KeyError
            trace.add("a", "out", "out", x())
        trace.add("a", "out", "out", x())
        with pytest.raises(TraceError, match="got the step"), trace.step("1"):
            pass
    assert [r.step for r in read(tmp_path / "a.jsonl").records] == [2, 1, 1, None]


def test_threads(tmp_path):
    with TraceWriter(tmp_path / "a.jsonl") as trace:

        def work(number):
            for _ in range(50):
                trace.add(f"m{number}", "out", "out", x(5))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    trace = read(tmp_path / "a.jsonl")
    assert [r.seq for r in trace.records] == list(range(300))
    for n in range(6):
        assert [r.call for r in trace.records if r.module == f"m{n}"] == list(range(50))


def test_each_add_is_with_the_system_before_it_returns(tmp_path):
    trace = TraceWriter(tmp_path / "a.jsonl")
    trace.add("a", "out", "out", x())
    now = read(tmp_path / "a.jsonl")
    assert len(now.records) == 1 and not now.ended and "did not end" in now.notes[0]
    trace.close()
    assert trace.add("a", "out", "out", x()) is None
    trace.close()


def test_one_file_for_each_rank(tmp_path):
    with TraceWriter(tmp_path / "a.jsonl", rank=1, world=2) as trace:
        trace.add("a", "out", "out", x())
    assert trace.path == tmp_path / "a.rank1.jsonl"
    assert read(trace.path).records[0].rank == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "sideways", "out", [1.0]),
        (5, "out", "out", [1.0]),
        ("a", "out", "out", ["text"]),
        ("a", "out", "out", {"n": 3}),
        ("a", "out", "out", [[1.0], [1.0, 2.0]]),
    ],
)
def test_what_no_record_can_have_is_refused_and_the_rest_goes_on(tmp_path, arguments):
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        with pytest.raises(TraceError, match="got"):
            trace.add(*arguments)
        with pytest.raises(TraceError, match="call"):
            trace.add("a", "out", "out", [1.0], call=-1)
        trace.add("a", "out", "out", [1.0])
    assert len(read(tmp_path / "a.jsonl").records) == 1


def test_headers_that_are_none(tmp_path):
    for arguments in ({"framwork": "x"}, {"rank": 2, "world": 2}, {"header": Header(), "seed": 1}):
        with pytest.raises(TraceError, match="got"):
            TraceWriter(tmp_path / "a.jsonl", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("module", "tensor", "cls"),
    [("m" * 5000, "out", ""), ("m", "t" * 5000, ""), ("m", "out", "c" * 5000), ("m", "out", 3)],
)
def test_names_that_no_record_can_have(tmp_path, module, tensor, cls):
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        with pytest.raises(TraceError, match="at most 4096 characters"):
            trace.add(module, "out", tensor, x(), cls=cls)
        trace.add("m", "out", "out", x())
    assert [r.seq for r in read(tmp_path / "a.jsonl").records] == [0]


def test_names_that_no_header_can_have(tmp_path):
    for fields in ({"weights": {"w" * 5000: x()}}, {"modules": {"m" * 5000: "M"}}):
        with pytest.raises(TraceError, match="at most 4096 characters"):
            TraceWriter(tmp_path / "a.jsonl", **fields)
    assert not (tmp_path / "a.jsonl").exists()

import numpy as np
import pytest

from polyattn.errors import TraceError
from polyattn.trace import TraceWriter, read
from polyattn.trace.statistics import statistics
from polyattn.trace.statistics.schema import COUNTS, DEFAULT_STATISTICS, MOMENTS
from polyattn.trace.statistics.sketch import distance, sketch

RNG = np.random.default_rng(5)


def write(folder, world, add, ranks=None):
    for rank in range(world) if ranks is None else ranks:
        with TraceWriter(folder / "run.jsonl", rank=rank, world=world) as trace:
            add(trace, rank)


def assert_is(record, x):
    expected = statistics(x)
    assert (record.shape, record.n) == (x.shape, x.size)
    assert distance(record.buckets(), sketch(x)) < 1e-6
    assert [getattr(record, c) for c in COUNTS] == [expected[c] for c in COUNTS]
    for name in set(MOMENTS) & set(DEFAULT_STATISTICS):
        assert getattr(record, name) == pytest.approx(expected[name], rel=1e-6), name


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("how", ["pattern", "folder", "name", "file"])
def test_shards_of_ranks_are_the_whole(tmp_path, dim, how):
    x = RNG.standard_normal((4, 8, 12)).astype(np.float32) * 3 + 1
    x[0, 0, :4] = np.nan, np.inf, 0, -np.inf
    size = x.shape[dim] // 4

    def add(trace, rank):
        start = [0, 0, 0]
        start[dim] = rank * size
        part = np.take(x, range(rank * size, (rank + 1) * size), axis=dim)
        trace.add("whole", "in", "args[0]", x)
        trace.add("m", "out", "out", part, cls="M", global_shape=x.shape, start=start)

    write(tmp_path, 4, add)
    path = {
        "pattern": tmp_path / "run.rank*.jsonl",
        "folder": tmp_path,
        "name": tmp_path / "run.jsonl",
        "file": tmp_path / "run.rank2.jsonl",
    }[how]
    trace = read(path)
    assert trace.ended
    if how == "file":
        assert "have not all their parts" in trace.notes[-1]
        assert trace.records[1].start is not None
        return
    assert trace.notes == () and len(trace.paths) == len(trace.headers) == 4
    assert [(r.module, r.rank) for r in trace.records] == [
        ("whole", 0),
        ("whole", 1),
        ("whole", 2),
        ("whole", 3),
        ("m", 0),
    ]
    assert [r.seq for r in trace.records] == list(range(5))
    assert_is(trace.records[-1], x)
    assert trace.records[-1].samples is None and trace.records[-1].cls == "M"


def test_replicas_count_once_and_partial_sums_all(tmp_path):
    x = RNG.standard_normal((6, 10))
    terms = RNG.standard_normal((4, 6, 10))

    def add(trace, rank):
        half = slice(rank % 2 * 3, rank % 2 * 3 + 3)
        trace.add("m", "out", "out", x[half], global_shape=(6, 10), start=(half.start, 0))
        trace.add("m", "out", "sum", terms[rank], partial=True)

    write(tmp_path, 4, add)
    whole, total = read(tmp_path).records
    assert_is(whole, x)
    assert distance(total.buckets(), sketch(terms.sum(0))) < 1e-6
    assert (total.mean, total.l2, total.shape, total.partial) == (None, None, (6, 10), False)


def test_calls_and_steps_are_kept_apart(tmp_path):
    xs = RNG.standard_normal((2, 4, 4))

    def add(trace, rank):
        for step, x in enumerate(xs):
            part = x[2 * rank : 2 * rank + 2]
            trace.add("m", "out", "out", part, step=step, global_shape=x.shape, start=(2 * rank, 0))

    write(tmp_path, 2, add)
    first, second = read(tmp_path).records
    assert_is(first, xs[0])
    assert_is(second, xs[1])


def test_same_stays_within_its_rank(tmp_path):
    def add(trace, rank):
        x = np.full(9, float(rank))
        trace.add("a", "out", "out", x)
        trace.add("b", "in", "args[0]", x)

    write(tmp_path, 2, add)
    records = read(tmp_path).records
    assert [(r.seq, r.rank, r.same, r.mean) for r in records] == [
        (0, 0, None, 0),
        (1, 1, None, 1),
        (2, 0, 0, 0),
        (3, 1, 1, 1),
    ]


def test_missing_ranks_are_said_and_parts_stay_apart(tmp_path):
    def add(trace, rank):
        trace.add("m", "out", "out", np.ones(2), global_shape=(8,), start=(2 * rank,))

    write(tmp_path, 4, add, ranks=(0, 1, 3))
    trace = read(tmp_path)
    assert [r.start for r in trace.records] == [(0,), (2,), (6,)]
    assert "1 ranks of the run have no file here" in trace.notes
    assert "have not all their parts" in trace.notes[-1]


def test_files_of_different_runs_are_no_trace(tmp_path):
    for name in ("a", "b"):
        TraceWriter(tmp_path / f"{name}.jsonl").close()
    with pytest.raises(TraceError, match=r"a.jsonl: rank 0 of 1.*expected one file for each rank"):
        read(tmp_path)

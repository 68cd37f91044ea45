import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from polyattn.errors import TraceError
from polyattn.trace import JsonlSink, rank_path

BOTH = pytest.mark.parametrize("background", [True, False], ids=["thread", "direct"])


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(code, folder):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@BOTH
def test_many_threads_write_whole_lines_in_their_own_order(tmp_path, background):
    path = tmp_path / "run.jsonl"
    with JsonlSink(path, background=background, limit=50) as sink:

        def work(number):
            for i in range(300):
                sink.extend([{"thread": number, "i": i, "part": part} for part in (0, 1)])

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = lines(path)
    assert len(found) == 8 * 300 * 2
    for number in range(8):
        own = [(r["i"], r["part"]) for r in found if r["thread"] == number]
        assert own == [(i, part) for i in range(300) for part in (0, 1)]
    assert all(  # one call's records stay together
        (a["thread"], a["i"]) == (b["thread"], b["i"])
        for a, b in zip(found[::2], found[1::2], strict=True)
    )


def test_generators_are_walked_in_the_thread(tmp_path):
    seen = []

    def records():
        seen.append(threading.current_thread().name)
        yield {"a": 1}

    with JsonlSink(tmp_path / "run.jsonl") as sink:
        sink.extend(records(), count=1)
    assert seen == ["polyattn-trace"]


def test_memory_is_bounded_and_nothing_is_lost(tmp_path):
    gate = threading.Event()

    def slow():
        gate.wait(30)
        yield {"slow": True}

    with JsonlSink(tmp_path / "run.jsonl", limit=10) as sink:
        sink.extend(slow(), count=1)
        accepted = []

        def work():
            for i in range(100):
                sink.write({"i": i})
                accepted.append(i)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.2)
        assert len(accepted) <= 10, "it waits for the disk"
        gate.set()
        thread.join(30)
        assert not thread.is_alive()
    assert [r.get("i") for r in lines(tmp_path / "run.jsonl")] == [None, *range(100)]


@BOTH
def test_flushed_lines_are_with_the_system(tmp_path, background):
    path = tmp_path / "run.jsonl"
    with JsonlSink(path, background=background) as sink:
        sink.write({"a": 1})
        sink.flush()
        assert lines(path) == [{"a": 1}]
        sink.write('{"b":2}')
    assert lines(path) == [{"a": 1}, {"b": 2}]


def test_never_bare_nan_and_odd_values(tmp_path):
    np = pytest.importorskip("numpy")
    with JsonlSink(tmp_path / "run.jsonl") as sink:
        sink.write({"x": [float("nan"), float("inf"), 1e22, 5], "t": 'a"\n\\\ud800é😀', "b": True})
        sink.write({"n": np.float32(1.5), "i": np.int64(3), "a": np.arange(2), "f": np.True_})
    text = (tmp_path / "run.jsonl").read_text()
    assert "NaN" not in text and "Infinity" not in text and text.isascii()
    assert lines(tmp_path / "run.jsonl") == [
        {"x": [None, None, 1e22, 5], "t": 'a"\n\\?é😀', "b": True},
        {"n": 1.5, "i": 3, "a": [0, 1], "f": True},
    ]


@BOTH
def test_another_runs_file_is_left_alone(tmp_path, background):
    path = tmp_path / "run.jsonl"
    path.write_text("mine\n")
    with pytest.raises(TraceError, match=r"holds 5 bytes already.*overwrite=True"):
        JsonlSink(path, background=background)
    assert path.read_text() == "mine\n"
    with JsonlSink(path, background=background, overwrite=True) as sink:
        sink.write({"a": 1})
        with pytest.raises(TraceError, match="another run is writing"):
            JsonlSink(path, overwrite=True)
    assert lines(path) == [{"a": 1}]
    path.write_text("")
    JsonlSink(path).close()


def test_unwritable_output_is_said_when_it_is_opened(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run.jsonl", tmp_path, "a\0b", tmp_path / ("x" * 300)):
        with pytest.raises(TraceError, match="cannot be written"):
            JsonlSink(path)
    JsonlSink(tmp_path / "new" / "folder" / "run.jsonl").close()
    with pytest.raises(TraceError, match="limit"):
        JsonlSink(tmp_path / "b.jsonl", limit=0)


@BOTH
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_never_stops_the_program_and_is_said_once(background, caplog):
    sink = JsonlSink("/dev/full", background=background)
    for i in range(1000):
        sink.write({"i": i})
    sink.flush()
    assert len(caplog.records) == 1 and "No space left" in caplog.text
    with pytest.raises(TraceError, match="No space left"):
        sink.close()
    sink.close()
    sink.write({"late": True})
    assert sink.dropped == 1001


@BOTH
def test_what_was_written_before_the_disk_was_full_is_whole(tmp_path, background):
    code = f"""
        import resource, logging
        from polyattn.errors import TraceError
        from polyattn.trace import JsonlSink
        logging.disable()
        sink = JsonlSink("run.jsonl", background={background})
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        for i in range(2000):
            sink.write({{"i": i, "pad": "x" * 50}})
        try:
            sink.close()
        except TraceError as error:
            print(error)
    """
    done = run(code, tmp_path)
    assert "File too large" in done.stdout and done.returncode == 0, done.stderr
    text = (tmp_path / "run.jsonl").read_text()
    assert text.endswith("\n") and 9_000 < len(text) <= 10_000
    assert [r["i"] for r in lines(tmp_path / "run.jsonl")] == list(range(text.count("\n")))


@BOTH
def test_a_record_that_is_none_ends_the_trace_not_the_model(tmp_path, background):
    sink = JsonlSink(tmp_path / "run.jsonl", background=background)
    sink.extend([{"a": 1}, {"b": object()}, {"c": 1}])
    sink.write({"d": 1})
    with pytest.raises(TraceError, match="got a object in a record"):
        sink.close()
    assert lines(tmp_path / "run.jsonl") == [{"a": 1}]
    assert sink.dropped == 3


@BOTH
def test_a_killed_process_loses_no_record(tmp_path, background):
    code = f"""
        import os, signal
        from polyattn.trace import JsonlSink
        sink = JsonlSink("run.jsonl", background={background})
        for i in range(1000):
            sink.write({{"i": i}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = run(code, tmp_path)
    assert done.returncode == -signal.SIGKILL
    assert [r["i"] for r in lines(tmp_path / "run.jsonl")] == list(range(1000))


@BOTH
def test_exit_without_close_writes_everything_and_the_last_line(tmp_path, background):
    code = f"""
        from polyattn.trace import JsonlSink
        sink = JsonlSink("run.jsonl", background={background}, last=lambda: {{"end": 1}})
        for i in range(1000):
            sink.write({{"i": i}})
        raise RuntimeError("the program fails")
    """
    assert "the program fails" in run(code, tmp_path).stderr
    assert [*lines(tmp_path / "run.jsonl")][-2:] == [{"i": 999}, {"end": 1}]


@BOTH
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_writes_nothing_and_cannot_hang(tmp_path, background):
    code = f"""
        import os, sys, warnings
        warnings.simplefilter("ignore")
        from polyattn.trace import JsonlSink
        with JsonlSink("run.jsonl", background={background}, last=lambda: {{"end": 1}}) as sink:
            sink.write({{"parent": 0}})
            children = []
            for _ in range(20):
                sink.write({{"parent": 1}})
                pid = os.fork()
                if not pid:
                    sink.write({{"child": 1}})
                    sink.flush()
                    sink.close()
                    sys.exit(0)
                children.append(pid)
            assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 20
            sink.write({{"parent": 2}})
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    found = lines(tmp_path / "run.jsonl")
    assert found == [{"parent": 0}, *[{"parent": 1}] * 20, {"parent": 2}, {"end": 1}]


@BOTH
def test_close_is_idempotent_and_a_blocks_own_error_is_seen(tmp_path, background):
    sink = JsonlSink(tmp_path / "a.jsonl", background=background, last=lambda: {"end": 1})
    sink.close()
    sink.close()
    sink.write({"late": 1})
    sink.flush()
    assert lines(tmp_path / "a.jsonl") == [{"end": 1}] and sink.dropped == 1 and sink.closed
    with pytest.raises(KeyError), JsonlSink(tmp_path / "b.jsonl", background=background) as sink:
        sink.write({"x": object()})
        raise KeyError


@BOTH
def test_a_close_that_was_interrupted_is_done_again(tmp_path, background):
    answers = [KeyboardInterrupt, None]

    def last():
        if answers.pop(0):
            raise KeyboardInterrupt
        return {"end": 1}

    sink = JsonlSink(tmp_path / "run.jsonl", background=background, last=last)
    sink.write({"a": 1})
    with pytest.raises(KeyboardInterrupt):
        sink.close()
    assert not sink.closed
    sink.write({"b": 1})
    sink.close()
    assert lines(tmp_path / "run.jsonl") == [{"a": 1}, {"b": 1}, {"end": 1}]


def test_rank_path(tmp_path):
    assert rank_path(tmp_path / "a.b.jsonl", 0, 2) == tmp_path / "a.b.rank0.jsonl"


def test_importing_and_writing_needs_no_numpy(tmp_path):
    code = """
        import sys
        from polyattn.trace import JsonlSink, TraceWriter, read
        with TraceWriter("run.jsonl") as trace:
            trace.add("m", "out", "out", {"shape": [2], "dtype": "float32", "n": 2, "mean": 1.0})
        assert read("run.jsonl").records[0].mean == 1
        assert not {"numpy", "torch", "jax"} & sys.modules.keys()
    """
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr

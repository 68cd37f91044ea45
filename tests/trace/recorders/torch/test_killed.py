"""A trace whose process is killed, interrupted or out of disk loses at most the record at hand."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

from polyattn.trace import read

LINES = pytest.mark.parametrize("lines", ["native", "python"])

WITHOUT_NATIVE = """
import polyattn.trace.recorders.torch.tensor_statistics as statistics
statistics.native_module = lambda: None
"""


NEVER = 1800
"""Seconds after which a program hangs, on any machine; nothing is measured by it."""


def run(lines: str, code: str, *arguments: object, kill_after: int | None = None) -> bytes:
    """What the program printed; `lines`: what makes them.

    `kill_after`: how many bytes it has said when it is killed, wherever it is by then.
    """
    code = (WITHOUT_NATIVE if lines == "python" else "") + textwrap.dedent(code)
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, bufsize=0
    )
    said = b""
    if kill_after is not None:
        assert process.stdout is not None
        while len(said) < kill_after:
            more = process.stdout.read(kill_after - len(said))
            assert more, "it ended by itself"
            said += more
        process.kill()
    out, _ = process.communicate(timeout=NEVER)
    assert process.returncode in ((-signal.SIGKILL,) if kill_after is not None else (0, -9))
    return said + out


DIES = """
    import os, sys, torch
    from torch import nn
    from polyattn.hooks import trace

    class Dies(nn.Module):
        def forward(self, x):
            os.kill(os.getpid(), 9)

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Dies())
    trace(model, sys.argv[1], immediate=sys.argv[2] == "immediate", tensors=None)
    model[:2](torch.ones(1, 4))
    model(torch.ones(1, 4))
"""


@LINES
@pytest.mark.parametrize("mode", ["usual", "immediate"])
def test_killed_in_a_forward(tmp_path: Path, lines: str, mode: str) -> None:
    run(lines, DIES, tmp_path / "run.jsonl", mode)
    found = read(tmp_path / "run.jsonl")
    assert [(r.module, r.phase) for r in found.records] == [
        ("0", "in"),
        ("0", "out"),
        ("1", "in"),
        ("1", "out"),
        ("", "in"),
        ("0", "in"),
        ("0", "out"),
        ("1", "in"),
        ("1", "out"),
        ("2", "in"),
    ]
    assert not found.ended and "did not end" in found.notes[-1]


ENDLESS = """
    import os, sys, torch
    from torch import nn
    from polyattn.hooks import trace

    class Says(nn.Module):
        def forward(self, x):
            os.write(1, b".")
            return x + 1

    torch.set_num_threads(1)
    model = nn.Sequential(*[Says() for _ in range(20)])
    trace(model, sys.argv[1])
    with torch.no_grad():
        while True:
            model(torch.randn(8, 16))
"""


@LINES
def test_killed_at_any_time(tmp_path: Path, lines: str) -> None:
    for i in range(2):
        path = tmp_path / f"{i}.jsonl"
        said = len(run(lines, ENDLESS, path, kill_after=random.Random(i).randrange(100, 2000)))
        inputs = [r for r in read(path).records if r.phase == "in" and r.module]
        # a module speaks after its input was recorded, and the one before has left by then
        assert said <= len(inputs) <= said + 1


FULL = """
    import logging, resource, sys, torch
    from torch import nn
    from polyattn.errors import TraceError
    from polyattn.hooks import trace
    logging.disable()
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(10)])
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for size in sys.argv[2:]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        run = trace(model, f"{sys.argv[1]}/{size}.jsonl", weights=False)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), most))
        for _ in range(20):
            assert model(torch.randn(4, 8)).shape == (4, 8)
        try:
            run.close()
        except TraceError as error:
            print(error)
"""


@LINES
@pytest.mark.skipif(os.name != "posix", reason="no limit of a file's size")
def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, lines: str) -> None:
    sizes = range(20_000, 20_400, 17)
    said = run(lines, FULL, tmp_path, *sizes).decode()
    assert said.count("File too large") == said.count("Make room") == len(sizes)
    for size in sizes:
        path = tmp_path / f"{size}.jsonl"
        assert path.read_bytes().endswith(b"\n") and size - 1000 < path.stat().st_size <= size
        found = read(path)
        assert not found.ended and len(found.records) > 20
        assert [r.seq for r in found.records] == list(range(len(found.records)))


INTERRUPTED = """
    import random, signal, sys, torch
    from torch import nn
    from polyattn.hooks import trace
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    random.seed(0)
    run = trace(model, sys.argv[1], weights=False)
    armed, caught = False, 0
    def interrupt(*_):
        global armed
        if armed:  # once, and never outside the block that waits for it
            armed = False
            raise KeyboardInterrupt
    signal.signal(signal.SIGALRM, interrupt)
    while caught < 60 or run.recorder.records < 400:
        try:
            armed = True
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
            while armed:
                model(torch.randn(4, 8))
        except KeyboardInterrupt:
            caught += 1
    run.close()
    print(caught)
"""


@LINES
@pytest.mark.skipif(os.name != "posix", reason="no timers that interrupt")
def test_interrupts_leave_a_trace_that_can_be_read(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "run.jsonl"
    assert int(run(lines, INTERRUPTED, path)) >= 60
    found = read(path)
    assert found.ended and len(found.records) > 300
    assert all(isinstance(json.loads(line), dict) for line in path.read_text().splitlines())


CLOSED_BY_A_SIGNAL = """
    import os, random, signal, sys, threading, time, torch
    from torch import nn
    from polyattn.hooks import trace
    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    run = trace(model, sys.argv[1], weights=False)
    def end(*_):
        run.close()
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    def later(after):
        while run.recorder.records < after:
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=later, args=[random.randrange(1, 3000)], daemon=True).start()
    while not run.sink.closed:
        model(torch.randn(4, 8))
"""


@LINES
@pytest.mark.skipif(os.name != "posix", reason="no such signal")
def test_a_handler_may_close_the_trace_at_any_time(tmp_path: Path, lines: str) -> None:
    for i in range(2):
        run(lines, CLOSED_BY_A_SIGNAL, tmp_path / f"{i}.jsonl")
        assert read(tmp_path / f"{i}.jsonl").ended


GROWS = """
    import itertools, sys, torch
    from polyattn.bench.trace.overhead_models import MODELS, make
    from polyattn.hooks import trace

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 2**20

    torch.set_num_threads(1)
    model, inputs = make(MODELS[0], 0)
    with torch.no_grad(), trace(model, sys.argv[1], weights=False) as run:
        for i, one in enumerate(itertools.islice(inputs, 12)):
            model(**one)
            run.flush()  # what a thread has not yet come to is no growth
            if i == 2:
                before = resident()
        print(resident() - before)
"""


@LINES
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc")
def test_the_process_does_not_grow_with_what_is_remembered(tmp_path: Path, lines: str) -> None:
    pytest.importorskip("transformers")
    assert float(run(lines, GROWS, tmp_path / "run.jsonl")) < 24  # MiB: its one block, and a little

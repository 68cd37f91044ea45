"""A trace's life: attached and detached, failing models, threads, copies, full disks, kills."""

import copy
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks import ActivationStatHook, JsonlSink, ModuleHookManager, trace
from polyattn.trace import read
from tests.hooks.recording import state_of
from tests.trace.recorders.torch.traced_models import Block, llama, places, tokens

X = torch.ones(2, 8)


def test_the_model_is_as_before(tmp_path: Path) -> None:
    model = llama(1)
    before = [state_of(module) for module in model.modules()]
    with trace(model, tmp_path / "run.jsonl") as run, torch.no_grad():
        model(tokens())
        assert run.attached
    assert [state_of(module) for module in model.modules()] == before
    assert not run.attached
    run.close()
    model(tokens())
    assert read(tmp_path / "run.jsonl").ended


def test_a_model_is_traced_once_at_a_time(tmp_path: Path) -> None:
    model = Block()
    with trace(model, tmp_path / "a.jsonl"):
        with pytest.raises(TraceError, match=r"traced into .*a\.jsonl already"):
            trace(model, tmp_path / "b.jsonl")
        with pytest.raises(TraceError, match="close that one first"):
            trace(model.first, tmp_path / "b.jsonl")
        model(X)
    with trace(model, tmp_path / "b.jsonl"):
        model(X)
    assert len(read(tmp_path / "a.jsonl").records) == len(read(tmp_path / "b.jsonl").records) == 6


def test_a_file_of_another_run_is_kept(tmp_path: Path) -> None:
    model = Block()
    (tmp_path / "run.jsonl").write_text("precious")
    with pytest.raises(TraceError, match="overwrite=True"):
        trace(model, tmp_path / "run.jsonl")
    assert (tmp_path / "run.jsonl").read_text() == "precious"
    assert not any(module._forward_hooks for module in model.modules())
    with trace(model, tmp_path / "run.jsonl", overwrite=True):
        model(X)
    assert read(tmp_path / "run.jsonl").ended
    with pytest.raises(TraceError, match="cannot be written"):
        trace(model, "/proc/nowhere/run.jsonl")
    with pytest.raises(TraceError, match=r"expected a torch\.nn\.Module"):
        trace("model", tmp_path / "other.jsonl")


class Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            raise RuntimeError("too much")
        return x


def test_a_failing_forward_leaves_what_ran_and_the_run_goes_on(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Identity(), Fails(), nn.Identity())
    with trace(model, tmp_path / "run.jsonl"):
        with pytest.raises(RuntimeError, match="too much"):
            model(X)
        model(-X)
    found = read(tmp_path / "run.jsonl")
    assert [p[:2] for p in places(found)][:4] == [
        ("", "in"),
        ("0", "in"),
        ("0", "out"),
        ("1", "in"),
    ]
    assert [r.call for r in found.records if r.module in ("", "1")] == [0, 0, 1, 1, 1, 1]
    assert found.ended


def test_an_error_in_the_block_ends_the_trace_and_is_the_one_to_see(tmp_path: Path) -> None:
    model = Block()
    with pytest.raises(ZeroDivisionError), trace(model, tmp_path / "run.jsonl"):
        model(X)
        raise ZeroDivisionError
    assert read(tmp_path / "run.jsonl").ended and not model._forward_hooks


def test_threads_run_the_model_at_once(tmp_path: Path) -> None:
    model = Block()
    with trace(model, tmp_path / "run.jsonl"):

        def work(number: int) -> None:
            with torch.no_grad():
                for _ in range(20):
                    model(X * number)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = read(tmp_path / "run.jsonl")
    assert len(found.records) == 4 * 20 * 6 and found.ended and not found.notes
    calls = [r.call for r in found.records if (r.module, r.phase) == ("", "in")]
    assert sorted(calls) == list(range(80))
    for call in range(80):  # each call's tensors are its own
        of = [r for r in found.records if r.call == call and r.module == ""]
        assert [r.phase for r in of] == ["in", "out"]
    means = [r.mean for r in found.records if (r.module, r.phase) == ("", "in")]
    assert sorted(means) == [n for n in (1, 2, 3, 4) for _ in range(20)]


def test_copies_are_not_traced(tmp_path: Path) -> None:
    model = Block()
    with trace(model, tmp_path / "run.jsonl"):
        copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        copied(X)
        loaded(X)
        model(X)
    assert len(read(tmp_path / "run.jsonl").records) == 6


def test_replicas_that_share_the_hooks_are_not_traced(tmp_path: Path) -> None:
    model = Block()
    with trace(model, tmp_path / "run.jsonl"):
        replica = model._replicate_for_data_parallel()
        replica(X)
        model(X)
    roots = [r for r in read(tmp_path / "run.jsonl").records if r.module == ""]
    assert len(roots) == 2


def test_long_runs_pass_through_few_buffers(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Identity() for _ in range(400)])
    with trace(model, tmp_path / "run.jsonl") as run, torch.inference_mode():
        for step in range(3):
            model(torch.full((4,), float(step)))
        run.flush()
        assert sum(map(len, run.recorder._pool._free.values())) <= 4
    found = read(tmp_path / "run.jsonl")
    assert len(found.records) == 3 * 802
    assert {r.mean for r in found.records if r.call == 1} == {1.0}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_never_ends_the_model(caplog: pytest.LogCaptureFixture) -> None:
    model = Block()
    run = trace(model, "/dev/full")
    for _ in range(3):
        assert model(X).shape == (2, 8)
    run.flush()
    assert model(X).shape == (2, 8)
    with pytest.raises(TraceError, match="No space left"):
        run.close()
    assert not model._forward_hooks and "No space left" in caplog.text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    code = """
        import os, sys, torch
        from polyattn.hooks import trace
        model = torch.nn.Linear(4, 4)
        trace(model, sys.argv[1])
        model(torch.ones(1, 4))
        child = os.fork()
        model(torch.zeros(1, 4))
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    path = tmp_path / "run.jsonl"
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), str(path)],
        check=True,
        timeout=120,
    )
    found = read(path)  # ended by the interpreter's exit, without close
    assert len(found.records) == 4 and found.ended and not found.notes


def test_ranks_have_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    with trace(Block(), tmp_path / "run.jsonl") as run:
        run.model(X)
    assert run.path.name == "run.rank3.jsonl"
    found = read(run.path)
    assert (found.header.rank, found.header.world, found.records[0].rank) == (3, 4, 3)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(TraceError, match="expected a number below"):
        trace(Block(), tmp_path / "other.jsonl")


def test_the_stat_hook_works_alone(tmp_path: Path) -> None:
    model = Block()
    path = tmp_path / "stats.jsonl"
    with JsonlSink(path) as sink:
        stats = [("abs_mean", lambda t: t.abs().mean()), ("max", lambda t: t.max().item())]
        for name in ("first", "second"):
            hook = ActivationStatHook(name, ["l2", ("peak", lambda t: t.max())], sink, None)
            ModuleHookManager.of(getattr(model, name)).attach("stats", hook)
        own = ActivationStatHook("whole", [(f"own_{n}", f) for n, f in stats], sink, {0})
        ModuleHookManager.of(model).attach("stats", own)
        model(X)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["seq"], line["module"], line["phase"]) for line in lines] == [
        (0, "first", "out"),
        (1, "second", "out"),
    ]
    assert {"l2", "peak"} <= lines[0].keys() and "own_max" not in lines[0]

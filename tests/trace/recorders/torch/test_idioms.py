"""FastVideo's idioms: attach, detach the handle or None, <pid> in the name, a second run."""

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks import (
    JsonlSink,
    attach_activation_trace,
    detach_activation_trace,
    trace,
    trace_any,
    trace_step,
)
from polyattn.settings import Settings
from polyattn.trace import TraceWriter, read
from polyattn.trace.recorders.torch import files
from tests.trace.recorders.torch.traced_models import Block

pytestmark = pytest.mark.filterwarnings("ignore:nothing was recorded")

X = torch.ones(2, 8)


@pytest.fixture
def on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set variables of the trace, which then is on, with a file in the test's folder."""

    def setting(**variables: str) -> Path:
        variables = {"ACTIVATIONS": "1", "OUTPUT": str(tmp_path / "run.jsonl")} | variables
        for name, value in variables.items():
            monkeypatch.setenv(f"POLYATTN_TRACE_{name}", value)
        return Path(variables["OUTPUT"])

    monkeypatch.setattr(files, "_given", set())  # as in a process of its own
    return setting


def is_free(model: nn.Module) -> bool:
    return all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


class TestDetach:
    """``t = attach_activation_trace(m); ...; detach_activation_trace(t)``."""

    def test_the_handle(self, on: Any) -> None:
        path = on(STATS="abs_mean,sum")
        model = Block()
        handle = attach_activation_trace(model)
        assert handle is not None and not is_free(model)
        with trace_step(0):
            model(X)
        detach_activation_trace(handle)
        assert is_free(model) and not handle.attached
        found = read(path)
        assert found.ended and found.records[0].sum == 16 and found.records[0].abs_mean == 1
        detach_activation_trace(handle)  # again does nothing

    def test_none_is_what_attach_gives_where_it_is_off(self) -> None:
        model = Block()
        handle = attach_activation_trace(model)
        assert handle is None
        detach_activation_trace(handle)
        detach_activation_trace(None)

    def test_the_model(self, on: Any) -> None:
        path = on()
        model = Block()
        attach_activation_trace(model)
        model(X)
        detach_activation_trace(model)
        assert is_free(model) and read(path).ended
        detach_activation_trace(model)

    def test_a_compiled_model(self, on: Any) -> None:
        on()
        model = Block()
        attach_activation_trace(torch.compile(model, backend="eager"))
        assert not is_free(model)
        detach_activation_trace(torch.compile(model, backend="eager"))
        assert is_free(model)

    def test_an_old_handle_does_not_end_a_new_trace(self, on: Any) -> None:
        on()
        model = Block()
        old = attach_activation_trace(model)
        detach_activation_trace(old)
        new = attach_activation_trace(model)
        detach_activation_trace(old)
        assert new is not None and new.attached
        detach_activation_trace(new)
        assert is_free(model)

    def test_a_trace_by_hand(self, tmp_path: Path) -> None:
        model = Block()
        detach_activation_trace(trace(model, tmp_path / "run.jsonl", weights=False))
        assert is_free(model)

    def test_anything_else_is_said(self) -> None:
        with pytest.raises(TraceError, match=r"got a str.*what attach_activation_trace returned"):
            detach_activation_trace("model")  # type: ignore[arg-type]


class TestProcessInTheName:
    """``<pid>`` in a file's name is this process's number."""

    def test_by_environment(self, on: Any, tmp_path: Path) -> None:
        on(OUTPUT=str(tmp_path / "x-<pid>.jsonl"))
        run = attach_activation_trace(Block())
        assert run is not None and run.path == tmp_path / f"x-{os.getpid()}.jsonl"
        run.close()
        assert [one.name for one in tmp_path.iterdir()] == [f"x-{os.getpid()}.jsonl"]

    def test_by_argument(self, tmp_path: Path) -> None:
        with trace(Block(), tmp_path / "<pid>" / "x-<pid>.jsonl", weights=False) as run:
            run.model(X)
        assert run.path == tmp_path / f"{os.getpid()}" / f"x-{os.getpid()}.jsonl"
        with trace_any(tmp_path / "any-<pid>.jsonl") as traced:
            Block()(X)
        assert traced.paths == [tmp_path / f"any-{os.getpid()}.jsonl"]
        assert all(path.exists() for path in traced.paths)

    def test_writers_and_sinks(self, tmp_path: Path) -> None:
        with JsonlSink(tmp_path / "a-<pid>.jsonl") as sink:
            pass
        with TraceWriter(tmp_path / "b-<pid>.jsonl", rank=1, world=2) as writer:
            pass
        assert sink.path == tmp_path / f"a-{os.getpid()}.jsonl"
        assert writer.path == tmp_path / f"b-{os.getpid()}.rank1.jsonl"

    @pytest.mark.parametrize(
        "start", [trace, lambda model, path, **given: trace_any(path, **given)]
    )
    def test_a_program_that_goes_to_another_folder(
        self, start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("safetensors")
        monkeypatch.chdir(tmp_path)
        model = Block()
        with start(model, "run.jsonl", tensors="", weights=False):
            (tmp_path / "away").mkdir()
            os.chdir("away")
            model(X)
        assert not list((tmp_path / "away").iterdir())
        found = read(tmp_path / "run.jsonl").records
        assert found
        assert all((tmp_path / str(one.file)).is_file() for one in found)

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
    def test_a_forked_child_has_its_own(self, on: Any, tmp_path: Path) -> None:
        on(OUTPUT=str(tmp_path / "x-<pid>.jsonl"))
        model = Block()
        detach_activation_trace(attach_activation_trace(model))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                detach_activation_trace(attach_activation_trace(model))
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        names = {one.name for one in tmp_path.iterdir()}
        assert names == {f"x-{os.getpid()}.jsonl", f"x-{child}.jsonl"}


def test_a_variable_leaves_the_inputs_out(on: Any) -> None:
    path = on(INPUTS="0")
    model = Block()
    run = attach_activation_trace(model)
    model(X)
    detach_activation_trace(run)
    found = read(path)
    assert {record.phase for record in found.records} == {"out"}
    assert found.header.selection["inputs"] is False
    assert Settings.parse({}).trace_inputs
    assert not Settings.parse({"POLYATTN_TRACE_INPUTS": "off"}).trace_inputs


class TestASecondRun:
    """A trace is of one run: an earlier one's file is not touched unless that is asked for."""

    def test_it_says_what_to_do(self, on: Any) -> None:
        path = on()
        path.write_text("precious\n")
        model = Block()
        with pytest.raises(TraceError) as caught:
            attach_activation_trace(model)
        said = str(caught.value)
        assert f"got the output {path}, which holds 9 bytes" in said
        for way in (
            "remove it",
            "another name",
            "<pid>",
            "POLYATTN_TRACE_OVERWRITE=1",
            "overwrite=True",
            "--overwrite",
        ):
            assert way in said, way
        assert path.read_text() == "precious\n" and is_free(model)

    def test_the_same_process_tries_the_same_name_again(self, on: Any) -> None:
        path = on()
        path.write_text("precious\n")
        model = Block()
        with pytest.raises(TraceError):
            attach_activation_trace(model)
        path.unlink()
        run = attach_activation_trace(model)  # what the message said to do
        assert run is not None and run.path == path
        detach_activation_trace(run)

    def test_a_variable_replaces_it(self, on: Any) -> None:
        path = on(OVERWRITE="1")
        path.write_text("of an earlier run\n")
        first, second = Block(), Block()
        runs = [attach_activation_trace(model) for model in (first, second)]
        for model, run in zip((first, second), runs, strict=True):
            model(X)
            detach_activation_trace(run)
        assert read(path).ended and read(path.with_name("run.Block.jsonl")).ended
        assert Settings.parse({}).trace_overwrite is False


class TestAModelAndItsPart:
    """One trace at a time, and the error says of which part it speaks."""

    def test_a_model_whose_part_is_traced(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Sequential(nn.ReLU(), Block()), nn.Tanh())
        with (
            trace(model[0][1], tmp_path / "part.jsonl", weights=False),  # type: ignore[index]
            pytest.raises(TraceError) as caught,
        ):
            trace(model, tmp_path / "run.jsonl")
        said = str(caught.value)
        assert "got a Sequential whose part '0.1', a Block, is traced" in said
        assert f"into {tmp_path / 'part.jsonl'} already" in said
        assert not (tmp_path / "run.jsonl").exists()

    def test_a_part_whose_model_is_traced(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Sequential(nn.ReLU(), Block()), nn.Tanh())
        with (
            trace(model, tmp_path / "run.jsonl", weights=False),
            pytest.raises(TraceError) as caught,
        ):
            trace(model[0][1], tmp_path / "part.jsonl")  # type: ignore[index]
        said = str(caught.value)
        assert "got a Block that is traced as '0.1', a part of a Sequential" in said
        assert f"into {tmp_path / 'run.jsonl'} already" in said

    def test_a_model_traced_twice(self, tmp_path: Path) -> None:
        model = Block()
        with (
            trace(model, tmp_path / "run.jsonl", weights=False),
            pytest.raises(TraceError) as caught,
        ):
            trace(model, tmp_path / "other.jsonl")
        assert "got a Block that is traced" in str(caught.value)
        assert "part" not in str(caught.value)

    def test_models_that_share_a_part(self, tmp_path: Path) -> None:
        shared = Block()
        one, other = nn.Sequential(shared), nn.ModuleDict({"second": shared})
        with trace(one, tmp_path / "run.jsonl", weights=False), pytest.raises(TraceError) as caught:
            trace(other, tmp_path / "other.jsonl")
        said = str(caught.value)
        assert "got a ModuleDict whose part 'second', a Block, is traced as '0'" in said

    def test_by_environment(self, on: Any) -> None:
        on()
        model = nn.Sequential(Block())
        run = attach_activation_trace(model)
        with pytest.raises(TraceError, match=r"got a Block that is traced as '0'"):
            attach_activation_trace(model[0])
        detach_activation_trace(run)

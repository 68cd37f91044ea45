"""Which modules, statistics and steps a trace records, and what it says of wrong choices."""

import json
import logging
import re
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks import trace, trace_any, trace_step
from polyattn.trace import read
from tests.trace.recorders.torch.traced_models import Block, llama, recorded, tokens

X = torch.ones(2, 8)


@pytest.mark.parametrize(
    "layers",
    [
        r"^layers\.\d$",
        re.compile(r"layers\.[01]$"),
        ["layers.1", "layers.0"],
        lambda name, module: name.startswith("layers.") and isinstance(module, Block),
    ],
)
def test_layers_are_a_pattern_names_or_a_function(tmp_path: Path, layers: object) -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(Block(), nn.Sequential(Block()))})
    model["layers"][1] = Block()
    with trace(model, tmp_path / "run.jsonl", layers=layers):
        model["layers"](X)
    found = read(tmp_path / "run.jsonl")
    names = {r.module for r in found.records}
    assert {"layers.0", "layers.1"} <= names <= {"layers.0", "layers.1"}


def test_layers_that_match_nothing_are_an_error_with_near_matches(tmp_path: Path) -> None:
    model = llama(1)
    with pytest.raises(TraceError, match=r"matches none of the 20 modules.*'model\.layers\.0"):
        trace(model, tmp_path / "run.jsonl", layers=r"model\.layer\.\d")
    with pytest.raises(TraceError, match=r"Did you mean 'model.layers.0.mlp'"):
        trace(model, tmp_path / "run.jsonl", layers=["model.layers.0.mpl"])
    with pytest.raises(TraceError, match="no name of a module"):
        trace(model, tmp_path / "run.jsonl", layers=[])
    with pytest.raises(TraceError, match="it is none: "):
        trace(model, tmp_path / "run.jsonl", layers="(")
    with pytest.raises(TraceError, match="got tensors"):
        trace(model, tmp_path / "run.jsonl", tensors="nothing")
    assert list(tmp_path.iterdir()) == []


def test_only_the_chosen_statistics_are_written(tmp_path: Path) -> None:
    stats = ["abs_mean", "shape", ("median", lambda t: t.median())]
    found = recorded(Block(), tmp_path / "run.jsonl", X, stats=stats, layers=["first"])
    line = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[1])
    assert line.keys() - {"seq", "module", "cls", "call", "step", "phase", "tensor"} == {
        "shape",
        "dtype",
        "abs_mean",
        "median",
    }
    assert found.records[0].abs_mean == 1 and found.records[0].extra == {"median": 1}
    assert found.header.selection["stats"] == ["abs_mean", "median"]


def test_a_statistic_that_fails_does_not_end_the_model(tmp_path: Path) -> None:
    found = recorded(Block(), tmp_path / "run.jsonl", X, stats=[("bad", lambda t: t.nothing)])
    assert "AttributeError" in found.records[0].errors["bad"]


def test_unknown_statistics_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Did you mean 'abs_mean'"):
        trace(Block(), tmp_path / "run.jsonl", stats=["absmean"])
    with pytest.raises(TraceError, match="a name of your own"):
        trace(Block(), tmp_path / "run.jsonl", stats=[("seq", len)])


@pytest.mark.parametrize("steps", [{1, 3}, "1,3", [1, 3]])
def test_steps(tmp_path: Path, steps: object) -> None:
    model = Block()
    with trace(model, tmp_path / "run.jsonl", steps=steps):
        model(X)
        for step in range(5):
            with trace_step(step):
                model(X)
    found = read(tmp_path / "run.jsonl")
    assert sorted({(r.step, r.call) for r in found.records}) == [(1, 2), (3, 4)]


@pytest.mark.parametrize("steps", ["", "a", "3-1", "1-2-3", [], [1.5], "1,,2", "-1"])
def test_steps_that_are_none(tmp_path: Path, steps: object) -> None:
    with pytest.raises(TraceError, match="steps"):
        trace(Block(), tmp_path / "run.jsonl", steps=steps)


def test_a_step_filter_under_which_nothing_was_recorded_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Block()
    with (
        caplog.at_level(logging.WARNING, "polyattn.trace"),
        pytest.warns(UserWarning, match=r"steps='0,5'.*none of the 3 calls.*trace_step"),
        trace(model, tmp_path / "run.jsonl", steps="0,5"),
    ):
        model(X)
    end = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["end"]
    assert end["records"] == 0 and end["left_out"] == 3 and "trace_step" in end["note"]
    assert "nothing was recorded" in caplog.text
    assert read(tmp_path / "run.jsonl").ended


def test_steps_nest_and_other_threads_see_them(tmp_path: Path) -> None:
    model = Block()
    with trace(model, tmp_path / "run.jsonl"):
        with trace_step(1):
            with trace_step(2):
                thread = threading.Thread(target=model, args=(X,))
                thread.start()
                thread.join()
            model(X)
        with pytest.raises(ZeroDivisionError), trace_step(7):
            raise ZeroDivisionError
        model(X)
    ends = [r for r in read(tmp_path / "run.jsonl").records if (r.module, r.phase) == ("", "out")]
    assert [r.step for r in ends] == [2, 1, None]


def test_a_threads_own_step_comes_first() -> None:
    from polyattn.trace.recorders.torch import current_step

    seen = []
    begun, done = threading.Event(), threading.Event()

    def other() -> None:
        with trace_step(10):
            begun.set()
            assert done.wait(60)
            seen.append(current_step())

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(60)
    seen.append(current_step())
    with trace_step(1):
        seen.append(current_step())
        done.set()
        thread.join()
    assert seen == [10, 1, 10] and current_step() is None


def test_a_step_is_an_integer() -> None:
    with pytest.raises(TraceError, match="expected an integer"), trace_step("first"):
        pass
    with trace_step(torch.tensor(3)):
        pass


def test_inputs_can_be_left_out(tmp_path: Path) -> None:
    found = recorded(llama(1), tmp_path / "run.jsonl", tokens(), inputs=False)
    assert {r.phase for r in found.records} == {"out"}


class TestOfAWholeProgram:
    """`trace_any` with options that fit some of the models, or none."""

    def test_models_without_a_match_are_left_out(self, tmp_path: Path) -> None:
        loose, fitting = nn.Sequential(nn.Linear(8, 8)), Block()
        with trace_any(tmp_path / "run.jsonl", layers="^second$") as traced:
            fitting(loose(X))
            loose(X)
        assert [path.name for path in traced.paths] == ["run.jsonl"]
        assert {r.module for r in read(traced.paths[0]).records} == {"second"}
        ((model, reason),) = traced.left_out
        assert model == "Sequential"
        assert "layers='^second$', which matches none of the 2 modules" in reason
        assert not loose._forward_hooks and not loose[0]._forward_hooks

    def test_names_and_functions_too(self, tmp_path: Path) -> None:
        for index, layers in enumerate(
            [
                ["second"],
                iter(["second"]),
                [re.compile("^second$")],
                lambda name, _: name == "second",
            ]
        ):
            with trace_any(tmp_path / f"{index}.jsonl", layers=layers) as traced:
                Block()(nn.Sequential(nn.Linear(8, 8))(X))
            assert {r.module for r in read(traced.paths[0]).records} == {"second"}
            assert [one.model for one in traced.left_out] == ["Sequential"]

    def test_no_model_matches(self, tmp_path: Path) -> None:
        ran = []
        path = tmp_path / "run.jsonl"
        with pytest.raises(TraceError) as caught, trace_any(path, layers="seconds"):
            ran.append(Block()(nn.Sequential(nn.Linear(8, 8))(X)))
            ran.append(Block()(X))
        assert len(ran) == 2
        said = str(caught.value)
        assert said == (
            "got layers='seconds', which fits no module of the 3 models that were called "
            "(Sequential, 2 of Block). Did you mean 'second'? A Sequential has '0'. A Block has "
            "'first', 'second'."
        )
        assert not list(tmp_path.iterdir())
        alone = r"none of the 3 modules of this Block\. Did you"
        with pytest.raises(TraceError, match=alone), trace_any(path, layers="seconds"):
            Block()(X)
        with trace_any(path, layers="seconds"):
            pass  # no model, and no complaint of it

    def test_the_programs_own_error_is_the_one_to_see(self, tmp_path: Path) -> None:
        with pytest.raises(ZeroDivisionError), trace_any(tmp_path / "r.jsonl", layers="none"):
            Block()(X)
            raise ZeroDivisionError

    def test_tensors_may_be_of_some_models(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        with trace_any(tmp_path / "run.jsonl", tensors="^second$") as traced:
            Block()(nn.Sequential(nn.Linear(8, 8))(X))
        first, second = map(read, traced.paths)
        assert not any(r.file for r in first.records) and len(first.records) == 4
        assert {r.module for r in second.records if r.file} == {"second"}
        path, said = tmp_path / "other.jsonl", "got tensors='third', which matches none of the 3"
        with pytest.raises(TraceError, match=said), trace_any(path, tensors="third"):
            Block()(X)
        assert len(read(path).records) == 6  # what was right is there

    def test_whole_tensors_of_a_model_without_the_layers(self, tmp_path: Path) -> None:
        pytest.importorskip("safetensors")
        with trace_any(tmp_path / "run.jsonl", layers="^second$", tensors="^0$") as traced:
            Block()(nn.Sequential(nn.Linear(8, 8))(X))
        first, second = map(read, traced.paths)
        assert {r.module for r in first.records if r.file} == {"0"} and len(first.records) == 2
        assert {r.module for r in second.records} == {"second"}

    def test_a_file_in_the_way_is_said_at_once(self, tmp_path: Path) -> None:
        (tmp_path / "run.jsonl").write_text("precious")
        with trace_any(tmp_path / "run.jsonl", layers="second"):
            nn.Sequential(nn.Linear(8, 8))(X)
            with pytest.raises(TraceError, match="holds 8 bytes"):
                Block()(X)


def test_patterns_any_of_which_fits(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Identity() for _ in range(3)))
    either = [re.compile("^0$"), re.compile("(?i)^2$")]
    with trace(model, tmp_path / "run.jsonl", layers=either):
        model(X)
    found = read(tmp_path / "run.jsonl")
    assert {r.module for r in found.records} == {"0", "2"}
    assert found.header.selection["layers"] == ["^0$", "(?i)^2$"]
    with pytest.raises(TraceError, match="got layers='3' or '4', which matches none of the 4"):
        trace(model, tmp_path / "x.jsonl", layers=[re.compile("3"), re.compile("4")])


def test_an_iterator_of_names(tmp_path: Path) -> None:
    with trace(Block(), tmp_path / "run.jsonl", layers=iter(["first"])) as run:
        run.model(X)
    assert read(run.path).header.selection["layers"] == ["first"]

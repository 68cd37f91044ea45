"""Statistics by name, `sum` among them, and of one's own, which never reach the model."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

from polyattn.errors import TraceError
from polyattn.hooks import ActivationStatHook, JsonlSink, ModuleHookManager, trace
from polyattn.trace import Record, TraceWriter, read
from polyattn.trace.recorders.torch import tensor_statistics as kernels
from tests.trace.recorders.torch.traced_models import one, recorded


def fails(t: Tensor) -> float:
    return 1 / 0


def by_hook(folder: Path, stats: Any, output: Any) -> list[dict[str, Any]]:
    """What ActivationStatHook, made as the documents make it, writes of one call."""

    class Gives(nn.Module):
        def forward(self) -> Any:
            return output

    module = Gives()
    with JsonlSink(folder / "stats.jsonl", overwrite=True) as sink:
        ModuleHookManager(module).attach("stats", ActivationStatHook("a", stats, sink, None))
        assert module() is output
    return [json.loads(line) for line in (folder / "stats.jsonl").read_text().splitlines()]


class TestTheDocumentsHook:
    """``ActivationStatHook(module_name, [(name, function)], sink, step_filter)``."""

    def test_pairs_of_the_formats_own_names(self, tmp_path: Path) -> None:
        t = torch.tensor([[1.0, -3.0]])
        stats = [
            ("abs_mean", lambda t: t.float().abs().mean().item()),
            ("sum", lambda t: t.sum()),
            ("max", lambda t: t.max().item()),
            ("shape", lambda t: list(t.shape)),
            ("dtype", lambda t: str(t.dtype)),
        ]
        (found,) = by_hook(tmp_path, stats, t)
        assert (found["abs_mean"], found["sum"], found["max"]) == (2, -2, 1)
        assert (found["shape"], found["dtype"]) == ([1, 2], "float32")
        assert found["module"] == "a" and "errors" not in found

    def test_names(self, tmp_path: Path) -> None:
        (found,) = by_hook(tmp_path, ["abs_mean", "sum"], torch.tensor([1.0, -3.0]))
        assert (found["abs_mean"], found["sum"]) == (2, -2) and "max" not in found

    def test_an_error_is_written_and_stays_there(self, tmp_path: Path) -> None:
        (found,) = by_hook(tmp_path, [("f", fails), ("abs_mean", fails), "max"], torch.ones(2))
        said = "ZeroDivisionError: division by zero"
        assert found["errors"] == {"f": said, "abs_mean": said}
        assert found["max"] == 1 and "f" not in found and "abs_mean" not in found

    @pytest.mark.parametrize(
        "value",
        [object(), 1 + 2j, torch.tensor(1j), torch.ones(2, device="meta"), 10**5000, "x" * 100_000],
        ids=["object", "complex", "complex tensor", "meta", "huge integer", "long text"],
    )
    def test_a_value_that_no_line_can_have_is_an_error_too(
        self, tmp_path: Path, value: Any
    ) -> None:
        first, second = by_hook(tmp_path, [("f", lambda t: value)], [torch.ones(1), torch.ones(2)])
        assert first["errors"].keys() == second["errors"].keys() == {"f"}

    def test_a_number_of_the_format_is_a_number(self, tmp_path: Path) -> None:
        stats = [("max", lambda t: t), ("mean", lambda t: math.nan), ("shape", lambda t: [7])]
        (found,) = by_hook(tmp_path, stats, torch.ones(3))
        assert found["errors"].keys() == {"max", "shape"} and "max" not in found
        assert found["shape"] == [3] and found["mean"] is None

    def test_an_unreadable_tensor_reaches_no_model(self, tmp_path: Path) -> None:
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
        sparse = torch.eye(3).to_sparse()
        found = by_hook(tmp_path, ["max", ("f", fails)], (nested, sparse, torch.ones(1)))
        assert [one["tensor"] for one in found] == ["out[0]", "out[1]", "out[2]"]
        assert found[0]["shape"] == [3, 3] and found[0]["max"] == 1
        assert "sparse" in found[1]["note"] and "max" not in found[1]
        assert found[2]["max"] == 1


class TestTheModelGoesOn:
    """A statistic that raises is an entry of the record, in whole models as well."""

    @pytest.fixture(params=["native", "python"])
    def lines(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
        if request.param == "python":
            monkeypatch.setattr(kernels, "native_module", lambda: None)
        return request.param

    def test_errors_of_a_record(self, tmp_path: Path, lines: str) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        x = torch.ones(1, 2)
        expected = model(x)
        stats = ["l2", ("f", fails), ("g", lambda t: t.numel()), ("h", lambda t: object())]
        with trace(model, tmp_path / "run.jsonl", stats=stats):
            assert model(x).equal(expected)
        found = read(tmp_path / "run.jsonl")
        assert found.ended and not found.notes and len(found.records) == 6
        for record in found.records:
            assert record.errors.keys() == {"f", "h"} and record.extra["g"] == 2
            assert record.errors["f"] == "ZeroDivisionError: division by zero"
            assert record.l2 is not None and record.max is None
            assert Record.__eq__(record, record) and record.to_dict()["errors"] == record.errors

    def test_pairs_take_the_place_of_the_formats_own(self, tmp_path: Path, lines: str) -> None:
        model = nn.ReLU()
        stats = ["min", ("max", lambda t: t.max() * 0 + 7)]
        found = recorded(model, tmp_path / "run.jsonl", torch.ones(2), stats=stats)
        assert [(r.min, r.max, r.mean) for r in found.records] == [(1, 7, None)] * 2

    def test_interrupts_are_no_errors_of_a_statistic(self, tmp_path: Path) -> None:
        def interrupts(t: Tensor) -> None:
            raise KeyboardInterrupt

        model = nn.ReLU()
        run = trace(model, tmp_path / "run.jsonl", stats=[("f", interrupts)])
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1))
        run.close()


class TestSum:
    """`sum` is written where it is named: the mean and the counts say it otherwise."""

    @pytest.mark.parametrize("lines", ["native", "python"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
    def test_it_is_the_sum_of_the_finite_elements(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, dtype: torch.dtype
    ) -> None:
        if lines == "python":
            monkeypatch.setattr(kernels, "native_module", lambda: None)
        t = (torch.randn(300, 70) * 50 + 3).to(dtype)
        if dtype.is_floating_point:
            t[0, 0], t[1, 1] = math.nan, math.inf
        found = one(
            recorded(nn.Identity(), tmp_path / "run.jsonl", t, stats=["abs_mean", "sum"]), "", "in"
        )
        finite = t.double()[t.double().isfinite()]
        scale = finite.abs().sum().item()
        assert found.sum == pytest.approx(finite.sum().item(), abs=2e-6 * scale)
        assert found.abs_mean == pytest.approx(scale / finite.numel(), rel=2e-6)
        assert found.mean is None

    def test_it_is_left_out_where_it_is_not_named(self, tmp_path: Path) -> None:
        found = recorded(nn.Identity(), tmp_path / "run.jsonl", torch.ones(2))
        assert found.records[0].sum is None and found.records[0].mean == 1
        assert "sum" not in found.header.selection["stats"]

    def test_nothing_finite_and_nothing_at_all(self, tmp_path: Path) -> None:
        for t in (torch.full((3,), math.nan), torch.ones(0)):
            found = recorded(nn.Identity(), tmp_path / "run.jsonl", t, stats=["sum"])
            assert found.records[0].sum is None

    def test_ranks_add_up(self, tmp_path: Path) -> None:
        whole = np.arange(12.0).reshape(4, 3)
        for rank in range(2):
            with TraceWriter(tmp_path / "run.jsonl", rank=rank, world=2) as writer:
                part = whole[2 * rank : 2 * rank + 2]
                writer.add(
                    "a",
                    "out",
                    "out",
                    part,
                    global_shape=(4, 3),
                    start=(2 * rank, 0),
                    sum=float(part.sum()),
                )
        (found,) = read(tmp_path / "run.rank*.jsonl").records
        assert found.shape == (4, 3) and found.sum == 66 and found.mean == 5.5


@pytest.mark.parametrize(
    ("stats", "said"),
    [
        (["total"], "got the statistic 'total', expected some of"),
        ([("sketch", len)], "'sketch'.*a name of your own"),
        ([("seq", len)], "'seq'.*a name of your own"),
        ([("n", len)], "'n'.*a name of your own"),
        ([("errors", len)], "'errors'.*a name of your own"),
        (["max", ("max", len)], "'max' twice"),
        ([("f", len), ("f", max)], "'f' twice"),
        ([("f",)], "a name of your own"),
        ([("f", 3)], "a name of your own"),
    ],
)
def test_statistics_that_cannot_be_are_refused_at_once(
    tmp_path: Path, stats: Any, said: str
) -> None:
    with pytest.raises(TraceError, match=said):
        trace(nn.ReLU(), tmp_path / "nowhere.jsonl", stats=stats)
    assert not list(tmp_path.iterdir())

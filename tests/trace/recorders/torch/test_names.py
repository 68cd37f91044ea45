"""Whatever a file, a module or an argument is called: what is recorded can be read."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch import nn

from polyattn.cli.trace_kept import kept
from polyattn.errors import TraceError
from polyattn.hooks import trace, trace_any
from polyattn.trace import read
from polyattn.trace.format.output import tensor_folder
from tests.trace.recorders.torch.traced_models import recorded

X = torch.ones(1, 4)
LONG = "m" * 5000


@pytest.mark.parametrize(
    "name", ["run-2026-11-28T14:30:00", "a\\b", "tab\there", "wide\u3000space", "half\udc80"]
)
def test_whole_tensors_beside_a_file_of_any_name(tmp_path: Path, name: str) -> None:
    pytest.importorskip("safetensors")
    found = recorded(nn.Linear(4, 4), tmp_path / f"{name}.jsonl", X, tensors="")
    files = [found.file_of(record) for record in found.records]
    assert len(files) == 2 and all(file is not None and file.is_file() for file in files)
    assert kept([tmp_path / f"{name}.jsonl"]).tensors == 2


def test_names_that_are_safe_are_kept_and_others_stay_apart() -> None:
    assert tensor_folder(Path("x", "run_1.ä b.jsonl")) == Path("x", "run_1.ä b.tensors")
    names = ["14:30.jsonl", "14_30.jsonl", "14\\30.jsonl"]
    assert len({tensor_folder(Path(name)) for name in names}) == 3


def test_parts_that_were_called_first_beside_a_file_with_a_colon(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    path = tmp_path / "14:30.jsonl"
    with torch.no_grad(), trace_any(path, tensors=".*"):
        model[0](X)
        model(X)
    found = read(path)
    assert [r.module for r in found.records][:3] == ["0", "0", ""]
    assert all(r.file and (tmp_path / r.file).is_file() for r in found.records)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, tensor_folder(path).name}


class Takes(nn.Module):
    """Returns what it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs


def test_long_names_of_arguments_are_shortened(tmp_path: Path) -> None:
    Pair = NamedTuple("Pair", [("n" * 5000, Any), ("y", Any)])  # type: ignore[misc]
    with torch.no_grad(), trace(Takes(), tmp_path / "run.jsonl") as run:
        run.model(**{LONG: X})
        run.model(Pair(X, X))
    found = [r for r in read(tmp_path / "run.jsonl").records if r.phase == "in"]
    assert [r.tensor[:9] for r in found] == ["kwargs.mm", "args[0].n", "args[0].y"]
    assert max(len(r.tensor) for r in found) < 500


def long_module() -> nn.Module:
    return nn.ModuleDict({LONG: nn.Linear(4, 4)})


def long_parameter() -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_parameter(LONG, nn.Parameter(torch.ones(2)))
    return model


def long_class() -> nn.Module:
    return type(LONG, (nn.Identity,), {})()


@pytest.mark.parametrize("make", [long_module, long_parameter, long_class])
def test_a_model_with_a_name_that_no_trace_can_have(tmp_path: Path, make: Any) -> None:
    what = make.__name__.removeprefix("long_")
    with pytest.raises(TraceError, match=f"a {what} of this .* characters .*at most 4096: rename"):
        trace(make(), tmp_path / "run.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_statistic_with_a_name_that_no_trace_can_have(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="of at most 4096 characters"):
        trace(nn.Linear(4, 4), tmp_path / "run.jsonl", stats=[(LONG, lambda t: 1 / 0)])

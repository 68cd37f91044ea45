"""What a model returns and nobody compared: no verdict, or a note where only a part is left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np
from torch import nn

from polyattn.cli import main
from polyattn.hooks import assert_same_activations, trace
from polyattn.trace import TraceWriter, read
from polyattn.trace.compare import Verdict, compare

End = Callable[[Any], Any]


class Model(nn.Module):
    """A layer, and what is returned of what it gives."""

    def __init__(self, end: End) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.end = nn.Linear(8, 8), end

    def forward(self, x: Any) -> Any:
        return self.end(self.linear(x))


def verdict_of(ours: End, theirs: End) -> Verdict:
    try:
        return assert_same_activations(Model(ours), Model(theirs), torch.ones(4, 8))
    except AssertionError as error:
        return error.verdict  # type: ignore[attr-defined, no-any-return]


def normal(mean: Any) -> Any:
    return torch.distributions.Normal(mean, 1.0, validate_args=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        (lambda y: y, lambda y: None, "out in the reference, nothing in the port"),
        (lambda y: None, lambda y: y, "nothing in the reference, out in the port"),
        (lambda y: [y], lambda y: [], "out[0] in the reference, nothing in the port"),
        (lambda y: y.to_sparse(), lambda y: (2 * y).to_sparse(), "torch.sparse_coo)"),
        (normal, lambda y: normal(2 * y), "a Normal that cannot be read (TypeError: no tensor)"),
        (lambda y: y.numpy(), lambda y: 2 * y.numpy(), "a ndarray that cannot be read"),
        (lambda y: "right", lambda y: "wrong", "a str that cannot be read"),
        (lambda y: y.flatten().tolist(), lambda y: [0.0] * 32, "a list that cannot be read"),
        (lambda y: ["right"] * 20, lambda y: ["wrong"] * 20, "out (a list that cannot be read"),
        (lambda y: 2**70, lambda y: 2**71, "a int that cannot be read"),
        (
            lambda y: {"logits": y, "hidden": -y},
            lambda y: {"out": 5 * y, "state": 7 * y},
            "out.logits, out.hidden in the reference, out.out, out.state in the port",
        ),
    ],
)
def test_no_output_was_compared(ours: End, theirs: End, said: str) -> None:
    verdict = verdict_of(ours, theirs)
    assert verdict.equal is None and verdict.exit_code == 2
    (reason,) = verdict.reasons
    assert reason.startswith("what the model returns could not be compared: ") and said in reason
    assert "have both return dense tensors under the same names" in reason
    assert verdict.guards["outputs"].holds is False
    assert not any("each module was fed" in note for note in verdict.notes)  # it would not help


def test_a_model_that_returns_nothing_is_the_same() -> None:
    verdict = verdict_of(lambda y: None, lambda y: None)
    assert verdict.equal is True and verdict.guards["outputs"].holds is True


@pytest.mark.parametrize("end", [lambda y: float(y.sum()), lambda y: int(y.sum() * 1e6), bool])
def test_numbers_are_compared(end: End) -> None:
    def number(y: Any) -> Any:
        return end(y.sum().abs())

    assert verdict_of(number, number).equal is True
    verdict = verdict_of(number, lambda y: type(number(y))(0))
    assert verdict.culprit is not None and verdict.culprit.module == ""


def test_a_part_that_was_not_compared_is_a_note() -> None:
    verdict = verdict_of(lambda y: (y, normal(y)), lambda y: (y, normal(y), -y))
    assert verdict.equal is True, str(verdict)
    (note,) = (note for note in verdict.notes if "not compared" in note)
    assert note == (
        "of what the model returns not compared: out[1] (a Normal that cannot be read "
        "(TypeError: no tensor)), out[2] of the port"
    )
    many = verdict_of(lambda y: [*range(20), y], lambda y: [*range(20), 2 * y])
    assert many.equal is False  # a tensor among many numbers is looked for
    whole = verdict_of(lambda y: (y, -y), lambda y: (y, -y))
    assert not any("not compared" in note for note in whole.notes)


def test_what_is_no_tensor_has_a_record(tmp_path: Path) -> None:
    model = Model(lambda y: {"y": y, "p": normal(y), "n": (2, 0.5, True, None)})
    with torch.no_grad(), trace(model, tmp_path / "run.jsonl"):
        model(torch.ones(4, 8))
    run = read(tmp_path / "run.jsonl")
    found = {r.tensor: r for r in run.records if r.module == "" and r.phase == "out"}
    kinds = {name: (one.shape, one.dtype, one.sum or one.max) for name, one in found.items()}
    assert kinds.pop("out.y")[:2] == ((4, 8), "float32")
    assert kinds == {
        "out.n[0]": ((), "int64", 2),
        "out.n[1]": ((), "float64", 0.5),
        "out.n[2]": ((), "bool", 1),
        "out.p": ((0,), "unknown", None),
    }
    assert "no tensor" in found["out.p"].extra["note"]


def test_two_files(tmp_path: Path) -> None:
    """Without a torch model: each call of the models themselves has to be compared."""
    x = np.linspace(0, 1, 32, dtype=np.float32)
    for name, steps in (("a", 2), ("b", 1)):
        with TraceWriter(tmp_path / f"{name}.jsonl") as writer:
            for step in range(2):
                writer.add("", "in", "args[0]", x, cls="M")
                writer.add("up", "in", "args[0]", x, cls="Up")
                writer.add("up", "out", "out", 2 * x, cls="Up")
                if step < steps:
                    writer.add("", "out", "out", 2 * x, cls="M")
    paths = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    verdict = compare(*paths)
    assert verdict.equal is None and "nothing in the port" in verdict.reasons[0]
    assert main(["trace", "diff", *paths]) == 2
    assert compare(paths[0], paths[0]).equal is True


def test_a_difference_inside_is_named_all_the_same() -> None:
    class Off(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x) * 2

    reference, port = Model(lambda y: y), Model(lambda y: None)
    port.linear.__class__ = Off
    with pytest.raises(AssertionError, match="the output of 'linear'") as caught:
        assert_same_activations(reference, port, torch.ones(4, 8))
    assert "outputs: what the model returns could not be compared" in str(caught.value)

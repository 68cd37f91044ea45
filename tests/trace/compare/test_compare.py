"""compare: guards, steps, calls, gradients, NaN, low precision, what it says and returns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn.errors import TraceError
from polyattn.trace import TraceWriter
from polyattn.trace.compare import Verdict, compare
from tests.trace.compare import models
from tests.trace.compare.faults import FAULTS
from tests.trace.compare.models import F32, Transformer, ids, trace

Write = Callable[[TraceWriter], Any]
RNG = np.random.default_rng(0)
X, Y, Z = (RNG.standard_normal((4, 32)).astype(F32) for _ in range(3))


def fault(name: str) -> Any:
    return next(one for one in FAULTS if one.name == name).seed


def two(tmp_path: Path, a: Write, b: Write, **given: Any) -> Verdict:
    for name, write in (("a", a), ("b", b)):
        with TraceWriter(tmp_path / f"{name}.jsonl", overwrite=True) as writer:
            write(writer)
    return compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl", **given)


def chain(*values: Any, names: str = "uvw", **more: Any) -> Write:
    """Modules in a row, each fed what the one before it gave; the first value is the input."""

    def write(writer: TraceWriter) -> None:
        for name, given, made in zip(names, values, values[1:], strict=False):
            writer.add(name, "in", "args[0]", given, cls="M", **more)
            writer.add(name, "out", "out", made, cls="M", **more)

    return write


def test_nothing_in_common(tmp_path: Path) -> None:
    verdict = two(tmp_path, chain(X, Y, names="u"), chain(X.T, Z[:2], names="k"))
    assert verdict.exit_code == 2 and verdict.culprit is None
    assert "no module in common" in verdict.reasons[0] and "rules" in verdict.reasons[0]
    verdict = two(tmp_path, chain(X, Y), lambda writer: None)
    assert verdict.exit_code == 2 and "holds no module" in verdict.reasons[0]
    assert "cannot say" in str(verdict)


def test_steps_that_do_not_meet(tmp_path: Path) -> None:
    verdict = two(tmp_path, chain(X, Y, step=1), chain(X, Y, step=2))
    assert verdict.exit_code == 2
    assert "no step in common" in verdict.reasons[0] and "steps=" in verdict.reasons[0]
    verdict = two(tmp_path, chain(X, Y, step=1), chain(X, Y))
    assert verdict.equal is True  # one side has none: by the order of calls
    assert verdict.guards["steps"].holds is None


def test_other_inputs_are_not_a_fault(tmp_path: Path) -> None:
    verdict = two(tmp_path, chain(X, Y, Z), chain(Y, Z, X))
    assert verdict.exit_code == 2 and verdict.guards["inputs"].holds is False
    assert "same inputs" in verdict.reasons[0]
    model = trace(Transformer(layers=1), tmp_path / "a.jsonl")
    other = trace(Transformer(layers=1), tmp_path / "b.jsonl", ids(seed=9))
    verdict = compare(model, other)
    assert verdict.equal is None and verdict.guards["inputs"].holds is False


def test_code_around_the_model(tmp_path: Path) -> None:
    """The first step agrees, the second is fed something else: the program's own doing."""
    given = ids()
    a = trace(Transformer(layers=1), tmp_path / "a.jsonl", given)
    b = trace(Transformer(layers=1), tmp_path / "b.jsonl", [given[0], given[1][::-1].copy()])
    verdict = compare(a, b)
    assert verdict.culprit is not None and verdict.exit_code == 1
    assert (verdict.culprit.module, verdict.culprit.kind, verdict.culprit.step) == ("", "input", 1)


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    trace(Transformer(layers=1), tmp_path / "a.jsonl")
    whole = (tmp_path / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "b.jsonl").write_text("".join(whole[:20]))
    verdict = compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert verdict.exit_code == 2 and "did not end" in verdict.reasons[0]


def test_calls_beyond_the_counterparts(tmp_path: Path) -> None:
    def twice(writer: TraceWriter) -> None:
        chain(X, Y)(writer)
        chain(X, Y)(writer)

    verdict = two(tmp_path, chain(X, Y), twice)
    assert verdict.equal is True and any("ran 2 times" in note for note in verdict.notes)
    assert [row.verdict for row in verdict.rows] == ["same", "extra"]


def test_rows_and_errors(tmp_path: Path) -> None:
    verdict = two(tmp_path, chain(X, Y, Z, X), chain(X, Y, Z * F32(1.1), X * F32(1.1)))
    rows = {row.module: row for row in verdict.rows}
    assert [row.verdict for row in verdict.rows] == ["same", "culprit", "inherited"]
    assert rows["v"].error_in == 0 and rows["v"].contributed == pytest.approx(0.1, rel=1e-3)
    assert rows["w"].inherited == pytest.approx(0.1, rel=1e-3)
    assert rows["w"].contributed == pytest.approx(0, abs=1e-3)
    culprit = verdict.culprit
    assert culprit is not None and culprit.after is None and culprit.tensor == "out"
    assert culprit.error == pytest.approx(0.1, rel=1e-3) and culprit.threshold < 1e-4
    assert "common factor" in culprit.evidence


def test_the_text_and_the_data(tmp_path: Path) -> None:
    a = trace(Transformer(), tmp_path / "a.jsonl")
    model = Transformer()
    fault("swapped_heads")(model.blocks[1])
    verdict = compare(a, trace(model, tmp_path / "b.jsonl"))
    lines = str(verdict).splitlines()
    assert lines[0].startswith("different: the code of 'blocks.1.attn' itself")
    assert "blocks.1.attn.o" in lines[0] and "after 'blocks.1.attn.core'" in str(verdict)
    assert "the same values in another order" in str(verdict)
    assert len(lines) < 50 and any(line.startswith("...") and "inherited" in line for line in lines)
    data = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert data["culprit"]["module"] == "blocks.1.attn" and data["exit_code"] == 1
    assert len(data["rows"]) == len(verdict.rows) and data["equal"] is False


def test_another_shape_is_data_too(tmp_path: Path) -> None:
    verdict = two(tmp_path, chain(X, Y), chain(X, Y[:2]))
    assert verdict.culprit is not None and "shape [2, 32]" in verdict.culprit.evidence
    assert verdict.to_dict()["culprit"]["error"] == "infinity"
    json.dumps(verdict.to_dict(), allow_nan=False)


def test_reference_of_nan(tmp_path: Path) -> None:
    verdict = two(tmp_path, chain(X, Y * np.nan, Z), chain(X, Y, Z))
    assert verdict.exit_code == 2 and "NaN" in verdict.reasons[0]
    verdict = two(tmp_path, chain(X, Y, Z), chain(X, Y * np.nan, Z))
    assert verdict.culprit is not None and verdict.culprit.module == "u"
    holes = np.where(Y > 2, np.nan, Y).astype(F32)
    assert two(tmp_path, chain(X, holes), chain(X, holes)).equal is True


def test_layouts_and_interfaces(tmp_path: Path) -> None:
    """Another shape, a tuple around, keywords for arguments, weights of attention left out."""

    def a(writer: TraceWriter) -> None:
        writer.add("u", "in", "args[0]", X)
        writer.add("u", "in", "args[1]", np.ones((4, 4), bool))
        writer.add("u", "out", "out[0]", Y)
        writer.add("u", "out", "out[1]", Z)

    def b(writer: TraceWriter) -> None:
        writer.add("u", "in", "kwargs.mask", np.zeros((1, 4, 4), F32))
        writer.add("u", "in", "kwargs.hidden_states", X.reshape(2, 2, 32))
        writer.add("u", "out", "out", Y.reshape(2, 2, 32))

    verdict = two(tmp_path, a, b)
    assert verdict.equal is True and verdict.rows[0].error_out == 0


def test_masks_of_either_kind(tmp_path: Path) -> None:
    mask = np.triu(np.ones((4, 4), bool), 1)
    minus, huge = (np.where(mask, F32(low), F32(0)) for low in (-np.inf, np.finfo(F32).min))
    off = np.where(np.triu(np.ones((4, 4), bool), 2), F32(-np.inf), F32(0))

    def write(one: Any) -> Write:
        def into(writer: TraceWriter) -> None:
            chain(X, Y, names="t")(writer)
            writer.add("u", "in", "args[0]", Y)
            writer.add("u", "in", "args[1]", one)
            writer.add("u", "out", "out", Z)

        return into

    assert two(tmp_path, write(minus), write(huge)).equal is True
    verdict = two(tmp_path, write(minus), write(off))
    assert verdict.culprit is not None and verdict.culprit.tensor == "args[1]"


def test_integers_are_exact(tmp_path: Path) -> None:
    tokens = np.arange(1000)
    other = tokens.copy()
    other[17] += 1
    assert two(tmp_path, chain(X, tokens), chain(X, tokens)).equal is True
    assert two(tmp_path, chain(X, tokens), chain(X, other)).exit_code == 1


def test_low_precision_is_not_decided_in_the_grey_zone(tmp_path: Path) -> None:
    noise = (1 + 1e-3 * RNG.standard_normal(Y.shape)).astype(np.float16)
    half = [one.astype(np.float16) for one in (X, Y, Z)]
    noisy = [half[0], half[1] * noise, half[2] * noise]
    assert two(tmp_path, chain(*half), chain(*half)).equal is True
    verdict = two(tmp_path, chain(*half), chain(*noisy))
    assert verdict.exit_code == 2 and "isolate" in verdict.reasons[0]
    wrong = [half[0], half[1] * noise, half[2] * np.float16(1.3)]
    verdict = two(tmp_path, chain(*half), chain(*wrong))
    assert verdict.culprit is not None and verdict.culprit.module == "v"


def test_isolated_modules_are_decided_in_low_precision(tmp_path: Path) -> None:
    half = [one.astype(np.float16) for one in (X, Y, Z)]
    rounded = [half[0], half[1], np.nextafter(half[2], np.float16(9))]
    off = [half[0], half[1] * np.float16(1.01), half[2]]
    assert two(tmp_path, chain(*half), chain(*rounded), isolated=True).equal is True
    verdict = two(tmp_path, chain(*half), chain(*off), isolated=True)
    assert verdict.culprit is not None and verdict.culprit.module == "u"


def test_a_port_in_lower_precision(tmp_path: Path) -> None:
    half = [one.astype(np.float16).astype(F32) for one in (X, Y, Z)]
    low = [X.astype(np.float16), Y.astype(np.float16), Z.astype(np.float16)]
    verdict = two(tmp_path, chain(*half), chain(*low))
    assert verdict.equal is True and verdict.guards["dtypes"].holds is False
    assert "float16" in verdict.guards["dtypes"].said


def test_errors_that_only_grow(tmp_path: Path) -> None:
    """Each module triples the error that it is given: none of them is to blame."""
    values, noisy = [X], [X]
    direction = RNG.standard_normal(X.shape).astype(F32)
    for at in range(5):
        values.append(Y + at)
        noisy.append((Y + at + direction * 4e-7 * 3.0**at).astype(F32))
    verdict = two(tmp_path, chain(*values, names="uvwxy"), chain(*noisy, names="uvwxy"))
    assert verdict.culprit is None and verdict.equal is not False


def test_determinism(tmp_path: Path) -> None:
    def runs(name: str, *values: Any) -> Path:
        with TraceWriter(tmp_path / name, overwrite=True) as writer:
            chain(X, *values)(writer)
        return tmp_path / name

    a, b = runs("a", Y, Z), runs("b", Y, Z + F32(1e-4))
    again, dropout = runs("c", Y, Z + F32(2e-4)), runs("d", Y, Z * (RNG.random(Z.shape) > 0.5))
    assert compare(a, b).exit_code == 1
    steady = compare(a, b, reruns={"a": runs("e", Y, Z)})
    assert steady.exit_code == 1 and steady.guards["determinism"].holds is True
    noisy = compare(a, b, reruns={"a": [again]})
    assert noisy.equal is True and noisy.guards["determinism"].holds is False
    verdict = compare(a, b, reruns={"b": dropout})
    assert verdict.exit_code == 2 and "dropout" in verdict.reasons[0]
    with pytest.raises(TraceError, match="'a' or 'b'"):
        compare(a, b, reruns={"c": again})


def test_flags_and_their_differences(tmp_path: Path) -> None:
    from polyattn.flags import make

    a = trace(Transformer(layers=1), tmp_path / "a.jsonl", flags=make("torch", {"x": True}, {}))
    b = trace(Transformer(layers=1), tmp_path / "b.jsonl", flags=make("torch", {"x": False}, {}))
    verdict = compare(a, b)
    assert verdict.equal is True and verdict.guards["flags"].holds is False
    assert "x: True and False" in verdict.guards["flags"].said
    assert "x: True and False" in str(verdict)


@pytest.mark.parametrize(
    ("seeds", "holds", "said"),
    [
        ((None, None), True, ""),
        ((0, None), False, "the reference was recorded with --perturb 0; the port with the"),
        ((None, 3), False, "as they are; the port was recorded with --perturb 3"),
        ((1, 3), False, "the reference was recorded with --perturb 1; the port was"),
        ((3, 3), True, "both were recorded with perturbed weights, --perturb 3"),
    ],
)  # fmt: skip
def test_perturbed_weights_are_a_condition(
    tmp_path: Path, seeds: Any, holds: bool, said: str
) -> None:
    from polyattn.report.verdict import page

    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, seed in zip(paths, seeds, strict=True):
        trace(Transformer(layers=1), path, selection={} if seed is None else {"perturb": seed})
    verdict = compare(*paths)
    guard = verdict.guards["perturbation"]
    assert verdict.equal is True and guard.holds is holds and said in guard.said
    assert ("--perturb" in str(verdict)) is bool(said) and said in str(verdict)
    assert said in page(verdict)
    assert verdict.to_dict()["guards"]["perturbation"]["said"] == guard.said


def test_tolerance(tmp_path: Path) -> None:
    a, b = chain(X, Y, Z), chain(X, Y, Z * F32(1.001))
    assert two(tmp_path, a, b).exit_code == 1
    assert two(tmp_path, a, b, tolerance=1e-2).equal is True
    assert two(tmp_path, a, b, tolerance={"^v$": 1e-2}).equal is True
    verdict = two(tmp_path, a, b, tolerance={"^nothing": 1e-2})
    assert verdict.exit_code == 1 and any("fits no module" in note for note in verdict.notes)
    for wrong in (-1.0, float("nan"), {"(": 1.0}, {"v": "x"}, True):
        with pytest.raises(TraceError):
            two(tmp_path, a, b, tolerance=wrong)


def backward(writer: TraceWriter, *gradients: Any) -> None:
    chain(X, Y, Z)(writer)
    for name, above, below in zip("vu", gradients, gradients[1:], strict=False):
        writer.add(name, "grad_out", "out", above, cls="M")
        writer.add(name, "grad_in", "args[0]", below, cls="M")


def test_gradients_in_reverse_order(tmp_path: Path) -> None:
    off = F32(1.01)
    verdict = two(
        tmp_path, lambda w: backward(w, X, Y, Z), lambda w: backward(w, X, Y * off, Z * off)
    )
    culprit = verdict.culprit
    assert culprit is not None and (culprit.module, culprit.phase) == ("v", "grad_in")
    verdict = two(tmp_path, lambda w: backward(w, X, Y, Z), lambda w: backward(w, X, Y, Z * off))
    assert verdict.culprit is not None and verdict.culprit.module == "u"
    assert [r.phase for r in verdict.rows] == ["forward", "forward", "backward", "backward"]


def test_a_module_that_changes_its_input(tmp_path: Path) -> None:
    """Records hold what was seen before the call; the parent that hands it on is named."""

    def write(factor: float) -> Write:
        def into(writer: TraceWriter) -> None:
            writer.add("", "in", "args[0]", X)
            chain(X, Y, names="u")(writer)
            chain(X * F32(factor), Z, names="v")(writer)
            writer.add("", "out", "out", Z)

        return into

    verdict = two(tmp_path, write(1.0), write(2.0))
    culprit = verdict.culprit
    assert culprit is not None and (culprit.module, culprit.kind) == ("", "input")
    assert culprit.after == "u" and culprit.at == "v"


def test_an_extra_module_that_is_wrong_is_named(tmp_path: Path) -> None:
    def write(extra: bool) -> Write:
        def into(writer: TraceWriter) -> None:
            writer.add("", "in", "args[0]", X)
            chain(X, Y, names="u")(writer)
            between = Y * F32(2) if extra else Y
            if extra:
                writer.add("scale", "in", "args[0]", Y, cls="Scale")
                writer.add("scale", "out", "out", between, cls="Scale")
            chain(between, Z, names="v")(writer)
            writer.add("", "out", "out", Z)

        return into

    verdict = two(tmp_path, write(False), write(True))
    culprit = verdict.culprit
    assert culprit is not None and culprit.module == "scale" and culprit.reference_module is None
    assert [r.verdict for r in verdict.rows if r.module == "scale"] == ["culprit"]


def test_outputs_only(tmp_path: Path) -> None:
    """Without inputs and without the root: calls inside each other are told by their names."""

    def write(factor: float) -> Write:
        def into(writer: TraceWriter) -> None:
            writer.add("b.u", "out", "out", X)
            writer.add("b.v", "out", "out", Y * F32(factor))
            writer.add("b", "out", "out", Z * F32(factor))

        return into

    verdict = two(tmp_path, write(1.0), write(1.5))
    assert verdict.culprit is not None and verdict.culprit.module == "b.v"
    assert "not recorded" in verdict.culprit.evidence
    assert [row.depth for row in verdict.rows] == [0, 1, 1]


def test_without_sketches(tmp_path: Path) -> None:
    """Only a few statistics were asked for: what they tell counts, and no more."""

    def write(value: Any) -> Write:
        def into(writer: TraceWriter) -> None:
            few = {"shape": [4, 32], "dtype": "float32", "abs_mean": float(np.abs(value).mean())}
            writer.add("u", "in", "args[0]", {**few, "abs_mean": 1.0, "l2": 1.0})
            writer.add("u", "out", "out", {**few, "l2": float(np.linalg.norm(value))})

        return into

    assert two(tmp_path, write(Y), write(Y[::-1])).equal is True
    assert two(tmp_path, write(Y), write(Y * 1.01)).exit_code == 1
    bare = {"shape": [4, 32], "dtype": "float32"}
    verdict = two(tmp_path, *[lambda w: w.add("u", "out", "out", bare)] * 2)
    assert verdict.exit_code == 2 and "sketch" in verdict.reasons[0]


def test_bad_files(tmp_path: Path) -> None:
    good = trace(Transformer(layers=1), tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{}\n")
    with pytest.raises(TraceError, match=r"line 1"):
        compare(good, tmp_path / "b.jsonl")


def test_a_long_run_is_compared_in_seconds(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(models, "CHUNKS", 2)
    a = trace(Transformer(layers=2), tmp_path / "a.jsonl", ids() * 10)
    verdict = compare(a, trace(Transformer(layers=2), tmp_path / "b.jsonl", ids() * 10))
    assert verdict.equal is True and len(str(verdict).splitlines()) < 80


def test_modules_around_the_culprit_differ_in_later_calls_because_of_it(tmp_path: Path) -> None:
    def model(factor: float) -> Write:
        def write(writer: TraceWriter) -> None:
            for step in range(3):
                given, made = X + step, (Y + step) * (factor if step else 1)
                writer.add("block", "in", "args[0]", given, cls="B", step=step)
                writer.add("block.mlp", "in", "args[0]", given, cls="M", step=step)
                writer.add("block.mlp", "out", "out", made, cls="M", step=step)
                writer.add("block", "out", "out", made + Z, cls="B", step=step)

        return write

    verdict = two(tmp_path, model(1.0), model(1.5))
    assert verdict.culprit is not None and verdict.culprit.module == "block.mlp"
    assert verdict.culprit.others == ()

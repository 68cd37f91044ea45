"""Comparing isolated runs: what was fed, what was not, and what that says of the thresholds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from polyattn.errors import TraceError
from polyattn.trace import Trace, TraceWriter, read
from polyattn.trace.compare import Verdict, compare
from polyattn.trace.compare.counterparts import counterparts
from polyattn.trace.compare.drift import drifts
from polyattn.trace.compare.frames import frames_of
from polyattn.trace.format.isolated import mark_isolated

RNG = np.random.default_rng(0)
X, Y, Z = (RNG.standard_normal((16, 64)).astype(np.float16) for _ in range(3))
EPS = np.float16(2.0**-10)


def chain(path: Path, values: list[np.ndarray], names: str = "uvw") -> Trace:
    """Modules one after the other inside "m": each returns the next value."""
    with TraceWriter(path) as trace:
        trace.add("m", "in", "args[0]", values[0], cls="M")
        for name, given, made in zip(names, values, values[1:], strict=False):
            trace.add(f"m.{name}", "in", "args[0]", given, cls=f"Of{name}")
            trace.add(f"m.{name}", "out", "out", made, cls=f"Of{name}")
        trace.add("m", "out", "out", values[-1], cls="M")
    return read(path)


def fed(tmp_path: Path, trace: Trace, where: set[tuple[str, str]], **marks: object) -> Path:
    """The trace as of an isolated run, in which these modules' phases were fed."""

    def said(record: object) -> dict[str, bool]:
        assert isinstance(record, dict)
        at = (record["module"], record["phase"])
        form = at in marks.get("form", ())  # type: ignore[operator]
        return {name: True for name, is_so in (("forced", at in where), ("form", form)) if is_so}

    target = tmp_path / f"isolated{len(list(tmp_path.iterdir()))}.jsonl"
    return mark_isolated(Path(trace.paths[0]), target, said, {})


ALL = {(name, phase) for name in ("m", "m.u", "m.v", "m.w") for phase in ("in", "out")}


def noisy(value: np.ndarray, eps: float) -> np.ndarray:
    return (value * (1 + eps * RNG.standard_normal(value.shape))).astype(np.float16)


def verdict(tmp_path: Path, port: list[np.ndarray], where: set[tuple[str, str]]) -> Verdict:
    reference = chain(tmp_path / "a.jsonl", [X, Y, Z, X])
    return compare(reference, fed(tmp_path, chain(tmp_path / "b.jsonl", port), where))


def test_marks_are_read_and_written_back(tmp_path: Path) -> None:
    path = fed(tmp_path, chain(tmp_path / "a.jsonl", [X, Y, Z, X]), {("m.u", "out")})
    trace = read(path)
    assert [r.module for r in trace.records if r.forced] == ["m.u"]
    assert trace.header.selection["isolated"] is True and trace.ended
    assert next(r for r in trace.records if r.forced).to_dict()["forced"] is True
    with pytest.raises(TraceError, match="holds"):
        mark_isolated(Path(trace.paths[0]), path, lambda _: {}, {})
    with pytest.raises(TraceError, match="cannot be written"):
        mark_isolated(path, tmp_path / "no" / "where.jsonl", lambda _: {}, {})


def test_a_mark_that_is_none_is_refused(tmp_path: Path) -> None:
    chain(tmp_path / "a.jsonl", [X, Y])
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace('{"seq":0,', '{"forced":3,"seq":0,'))
    with pytest.raises(TraceError, match="forced"):
        read(tmp_path / "a.jsonl")


def test_drift_counts_what_was_not_fed(tmp_path: Path) -> None:
    reference = chain(tmp_path / "a.jsonl", [X, Y, Z, X])
    port = [noisy(one, 1e-2) for one in (X, Y, Z, X)]
    free = chain(tmp_path / "b.jsonl", port)

    def drift(where: set[tuple[str, str]]) -> dict[tuple[str, bool], int]:
        frames = frames_of(read(fed(tmp_path, free, where)).records)
        found = drifts(frames, reference.records)
        return {(frame.module, out): n for (frame, out), n in found.items()}

    assert set(drift(ALL).values()) == {0}
    some = drift(ALL - {("m.v", "out")})
    assert some["m.v", True] == 0 and some["m.w", False] == 1  # v's rounding is in what w gets
    assert some["m.w", True] == 0 and some["m", True] == 1
    none = drift(set())
    assert none["m", False] == 0 < none["m.u", True] < none["m.v", True] < none["m.w", True]


def test_one_rounding_is_none_and_two_spacings_are_a_fault(tmp_path: Path) -> None:
    rounded = [X, noisy(Y, EPS / 3), noisy(Z, EPS / 3), noisy(X, EPS / 3)]
    assert verdict(tmp_path, rounded, ALL).equal is True


@pytest.mark.parametrize("at", [1, 2, 3])
def test_each_differing_module_is_named(tmp_path: Path, at: int) -> None:
    port = [X, Y, Z, X]
    port[at] = noisy(port[at], 4 * EPS)
    found = verdict(tmp_path, port, ALL)
    assert found.culprit is not None and found.culprit.module == f"m.{'uvw'[at - 1]}"
    # the next module's input, and m's output, are that very value: somebody's own doing, in a run
    # whose records are made by hand
    assert {row.verdict for row in found.rows} <= {"culprit", "differs", "same"}


def test_what_was_not_fed_is_inherited_and_less_sure(tmp_path: Path) -> None:
    where = {("m", "in"), ("m", "out")}
    little = [X, noisy(Y, 2 * EPS), noisy(Z, 2 * EPS), noisy(X, 2 * EPS)]
    assert verdict(tmp_path, little, where).equal is not True
    reference = chain(tmp_path / "c.jsonl", [X, Y, Z, X])
    gross = [X, Y, noisy(Z, 0.5), noisy(X, 0.5)]
    path = fed(tmp_path, chain(tmp_path / "d.jsonl", gross), where)
    found = compare(reference, path)
    assert found.culprit is not None and found.culprit.module == "m.v"
    assert found.culprit.others == ()
    assert {r.module: r.verdict for r in found.rows}["m.w"] == "inherited"


def test_what_differs_in_form_only_is_left_alone(tmp_path: Path) -> None:
    reference = chain(tmp_path / "a.jsonl", [X, Y, Z, X])
    port = chain(tmp_path / "b.jsonl", [X, Y, noisy(Z, 0.5), X])
    marks = {("m.v", "out"), ("m.w", "in")}
    where = ALL - marks
    assert compare(reference, fed(tmp_path, port, where)).equal is False
    found = compare(reference, fed(tmp_path, port, where, form=marks))
    assert found.equal is True and any("form only" in note for note in found.notes)


def test_counterparts_leave_out_what_has_another_form(tmp_path: Path) -> None:
    """A module of another class that hands on its sum with the residual, and is right."""
    for path, made, cls in (("a", Y, "Attention"), ("b", Y + X, "AttentionWithResidual")):
        with TraceWriter(tmp_path / f"{path}.jsonl") as trace:
            trace.add("", "in", "args[0]", X, cls="M")
            trace.add("attn", "in", "args[0]", X, cls=cls)
            trace.add("attn", "out", "out", made, cls=cls)
            trace.add("norm", "in", "args[0]", X + Y, cls="Norm")
            trace.add("norm", "out", "out", Z, cls="Norm")
            trace.add("", "out", "out", Z, cls="M")
    found = counterparts(read(tmp_path / "a.jsonl"), read(tmp_path / "b.jsonl"))
    assert ("attn", 0, "out", "out") in found.forms
    assert ("attn", 0, "out", "out") not in found.records
    assert ("norm", 0, "out", "out") in found.records


def test_counterparts_need_the_same_shape_and_kind(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.jsonl") as trace:
        trace.add("x", "in", "args[0]", X, cls="X")
        trace.add("x", "in", "args[1]", np.arange(4), cls="X")
        trace.add("x", "out", "out", Y, cls="X")
    with TraceWriter(tmp_path / "b.jsonl") as trace:
        trace.add("x", "in", "args[0]", X[None], cls="X")
        trace.add("x", "in", "args[1]", np.arange(4) + 1, cls="X")
        trace.add("x", "out", "out", Y.T.copy(), cls="X")
    found = counterparts(read(tmp_path / "a.jsonl"), read(tmp_path / "b.jsonl")).records
    assert {key[2:] for key in found} == {("in", "args[0]"), ("in", "args[1]")}

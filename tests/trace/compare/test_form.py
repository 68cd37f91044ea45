"""What differs in form only, and what only seems so: what runs later may be independent of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn.trace import TraceWriter
from polyattn.trace.compare import Verdict, compare
from tests.trace.compare.models import F32

RNG = np.random.default_rng(0)
X, CONTEXT, RIGHT, WRONG, OUT, OFF, KEYS, GATE, SCALE, OTHER = (
    RNG.standard_normal((4, 32)).astype(F32) for _ in range(10)
)


def two(tmp_path: Path, write: Callable[[TraceWriter, bool], None]) -> Verdict:
    for name, wrong in (("a", False), ("b", True)):
        with TraceWriter(tmp_path / f"{name}.jsonl") as writer:
            write(writer, wrong)
    return compare(tmp_path / "a.jsonl", tmp_path / "b.jsonl")


def add(writer: TraceWriter, module: str, given: Any, *made: Any, cls: str = "M") -> None:
    """A call of a module without others inside."""
    writer.add(module, "in", "args[0]", given, cls=cls)
    for at, one in enumerate(made):
        writer.add(module, "out", "out" if len(made) == 1 else f"out[{at}]", one, cls=cls)


def test_a_later_module_that_is_fed_what_was_there_before_shows_nothing(tmp_path: Path) -> None:
    """The activation is of another class and wrong; the keys of the context are right as ever."""

    def write(writer: TraceWriter, wrong: bool) -> None:
        add(writer, "context", X, CONTEXT)
        add(writer, "act", OUT, WRONG if wrong else RIGHT, cls="SiLU" if wrong else "GELU")
        add(writer, "down", WRONG if wrong else RIGHT, OFF if wrong else KEYS)
        add(writer, "keys", CONTEXT, GATE)

    verdict = two(tmp_path, write)
    assert verdict.culprit is not None and verdict.culprit.module == "act", str(verdict)


def test_another_tower_shows_nothing(tmp_path: Path) -> None:
    """What surrounds the activation is off, so nothing was healed, whatever runs beside it."""

    def write(writer: TraceWriter, wrong: bool) -> None:
        writer.add("", "in", "args[0]", X, cls="Two")
        writer.add("vision", "in", "args[0]", X, cls="Tower")
        add(writer, "vision.act", OUT, WRONG if wrong else RIGHT, cls="SiLU" if wrong else "GELU")
        writer.add("vision", "out", "out", OFF if wrong else KEYS, cls="Tower")
        add(writer, "text", CONTEXT, GATE, cls="Tower")
        writer.add("", "out", "out", OFF if wrong else KEYS, cls="Two")

    verdict = two(tmp_path, write)
    assert verdict.culprit is not None and verdict.culprit.module == "vision.act", str(verdict)


@pytest.mark.parametrize("far", [1.0, 8.0])
def test_a_first_output_that_is_wrong_is_no_form(far: float, tmp_path: Path) -> None:
    """Of several outputs of the very same class, of which a further one may be furthest off."""

    def write(writer: TraceWriter, wrong: bool) -> None:
        add(writer, "start", X, CONTEXT)
        made = (WRONG, GATE + far * SCALE) if wrong else (RIGHT, GATE)
        add(writer, "norm", CONTEXT, *made, cls="Ada")
        add(writer, "next", KEYS, OTHER)

    verdict = two(tmp_path, write)
    assert verdict.culprit is not None and verdict.culprit.module == "norm", str(verdict)


def test_a_module_that_is_called_once_more_is_not_to_blame(tmp_path: Path) -> None:
    """Its own call agrees; that it is called again is its caller's doing."""

    def write(writer: TraceWriter, wrong: bool) -> None:
        writer.add("block", "in", "args[0]", X, cls="Block")
        add(writer, "block.norm", X, RIGHT, cls="Norm")
        if wrong:
            add(writer, "block.norm", RIGHT, WRONG, cls="Norm")
        add(writer, "block.mlp", WRONG if wrong else RIGHT, OFF if wrong else OUT)
        writer.add("block", "out", "out", OFF if wrong else OUT, cls="Block")

    verdict = two(tmp_path, write)
    assert verdict.culprit is not None and verdict.culprit.module == "block", str(verdict)
    assert verdict.culprit.kind == "input" and verdict.culprit.at == "block.mlp"


def test_a_branch_beside_it_shows_nothing(tmp_path: Path) -> None:
    """Of an embedder's branches the one with the activation is off; the other computes on."""

    def write(writer: TraceWriter, wrong: bool) -> None:
        writer.add("embed", "in", "args[0]", X, cls="Embed")
        writer.add("embed", "in", "args[1]", CONTEXT, cls="Embed")
        add(writer, "embed.time", X, OUT)
        add(writer, "embed.act", OUT, WRONG if wrong else RIGHT, cls="SiLU" if wrong else "GELU")
        add(writer, "embed.proj", WRONG if wrong else RIGHT, OFF if wrong else KEYS)
        add(writer, "embed.text", CONTEXT, GATE)
        add(writer, "embed.text2", GATE, SCALE)
        for at, one in enumerate((OUT, OFF if wrong else KEYS, SCALE)):
            writer.add("embed", "out", f"out[{at}]", one, cls="Embed")

    verdict = two(tmp_path, write)
    assert verdict.culprit is not None and verdict.culprit.module == "embed.act", str(verdict)


def _masked(writer: TraceWriter, handed: tuple[bool, bool], right: bool) -> None:
    """A layer with attention in it, each given a mask or not."""
    writer.add("layer", "in", "args[0]", X, cls="Layer")
    if handed[0]:
        writer.add("layer", "in", "kwargs.mask", CONTEXT, cls="Layer")
    writer.add("layer.attn", "in", "args[0]", X, cls="Attention")
    if handed[1]:
        writer.add("layer.attn", "in", "kwargs.mask", CONTEXT, cls="Attention")
    writer.add("layer.attn", "out", "out", RIGHT if right else WRONG, cls="Attention")
    writer.add("layer", "out", "out", OUT if right else OFF, cls="Layer")


def test_a_tensor_that_is_not_handed_on_is_its_holders_fault(tmp_path: Path) -> None:
    verdict = two(tmp_path, lambda w, wrong: _masked(w, (True, not wrong), not wrong))
    culprit = verdict.culprit
    assert culprit is not None and (culprit.module, culprit.kind) == ("layer", "input")
    assert (culprit.at, culprit.tensor) == ("layer.attn", "kwargs.mask")
    assert "not handed on" in culprit.evidence


def test_another_interface_is_nobodys_fault(tmp_path: Path) -> None:
    """Where nobody is given a mask, as by another kernel, the module that is wrong is named."""
    verdict = two(tmp_path, lambda w, wrong: _masked(w, (not wrong, not wrong), not wrong))
    assert verdict.culprit is not None and verdict.culprit.module == "layer.attn"


def test_what_is_not_handed_on_and_not_needed_is_no_difference(tmp_path: Path) -> None:
    verdict = two(tmp_path, lambda w, wrong: _masked(w, (True, not wrong), True))
    assert verdict.equal is True, str(verdict)


def test_what_the_very_next_module_is_given_wrongly_is_no_form(tmp_path: Path) -> None:
    """Later ones agree, of tensors that nobody saw made; but one was handed the difference."""

    def write(writer: TraceWriter, wrong: bool) -> None:
        add(writer, "time", X, OUT)
        add(writer, "act", OUT, WRONG if wrong else RIGHT, cls="SiLU" if wrong else "GELU")
        add(writer, "proj", WRONG if wrong else RIGHT, OFF if wrong else KEYS)
        add(writer, "patches", CONTEXT.T.copy(), SCALE)

    verdict = two(tmp_path, write)
    assert verdict.culprit is not None and verdict.culprit.module == "act", str(verdict)

"""What a model chooses by rounded numbers, a router its experts and a detector its proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn.trace import TraceWriter
from polyattn.trace.compare import Verdict, compare

RNG = np.random.default_rng(0)
X, Y, LOGITS, MADE = (RNG.standard_normal((16, 8)).astype(np.float16) for _ in range(4))
ROUNDED = (1 + 1e-3 * RNG.standard_normal(Y.shape)).astype(np.float16)
CHOSEN = LOGITS.argmax(-1)
OTHERS = np.where(np.arange(16) == 3, (CHOSEN + 1) % 8, CHOSEN)


def run(path: Path, dtype: Any, hidden: Any, logits: Any, chosen: Any, made: Any) -> Path:
    """A router over what a norm gave, and the expert that it chose."""
    kinds = (one.astype(dtype) for one in (X, hidden, logits, made))
    given, hidden, logits, made = kinds
    sent = hidden[: len(chosen)][chosen == 0]
    with TraceWriter(path, overwrite=True) as trace:
        trace.add("m", "in", "args[0]", given, cls="M")
        trace.add("m.norm", "in", "args[0]", given, cls="Norm")
        trace.add("m.norm", "out", "out", hidden, cls="Norm")
        trace.add("m.gate", "in", "args[0]", hidden, cls="Gate")
        trace.add("m.gate", "out", "out[0]", logits, cls="Gate")
        trace.add("m.gate", "out", "out[1]", chosen, cls="Gate")
        trace.add("m.experts", "in", "args[0]", hidden, cls="Experts")
        trace.add("m.experts", "in", "args[1]", chosen, cls="Experts")
        trace.add("m.experts.0", "in", "args[0]", sent, cls="Expert")
        trace.add("m.experts.0", "out", "out", sent, cls="Expert")
        trace.add("m.experts", "out", "out", made, cls="Experts")
        trace.add("m", "out", "out", made, cls="M")
    return path


def verdict(tmp_path: Path, *port: Any, dtype: Any = np.float16, **given: Any) -> Verdict:
    reference = run(tmp_path / "a.jsonl", dtype, Y, LOGITS, CHOSEN, MADE)
    return compare(reference, run(tmp_path / "b.jsonl", dtype, *port), **given)


def test_a_choice_that_rounding_may_have_made_is_not_decided(tmp_path: Path) -> None:
    found = verdict(tmp_path, Y * ROUNDED, LOGITS * ROUNDED, OTHERS, MADE[::-1])
    assert found.equal is None and found.culprit is None and "isolate" in found.reasons[0]
    assert "'m.gate': rounding may decide which integers or booleans" in " ".join(found.notes)


@pytest.mark.parametrize("given", [{}, {"isolated": True}])
def test_another_choice_of_the_same_numbers_is_a_fault(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    found = verdict(tmp_path, Y, LOGITS, OTHERS, MADE[::-1], **given)
    assert found.culprit is not None and found.culprit.module == "m.gate"


def test_a_router_whose_own_numbers_are_off_is_a_fault(tmp_path: Path) -> None:
    found = verdict(tmp_path, Y * ROUNDED, LOGITS[::-1], OTHERS, MADE[::-1])
    assert found.culprit is not None and found.culprit.module == "m.gate"


def test_another_number_of_choices_is_a_fault(tmp_path: Path) -> None:
    found = verdict(tmp_path, Y * ROUNDED, LOGITS * ROUNDED, CHOSEN[:8], MADE[::-1])
    assert found.culprit is not None and found.culprit.module == "m.gate"


def test_in_float32_rounding_decides_no_choice(tmp_path: Path) -> None:
    tiny = Y.astype(np.float32) * np.float32(1 + 1e-6)
    found = verdict(tmp_path, tiny, LOGITS, OTHERS, MADE[::-1], dtype=np.float32)
    assert found.culprit is not None and found.culprit.module == "m.gate"


ROWS = RNG.standard_normal((64, 8)).astype(np.float32)
SCORES = np.arange(64, dtype=np.float32)
SWAPPED = ROWS[[*range(20), 21, 20, *range(22, 64)]]


def detector(path: Path, scores: Any, proposals: Any) -> Path:
    """A decoder that is given the best proposals, in the order of their scores."""
    with TraceWriter(path, overwrite=True) as trace:
        trace.add("m", "in", "args[0]", ROWS, cls="M")
        trace.add("m.score", "in", "args[0]", ROWS, cls="Score")
        trace.add("m.score", "out", "out", scores, cls="Score")
        trace.add("m.decoder", "in", "args[0]", proposals, cls="Decoder")
        trace.add("m.decoder", "out", "out", 2 * proposals, cls="Decoder")
        trace.add("m", "out", "out", 2 * proposals, cls="M")
    return path


def detected(tmp_path: Path, scores: Any, proposals: Any) -> Verdict:
    reference = detector(tmp_path / "a.jsonl", SCORES, ROWS)
    return compare(reference, detector(tmp_path / "b.jsonl", scores, proposals))


def test_an_order_that_rounding_may_have_made_is_not_decided(tmp_path: Path) -> None:
    found = detected(tmp_path, SCORES * np.float32(1 + 1e-6), SWAPPED)
    assert found.equal is None and found.culprit is None and "isolate" in found.reasons[0]
    assert "'m.decoder': rounding may decide in which order" in " ".join(found.notes)


def test_another_order_by_the_same_scores_is_a_fault(tmp_path: Path) -> None:
    found = detected(tmp_path, SCORES, SWAPPED)
    assert found.culprit is not None and (found.culprit.module, found.culprit.kind) == (
        "m",
        "input",
    )


def test_nearly_all_in_other_places_is_a_fault(tmp_path: Path) -> None:
    turned = np.ascontiguousarray(ROWS.reshape(8, 8, 8).swapaxes(0, 1)).reshape(64, 8)
    found = detected(tmp_path, SCORES * np.float32(1 + 1e-6), turned)
    assert found.culprit is not None and (found.culprit.module, found.culprit.kind) == (
        "m",
        "input",
    )
    assert "another order" in found.culprit.evidence

"""Padded tokens that see no key: right kernels differ there, and the report says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyattn.trace import TraceWriter
from polyattn.trace.compare import Verdict, compare

RNG = np.random.default_rng(0)
X, Y, Z = (RNG.standard_normal((2, 6, 8)).astype(np.float32) for _ in range(3))
SEEN = np.ones((2, 6), np.int64)
LEFT = np.where(np.arange(6) < [[0], [2]], 0, SEEN)
PAIRS = (np.tri(6, dtype=bool) & LEFT.astype(bool)[:, None])[:, None]
ADDED = np.where(PAIRS, np.float32(0), np.finfo(np.float32).min)
EMPTIED = np.where(LEFT[..., None] == 1, Y, 0)


def run(path: Path, tokens: Any, mask: Any, made: Any, out: Any, name: str) -> Path:
    with TraceWriter(path, overwrite=True) as trace:
        trace.add("", "in", "kwargs.hidden", X, cls="Model")
        trace.add("", "in", name, tokens, cls="Model")
        trace.add("attn", "in", "args[0]", X, cls="Attention")
        if mask is not None:
            trace.add("attn", "in", "args[1]", mask, cls="Attention")
        trace.add("attn", "out", "out", made, cls="Attention")
        trace.add("mlp", "in", "args[0]", made, cls="MLP")
        trace.add("mlp", "out", "out", out, cls="MLP")
        trace.add("", "out", "out", out, cls="Model")
    return path


def verdict(tmp_path: Path, port: tuple[Any, Any], tokens: Any, mask: Any, name: str) -> Verdict:
    reference = run(tmp_path / "a.jsonl", tokens, mask, Y, Z, name)
    theirs = mask if mask is None else PAIRS
    return compare(reference, run(tmp_path / "b.jsonl", tokens, theirs, *port, name))


@pytest.mark.parametrize("mask", [ADDED, PAIRS], ids=["added", "boolean"])
@pytest.mark.parametrize("name", ["kwargs.attention_mask", "args[1]"])
def test_a_padded_batch_is_named_where_attention_differs(
    tmp_path: Path, mask: Any, name: str
) -> None:
    found = verdict(tmp_path, (EMPTIED, Z * 2), LEFT, mask, name)
    assert found.culprit is not None and found.culprit.module == "attn"
    said = [note for note in found.notes if "sees no key" in note]
    assert len(said) == 1 and f"{name} hides 2 of 12 tokens" in said[0]
    assert "without padding" in said[0] and said[0] in str(found)


def test_the_mask_may_be_given_on_one_side_only(tmp_path: Path) -> None:
    """The other makes its own, as a value that is no tensor."""
    name = "kwargs.attention_mask"
    eager = run(tmp_path / "a.jsonl", LEFT, ADDED, Y, Z, name)
    own = run(tmp_path / "b.jsonl", LEFT, None, EMPTIED, Z * 2, name)
    for pair in ((eager, own), (own, eager)):
        assert "a query that sees no key" in " ".join(compare(*pair).notes)


@pytest.mark.parametrize(
    ("port", "tokens", "mask", "name"),
    [
        ((EMPTIED, Z), SEEN, ADDED, "kwargs.attention_mask"),  # no padding
        ((Y, Z * 2), LEFT, ADDED, "kwargs.attention_mask"),  # no attention is blamed
        ((EMPTIED, Z), LEFT, None, "kwargs.attention_mask"),  # which is given no mask
        ((EMPTIED, Z), LEFT, ADDED, "kwargs.token_type_ids"),
        ((EMPTIED, Z), LEFT * 3, ADDED, "args[1]"),
        ((Y, Z), LEFT, ADDED, "kwargs.attention_mask"),  # the same
    ],
)
def test_nothing_is_said_of_padding_elsewhere(
    tmp_path: Path, port: tuple[Any, Any], tokens: Any, mask: Any, name: str
) -> None:
    assert "sees no key" not in str(verdict(tmp_path, port, tokens, mask, name))


def test_inputs_of_another_shape_are_named_with_both(tmp_path: Path) -> None:
    reference = run(tmp_path / "a.jsonl", SEEN, None, Y, Z, "args[1]")
    with TraceWriter(tmp_path / "b.jsonl") as trace:
        trace.add("", "in", "kwargs.hidden", X[:1], cls="Model")
        trace.add("", "out", "out", Z[:1], cls="Model")
    found = compare(reference, tmp_path / "b.jsonl")
    assert found.equal is None
    assert "differs already (shape [1, 6, 8], expected [2, 6, 8])" in found.reasons[0]

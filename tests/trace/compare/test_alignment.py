"""Which module is which: names, rules, weights (whole, turned, fused, tied), contents, place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from polyattn.errors import TraceError
from polyattn.trace import Trace
from polyattn.trace.compare import compare
from polyattn.trace.compare.alignment import Alignment, align
from polyattn.trace.compare.rules import parse
from polyattn.trace.compare.side import Side
from polyattn.trace.fingerprints import fingerprint
from tests.trace.compare.models import GELU, Dropout, Linear, Module, Transformer, matrix, trace
from tests.trace.compare.ports import PORTS, Port, renamed


def port_named(name: str) -> Port:
    return next(port for port in PORTS if port.name == name)


def aligned(tmp_path: Path, port: Port, rules: object = None) -> Alignment:
    model = Transformer(layers=2)
    a = trace(Transformer(layers=2), tmp_path / "a.jsonl")
    port.change(model)
    b = trace(model, tmp_path / "b.jsonl", rename=port.rename, weights=port.weights)
    return align(Side(a, "reference"), Side(b, "port"), parse(rules))


@pytest.mark.parametrize("name", [port.name for port in PORTS])
def test_no_module_is_taken_for_another(name: str, tmp_path: Path) -> None:
    port = port_named(name)
    found = aligned(tmp_path, port)
    for match in found.matches.values():
        expected = port.rename(match.a.name)
        inside = match.b.name.replace(".inner", "")
        moved = match.a.name.endswith("norm1") and "residual" in name
        assert inside == expected or moved, (match.a.name, match.b.name, match.how)


def test_weights_tell_names(tmp_path: Path) -> None:
    found = aligned(tmp_path, port_named("renamed"))
    assert len(found.matches) == len(dict(Transformer(layers=2).modules())) == 36
    hows = [match.how for match in found.matches.values()]
    assert hows.count("weights") == 2 * 9 + 3 and "name" in hows  # the root


def test_fused_weights_are_found(tmp_path: Path) -> None:
    found = aligned(tmp_path, port_named("fused qkv, renamed"))
    parts = {(one.part, one.whole, one.start, one.stop, one.count) for one in found.fused}
    for layer in range(2):
        for at, name in enumerate("qkv"):
            whole = f"model.layers.{layer}.self_attn.c_attn.weight"
            assert (f"blocks.{layer}.attn.{name}.weight", whole, at, at + 1, 3) in parts
    assert {(one.dim, one.whole_side) for one in found.fused} == {(1, "b")}


def test_split_weights_and_grouped_heads(tmp_path: Path) -> None:
    """The reference has the fused one, of 4 query heads to each key head."""
    rng = np.random.default_rng(0)
    whole = matrix(rng, 96, 16)
    parts = {"q": whole[:64], "k": whole[64:80], "v": whole[80:]}
    headers = ({"att.qkv.weight": whole}, {f"a.{n}.weight": one for n, one in parts.items()})
    sides = []
    for at, header in enumerate(headers):
        path = tmp_path / f"{at}.jsonl"
        weights = {name: fingerprint(one) for name, one in header.items()}
        made = trace(Linear(matrix(rng, 4, 4)), path, [matrix(rng, 2, 4)])
        sides.append(Side(_with(made, weights), str(at)))
    found = align(*sides)
    assert {(f.part[2], f.start, f.stop, f.count) for f in found.fused} == {
        ("q", 0, 2, 3),
        ("k", 4, 5, 6),
        ("v", 5, 6, 6),
    }


def _with(made: Trace, weights: dict[str, object]) -> Trace:
    from dataclasses import replace

    return replace(made, header=replace(made.header, weights=weights))


def test_tied_weights_are_told_apart_by_class(tmp_path: Path) -> None:
    made = []
    for name, rename in (("a", str), ("b", renamed)):
        model = Transformer(layers=1)
        model.head.weight = model.embed.weight
        made.append(trace(model, tmp_path / f"{name}.jsonl", rename=rename))
    found = align(*(Side(one, "") for one in made))
    assert found.matches["lm_head"].a.name == "head"
    assert found.matches["model.embed_tokens"].a.name == "embed"
    assert any("2 modules" in note for note in found.notes)
    assert compare(*made).equal is True


def test_weights_rounded_by_the_port(tmp_path: Path) -> None:
    model = Transformer(layers=1)
    a = trace(Transformer(layers=1), tmp_path / "a.jsonl")
    for _, module in model.modules():
        if hasattr(module, "weight"):
            module.weight = module.weight.astype(np.float16)
    b = trace(model, tmp_path / "b.jsonl", rename=renamed)
    found = align(Side(a, ""), Side(b, ""))
    assert found.matches["model.layers.0.self_attn.k_proj"].a.name == "blocks.0.attn.k"
    assert compare(a, b).guards["weights"].holds is True


def test_rules_in_either_direction(tmp_path: Path) -> None:
    port = Port("x", rename=lambda name: name.replace("blocks", "stack"), weights=False)
    for rules in ({r"^blocks\.(\d+)": r"stack.\1"}, [[r"^stack\b", "blocks"]]):
        found = aligned(tmp_path, port, rules)
        assert found.matches["stack.1.attn.q"].how == "rule" and not found.notes
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"^blocks": "stack", "^heads$": "x", "^norm$": "none"}))
    notes = aligned(tmp_path, port, path).notes
    assert len(notes) == 2
    assert "matches no module" in notes[0] and "'none'" in notes[1]


def test_rules_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("3")
    for wrong in ([["("]], [["(", "x"]], [["a", r"\1"]], {"a": 3}, tmp_path / "r.json", "none"):
        with pytest.raises(TraceError, match="got the rule"):
            parse(wrong)


def test_the_same_number_may_be_another_module(tmp_path: Path) -> None:
    """A Dropout in a sequence moves the numbers of what follows."""
    rng = np.random.default_rng(0)

    class Sequential(Module):
        def forward(self, x):
            for module in self.net:
                x = module(x)
            return x

    first, second, given = matrix(rng, 8, 8), matrix(rng, 8, 8), [matrix(rng, 4, 8)]
    made = []
    for extra in (False, True):
        model = Sequential()
        model.net = [Linear(first), *([Dropout()] * extra), GELU(), Linear(second)]
        made.append(trace(model, tmp_path / f"{extra}.jsonl", given))
    found = align(Side(made[0], ""), Side(made[1], ""))
    names = {match.a.name: name for name, match in found.matches.items()}
    assert names == {"": "", "net.0": "net.0", "net.1": "net.2", "net.2": "net.3"}
    assert compare(*made).equal is True


def test_fingerprints_that_are_none(tmp_path: Path) -> None:
    """Whatever a file holds in their place is left out, and said."""
    a = trace(Transformer(layers=1), tmp_path / "a.jsonl")
    good = a.header.weights["head.weight"]
    for bad in (
        {},
        {"shape": 3, "dtype": "float32"},
        {**good, "sum2": -1.0},
        {**good, "slices": {"0": 3}},
        {**good, "slices": {"x": {"y": "z"}}},
        {**good, "sketch": "x"},
        {**good, "n": -1},
        {**good, "slices": {"0": {"5": "AAAA"}}},
        {**good, "dtype": 7},
        {**good, "shape": [[1]]},
    ):
        weights = {**a.header.weights, "head.weight": bad, "fused.weight": bad}
        for pair in ((a, _with(a, weights)), (_with(a, weights), a)):
            verdict = compare(*pair)
            assert verdict.culprit is None or verdict.culprit.module == "head"

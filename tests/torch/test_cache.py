"""One key, one table: what a choice rests on, and nothing that is kept for ever."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyattn import Causal, DenseBias, record_selections, use_backend
from polyattn.selection import scopes
from polyattn.torch import (
    attention,
    cache,
    paged_attention,
    quantize_kv,
    quantized_attention,
    traced,
)
from polyattn.torch import scaled_dot_product_attention as sdpa
from polyattn.torch.cache import Key, table

Q = torch.randn(1, 8, 2, 16)


@pytest.fixture(autouse=True)
def empty_table() -> None:
    scopes.invalidate()


def test_every_way_in_looks_in_the_one_table() -> None:
    for _ in range(2):  # loading a backend for the first time may empty the table
        attention(Q, Q, Q)
        sdpa(Q, Q, Q)
        paged_attention(Q, Q, Q, torch.zeros(1, 1).int(), torch.tensor([8]))
        codes, scales = quantize_kv(Q)
        quantized_attention(Q, codes, codes, scales, scales, block_size=64)
    assert {key.door for key in table.rows} == {"attention", "sdpa", "paged", "quantized"}
    assert all(type(key) is Key for key in table.rows)


def test_every_option_of_the_call_is_in_the_key() -> None:
    taken = set(inspect.signature(attention).parameters) - {"query", "key", "value"}
    assert taken <= set(Key._fields)


def test_the_plainest_call_is_known_by_name_not_by_place() -> None:
    attention(Q, Q, Q)
    (plain,) = table.rows
    assert plain.is_plainest
    for field, value in (
        ("mask", "Causal()"),
        ("bias", "x"),
        ("scale", 1.0),
        ("softcap", 1.0),
        ("sinks", "x"),
        ("dropout_p", 0.5),
        ("return_lse", True),
        ("deterministic", False),
        ("backend", "flex"),
        ("around", ("flex", None, None)),
        ("switches", (True, False, True, True)),
        ("layer", frozenset()),
        ("cast", torch.float16),
        ("pages", 1),
        ("door", "sdpa"),
        ("noted", 1),
    ):
        assert not plain._replace(**{field: value}).is_plainest, field


def test_a_key_is_made_at_most_once_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Key] = []
    kept = Key.of.__func__

    def of(cls: type[Key], *arguments: object) -> Key:
        made.append(kept(cls, *arguments))
        return made[-1]

    monkeypatch.setattr(Key, "of", classmethod(of))
    bias = DenseBias(torch.zeros(8, 8))
    attention(Q, Q, Q, mask=Causal(), bias=bias)
    assert len(made) == 1
    attention(Q, Q, Q, mask=Causal(), bias=bias)
    assert len(made) <= 2  # what is remembered of recent calls may spare it


def test_the_table_is_emptied_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_MOST_ENTRIES", 10)
    for length in range(1, 40):
        x = torch.randn(1, length, 1, 4)
        attention(x, x, x)
        assert sum(len(e) for row in table.rows.values() for e in row.by_shapes.values()) <= 10
    x = torch.randn(1, 3, 1, 4)
    assert torch.equal(attention(x, x, x), attention(x, x, x, backend="sdpa_flash"))


def test_many_lengths_are_remembered_at_once() -> None:
    inputs = [torch.randn(1, length, 1, 4) for length in range(1, 60)]
    for x in inputs:
        attention(x, x, x)
    (key,) = table.rows
    entries = dict(table.rows[key].by_shapes)
    for x in inputs:  # a second pass makes none anew
        attention(x, x, x)
    assert table.rows[key].by_shapes == entries


def test_plans_of_compiled_code_end_with_their_epoch() -> None:
    for _ in range(3):
        torch._dynamo.reset()
        compiled = torch.compile(attention, fullgraph=True, backend="eager")
        for length in (3, 5):
            x = torch.randn(1, length, 1, 4)
            compiled(x, x, x)
        assert len(traced._plans) <= 4  # of this epoch and of the last
        scopes.invalidate()
    assert not traced._names


def test_compiled_code_records_after_the_epoch_has_ended() -> None:
    compiled = torch.compile(lambda x: attention(x, x, x), fullgraph=True, backend="eager")
    with record_selections() as ran:
        compiled(Q)
        scopes.invalidate()
        compiled(Q)
    assert [s.backend for s in ran] == ["sdpa_flash"] * 2


def test_nested_tensors_are_for_torch_and_never_end_the_process() -> None:
    parts = [torch.randn(2, 5, 8), torch.randn(2, 3, 8)]
    nested = torch.nested.nested_tensor(parts)
    x = torch.randn(1, 2, 5, 8)
    sdpa(x, x, x)
    for ours, part in zip(sdpa(nested, nested, nested).unbind(), parts, strict=True):
        torch.testing.assert_close(ours, sdpa(part, part, part))
    attention(x, x, x)
    with pytest.raises(ValueError, match="nested"):
        attention(nested, nested, nested)
    with pytest.raises(ValueError, match="nested"):
        attention(x, nested, x, mask=Causal())
    paged_attention(x, x, x, torch.zeros(1, 1).int(), torch.tensor([2]))
    with pytest.raises(ValueError, match="nested"):
        paged_attention(nested, x, x, torch.zeros(1, 1).int(), torch.tensor([2]))


def test_a_scope_of_torchs_own_is_part_of_the_key() -> None:
    with record_selections() as ran:
        attention(Q, Q, Q)
        with sdpa_kernel(SDPBackend.MATH):
            attention(Q, Q, Q)
            with use_backend("native_cpu"):
                attention(Q, Q, Q)
        attention(Q, Q, Q)
    assert [s.backend for s in ran] == ["sdpa_flash", "sdpa_math", "native_cpu", "sdpa_flash"]


@pytest.mark.parametrize("shape", [(0, 1, 2, 16), (2, 1, 2, 16)])
def test_paged_calls_without_sequences_or_keys(shape: tuple[int, ...]) -> None:
    pages, q = torch.randn(3, 4, 2, 16), torch.randn(shape)
    b = shape[0]
    for backend in (None, "native_cpu", "reference"):
        out, lse = paged_attention(
            q,
            pages,
            pages,
            torch.zeros(b, 0).int(),
            torch.zeros(b).int(),
            return_lse=True,
            backend=backend,
        )
        assert out.shape == shape
        assert not out.any()
        assert lse.shape == (b, 2, 1)
        assert torch.isneginf(lse).all()
    out = paged_attention(
        q, pages, pages, torch.zeros(b, 2).int(), torch.zeros(b).int(), backend="native_cpu"
    )
    assert out.shape == shape
    assert not out.any()

"""Metadata of this package and of others: what it says is read or refused, never passed over."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from polyattn import Causal, Dense, DenseBias, InvalidProblem, Padding
from polyattn.integrations.fastvideo.layer import AttentionImpl
from polyattn.integrations.fastvideo.selector import get_attn_backend
from polyattn.torch import attention

B, T, S, N, H = 2, 4, 6, 2, 8
BACKEND = get_attn_backend(H, torch.float32, ["sdpa_math"])


@dataclass
class BaseMetadata:
    """As FastVideo's base class has it."""

    current_timestep: int
    VSA_sparsity: float = field(default=0.0, kw_only=True)


@dataclass
class SDPAMetadata(BaseMetadata):
    """As FastVideo's has it."""

    attn_mask: torch.Tensor | None = None
    is_causal: bool = False


class Slotted:
    __slots__ = ("attn_mask", "cu_seqlens")

    def __init__(self, attn_mask: Any = None, cu_seqlens: Any = None) -> None:
        self.attn_mask, self.cu_seqlens = attn_mask, cu_seqlens


class Computed:
    @property
    def attn_mask(self) -> torch.Tensor:
        return KEYS


class Named(NamedTuple):
    attn_mask: Any = None
    cu_seqlens: Any = None


KEYS = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])
MEANT = Dense(KEYS[:, None, None])


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(B, T, N, H), torch.randn(B, S, N, H), torch.randn(B, S, N, H)


def layer(**options: Any) -> AttentionImpl:
    return BACKEND.get_impl_cls()(N, H, **options)


def expect(metadata: Any, mask: Any = None, bias: Any = None, **options: Any) -> None:
    q, k, v = inputs()
    out = layer(**options).forward(q, k, v, metadata)
    expected = attention(q, k, v, mask=mask, bias=bias, backend="reference")
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "metadata",
    [
        BaseMetadata(0), BaseMetadata(7), SDPAMetadata(0), SDPAMetadata(5, None, False),
        SimpleNamespace(), SimpleNamespace(mask=None, bias=None, is_causal=None, cu_seqlens=None),
        SimpleNamespace(block_size=0, indices=[], name="", _private=3), Slotted(), Named(), {},
        {"attn_mask": None, "current_timestep": torch.tensor(3)}, object(),
    ],
    ids=lambda metadata: type(metadata).__name__,
)  # fmt: skip
def test_what_says_nothing_passes(metadata: Any) -> None:
    expect(metadata)
    expect(metadata, Causal(), causal=True)


@pytest.mark.parametrize(
    "metadata",
    [
        SDPAMetadata(0, KEYS), SimpleNamespace(attn_mask=KEYS), Slotted(KEYS), Computed(),
        Named(KEYS), {"attn_mask": KEYS}, SDPAMetadata(0, KEYS.long()),
        SDPAMetadata(0, KEYS.byte()), SDPAMetadata(0, KEYS[:, None]),
        SDPAMetadata(0, KEYS[:, None].expand(B, T, S)), SDPAMetadata(0, KEYS[:, None, None]),
        SDPAMetadata(0, KEYS[:, None, None].expand(B, N, T, S)),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_attn_mask_is_read(metadata: Any) -> None:
    expect(metadata, MEANT)
    expect(metadata, MEANT & Causal(), causal=True)


def test_additive_attn_mask_is_added() -> None:
    torch.manual_seed(2)
    additive = torch.randn(B, N, T, S)
    expect(SDPAMetadata(0, additive), bias=DenseBias(additive))
    expect(SDPAMetadata(0, additive[:1, :1]), bias=DenseBias(additive[:1, :1]))
    per_key = additive[:, 0, 0]
    expect(SDPAMetadata(0, per_key), bias=DenseBias(per_key[:, None, None]))
    infinite = torch.zeros(B, S).masked_fill(~KEYS, -torch.inf)
    expect(SDPAMetadata(0, infinite), MEANT)
    expect(SDPAMetadata(0, infinite, is_causal=True), MEANT & Causal())


def test_a_mask_of_the_text_covers_the_last_keys() -> None:
    text = torch.tensor([[True, False], [True, True]])
    whole = torch.cat([torch.ones(B, S - 2, dtype=torch.bool), text], 1)
    for given in (text, text.long()):
        expect(SDPAMetadata(0, given), Dense(whole[:, None, None]))
    additive = torch.tensor([[0.5, -1.0], [2.0, 0.0]], requires_grad=True)
    padded = torch.cat([torch.zeros(B, S - 2), additive], 1)
    expect(SDPAMetadata(0, additive), bias=DenseBias(padded[:, None, None]))
    q, k, v = inputs()
    layer().forward(q, k, v, SDPAMetadata(0, additive)).sum().backward()
    assert additive.grad is not None and additive.grad.abs().sum() > 0


def test_is_causal_is_read_beside_the_mask() -> None:
    lower = torch.ones(T, T, dtype=torch.bool).tril()
    q, _, _ = inputs()
    metadata = SDPAMetadata(0, lower[None, None], is_causal=True)
    out = layer().forward(q, q, q, metadata)
    torch.testing.assert_close(out, attention(q, q, q, mask=Causal(), backend="reference"))
    expect(SDPAMetadata(0, KEYS, is_causal=True), MEANT & Causal())
    expect(SimpleNamespace(is_causal=True, mask=Padding(kv_lengths=[3, 6])), MEANT & Causal())


def test_masks_of_polyattn_and_of_others_are_joined() -> None:
    other = torch.ones(1, 1, T, S, dtype=torch.bool).tril(3)
    expect(SimpleNamespace(mask=Dense(other), attn_mask=KEYS), Dense(other) & MEANT)
    bias = DenseBias(torch.ones(1, 1, 1, S))
    expect(SimpleNamespace(bias=bias, attn_mask=KEYS), MEANT, bias)
    with pytest.raises(InvalidProblem, match="bias and an additive attn_mask"):
        expect(SimpleNamespace(bias=bias, attn_mask=torch.zeros(B, S)))


@dataclass
class SparseMetadata(BaseMetadata):
    tile_indices: torch.Tensor | None = None


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        (SimpleNamespace(cu_seqlens=torch.tensor([0, 3])), "cu_seqlens"),
        (Slotted(cu_seqlens=[0, 3]), "cu_seqlens"),
        (Named(cu_seqlens=[0, 3]), "cu_seqlens"),
        ({"cu_seqlens": (0, 3)}, "cu_seqlens"),
        (SDPAMetadata(0, VSA_sparsity=0.9), "VSA_sparsity"),
        (SparseMetadata(0, torch.zeros(1)), "tile_indices"),
        (SimpleNamespace(attn_maks=KEYS), "attn_maks.*'attn_mask'"),
        (SimpleNamespace(attn_mask="causal"), "attn_mask of type str"),
        (SimpleNamespace(attn_mask=True), "attn_mask of type bool"),
        (SimpleNamespace(attn_mask=Dense(KEYS)), "masks of polyattn go into mask"),
        (SimpleNamespace(attn_mask=torch.zeros(B, S, dtype=torch.complex64)), "complex64"),
        (SimpleNamespace(attn_mask=torch.ones(T, S, dtype=torch.bool)), r"write.*\(1, 1, T, S\)"),
        (SimpleNamespace(attn_mask=torch.ones(B, S + 1, dtype=torch.bool)), "6 keys"),
        (SimpleNamespace(attn_mask=torch.ones(S, dtype=torch.bool)), r"shape \(6,\)"),
        (SimpleNamespace(attn_mask=torch.ones(3, T, S, dtype=torch.bool)), "batch 2"),
        (SimpleNamespace(attn_mask=torch.ones(B, N, T, 5, dtype=torch.bool)), "expected"),
        (SimpleNamespace(is_causal="yes"), "is_causal='yes'"),
        (SimpleNamespace(mask=KEYS), "mask of type Tensor.*attn_mask"),
        (SimpleNamespace(bias=torch.zeros(B, S)), "bias of type Tensor"),
    ],
)
def test_what_cannot_be_read_is_refused(metadata: Any, named: str) -> None:
    q, k, v = inputs()
    with pytest.raises(InvalidProblem, match=named):
        layer().forward(q, k, v, metadata)


def test_builder_takes_what_others_build_with() -> None:
    builder = BACKEND.get_builder_cls()()
    builder.prepare()
    metadata = builder.build(current_timestep=3, attn_mask=KEYS, VSA_sparsity=0.0, device=None)
    assert isinstance(metadata, BACKEND.get_metadata_cls()) and metadata.current_timestep == 3
    expect(metadata, MEANT)
    expect(builder.build(is_causal=True, mask=MEANT), MEANT & Causal())
    with pytest.raises(InvalidProblem, match="VSA_sparsity"):
        builder.build(current_timestep=3, VSA_sparsity=0.5)
    with pytest.raises(InvalidProblem, match=r"attn_maks.*'attn_mask'"):
        builder.build(attn_maks=KEYS)


def test_foreign_metadata_in_compiled_code() -> None:
    q, k, v = inputs()
    text = torch.tensor([[True, False], [True, True]])
    impl = layer(causal=True)
    for metadata in (
        None,
        SDPAMetadata(0),
        SDPAMetadata(1, KEYS),
        SDPAMetadata(2, KEYS.long()),
        SDPAMetadata(3, text),
        SDPAMetadata(4, torch.randn(B, S)),
        SDPAMetadata(5, is_causal=True),
        Slotted(KEYS),
        Named(KEYS),
        {"attn_mask": KEYS},
    ):
        torch.compiler.reset()
        compiled = torch.compile(impl.forward, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k, v, metadata), impl.forward(q, k, v, metadata))


@pytest.mark.parametrize("make", [SDPAMetadata, BACKEND.get_builder_cls()().build])
def test_time_steps_do_not_compile_again(make: Any) -> None:
    q, k, v = inputs()
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(layer().forward, fullgraph=True, backend=count)
    for step in range(4):
        compiled(q, k, v, make(current_timestep=step, attn_mask=KEYS))
    compiled(q, k, v, make(current_timestep=4.5, attn_mask=KEYS))
    compiled(q, k, v, make(current_timestep=torch.tensor(5), attn_mask=KEYS))
    assert len(graphs) == 1


def test_compiled_code_refuses_too() -> None:
    q, k, v = inputs()
    compiled = torch.compile(layer().forward, backend="eager")
    with pytest.raises(InvalidProblem, match="cu_seqlens"):
        compiled(q, k, v, SimpleNamespace(cu_seqlens=torch.zeros(1)))

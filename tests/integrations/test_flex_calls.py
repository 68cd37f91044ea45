"""Calls of flex_attention while routed: on the best backend if their mask is known exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as imported_before

from polyattn import Causal, Dense, Padding, Unsupported, Window, record_selections, use_backend
from polyattn.integrations.sdpa_patch import route_sdpa
from polyattn.native import forms, module
from polyattn.selection.registry import Available
from polyattn.torch import attention, block_mask

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called", "ignore:return_lse is")

ORIGINAL = (imported_before,)  # what no module holds under a name of its own stays what it is
B, N, KV, T = 2, 4, 2, 70
torch.manual_seed(0)
Q, K, V = torch.randn(B, N, T, 16), torch.randn(B, KV, T, 16), torch.randn(B, KV, T, 24)
DOCUMENTS = torch.tensor([0] * 30 + [1] * 40)


class Heard:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def ran(self, selection: Any, call: Any) -> None:
        mask = selection.problem.mask
        self.log.append((selection.backend, None if mask is None else mask.signature))

    def passed(self, reason: str, call: Any) -> None:
        self.log.append(reason)


def torchs(mask_mod: Any, batch: int | None = None, keys: int = T) -> Any:
    return create_block_mask(mask_mod, batch, None, T, keys, device="cpu")


MASKS: dict[str, tuple[Any, str | None]] = {
    "none": (None, None),
    "causal": (torchs(lambda b, h, q, k: q >= k), "Causal('top_left')"),
    "everything": (torchs(lambda b, h, q, k: k >= 0), None),
    "documents": (
        torchs(lambda b, h, q, k: (q >= k) & (DOCUMENTS[q] == DOCUMENTS[k])), "Dense(1x1x70x70)",
    ),
    "an entry of the batch": (torchs(lambda b, h, q, k: k < 30 + 20 * b, B), "Dense(2x1x70x70)"),
    "a head": (torchs(lambda b, h, q, k: q >= k + h), "Dense(1x4x70x70)"),
    "ours": (block_mask(Causal() & Window(9), T, T), "Causal('top_left') & Window(left=9"),
    "ours, padded": (
        block_mask(Padding(kv_lengths=[9, T]), T, T, batch=B), "Padding(q=None, kv=2)",
    ),
}  # fmt: skip


def in_tiles() -> bool:
    """Whether bfloat16 runs in AMX's tiles here."""
    return isinstance(module.status(), Available) and forms.for_bfloat16().name.startswith("amx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", MASKS)
def test_eager_calls_are_routed_and_right(name: str, dtype: torch.dtype) -> None:
    made, signature = MASKS[name]
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    options: dict[str, Any] = {"block_mask": made, "enable_gqa": True, "scale": 0.3}
    exact = flex_module.flex_attention(Q.double(), K.double(), V.double(), **options)
    theirs, aux = flex_module.flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    heard = Heard()
    with route_sdpa(heard):
        ours, sums = flex_module.flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
        plain = imported_before(q, k, v, **options)
        again = imported_before(q, k, v, **options, return_lse=True)
    assert ours.dtype == theirs.dtype and ours.stride() == theirs.stride()
    bound = 2 * (theirs.double() - exact).abs().max() + 4 * torch.finfo(dtype).eps
    assert (ours.double() - exact).abs().max() <= bound
    assert sums.lse.dtype == aux.lse.dtype and sums.max_scores is None
    rounding = {torch.bfloat16: 2e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(sums.lse, aux.lse, rtol=rounding, atol=rounding)
    if dtype == torch.bfloat16 and in_tiles():  # exponentials are shorter where no lse is made
        assert (plain.double() - exact).abs().max() <= bound
    else:
        torch.testing.assert_close(plain, ours, rtol=rounding, atol=rounding)
    assert torch.equal(again[1], sums.lse)
    assert len(heard.log) == 3
    for _, found in heard.log:
        assert found == signature or str(found).startswith(str(signature))


def test_rows_that_see_no_key() -> None:
    made = torchs(lambda b, h, q, k: q >= k + 5)
    theirs = imported_before(Q, K, V, block_mask=made, enable_gqa=True, return_lse=True)
    with route_sdpa():
        ours = imported_before(Q, K, V, block_mask=made, enable_gqa=True, return_lse=True)
        flexed = flex_module.flex_attention(Q, K, V, block_mask=made, enable_gqa=True)
    assert bool((flexed[:, :, :5] == 0).all())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_mask_mod_is_asked_at_each_call() -> None:
    """Its arrays may have changed since."""
    limit = torch.tensor(10)
    made = torchs(lambda b, h, q, k: k < limit)
    with route_sdpa():
        for keys in (10, 50):
            limit.fill_(keys)
            out: Any = flex_module.flex_attention(Q, K, V, block_mask=made, enable_gqa=True)
            want = attention(Q, K[:, :, :keys], V[:, :, :keys], layout="BNTH")
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_gradients_which_torch_has_none_of_on_cpus() -> None:
    leaves = [x.clone().requires_grad_() for x in (Q, K, V)]
    made = MASKS["documents"][0]
    with pytest.raises(NotImplementedError):
        imported_before(*leaves, block_mask=made, enable_gqa=True)
    with route_sdpa():
        out: Any = flex_module.flex_attention(*leaves, block_mask=made, enable_gqa=True)
    got = torch.autograd.grad(out.square().sum(), leaves)
    mask = Dense(torch.ones(T, T).tril().bool() & (DOCUMENTS[:, None] == DOCUMENTS))
    want = attention(*leaves, mask=mask, layout="BNTH", backend="reference").square().sum()
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves), rtol=1e-4, atol=1e-5)


OTHER = torchs(lambda b, h, q, k: q >= k, keys=80)
LEFT: dict[str, tuple[Any, str]] = {
    "score_mod": ({"score_mod": lambda s, b, h, q, k: s + 1}, "a score_mod, which may be anything"),
    "no gqa": ({"enable_gqa": False}, "inputs of these shapes"),
    "another mask": ({"block_mask": OTHER}, "a block mask of other sizes, or on another device"),
    "no booleans": (
        {"block_mask": MASKS["causal"][0], "scale": torch.tensor(0.3)}, "a scale that is no float",
    ),
    "max scores": (
        {"return_aux": AuxRequest(max_scores=True)}, "max_scores, which polyattn does not give",
    ),
    "two ways": (
        {"return_aux": AuxRequest(lse=True), "return_lse": True}, "two ways of asking for lse",
    ),
}  # fmt: skip


def outcome(options: Any) -> Any:
    try:
        return flex_module.flex_attention(Q, K, V, **{"enable_gqa": True, **options})
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", LEFT)
def test_other_calls_are_torchs_own_and_said(name: str) -> None:
    options, reason = LEFT[name]
    theirs = outcome(options)
    heard = Heard()
    with route_sdpa(heard):
        ours = outcome(options)
    assert heard.log == [f"flex_attention with {reason}"]
    assert ours == theirs if isinstance(theirs, tuple) else torch.equal(ours, theirs)
    with (
        route_sdpa(),
        use_backend("native_cpu"),
        pytest.raises(Unsupported, match="flex_attention"),
    ):
        flex_module.flex_attention(Q, K, V, **{"enable_gqa": True, **options})


def test_requests_hold_and_places_are_restored() -> None:
    with route_sdpa(), use_backend("sdpa_math"), record_selections() as ran:
        assert flex_module.flex_attention is not ORIGINAL[0]
        flex_module.flex_attention(Q, K, V, enable_gqa=True)
        kept = flex_module.flex_attention
    assert [choice.backend for choice in ran] == ["sdpa_math"]
    assert flex_module.flex_attention is imported_before is ORIGINAL[0]
    with record_selections() as ran:  # what a program keeps is torch's again
        torch.testing.assert_close(
            kept(Q, K, V, enable_gqa=True), ORIGINAL[0](Q, K, V, enable_gqa=True)
        )
    assert ran == []


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_calls(whole: bool) -> None:
    """Compiled as torch's pages say, or as part of a model; with masks that change."""
    torch._dynamo.reset()
    heard = Heard()
    with route_sdpa(heard):
        model = flex_module.flex_attention
        if whole:
            model = lambda *x, **o: 2 * flex_module.flex_attention(*x, **o) / 2  # noqa: E731
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for mask in (Causal() & Window(9), Causal() & Window(3), Causal()):
            out: Any = compiled(Q, K, V, block_mask=block_mask(mask, T, T), enable_gqa=True)
            want = attention(Q, K, V, mask=mask, layout="BNTH")
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        for lengths in ([9, 70], [20, 3]):
            mask = Padding(kv_lengths=torch.tensor(lengths))
            made = block_mask(mask, T, T, batch=B)
            out = compiled(Q, K, V, block_mask=made, enable_gqa=True)
            want = attention(Q, K, V, mask=mask, layout="BNTH")
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        assert [backend for backend, _ in heard.log[:3]] == ["native_cpu"] * 3
        heard.log.clear()
        causal = MASKS["causal"][0]
        out = compiled(Q, K, V, block_mask=causal, enable_gqa=True)
        want = ORIGINAL[0](Q, K, V, block_mask=causal, enable_gqa=True)
        torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
        (reason,) = heard.log
        assert reason.startswith("flex_attention with a mask_mod that is none of polyattn's, in")
    mask = Causal() & Window(9)
    out = compiled(Q, K, V, block_mask=block_mask(mask, T, T), enable_gqa=True)
    want = attention(Q, K, V, mask=mask, layout="BNTH")
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)


def test_compiled_calls_with_other_blocks_are_torchs() -> None:
    """Its compiled kernel passes over blocks that are not listed, whatever the mask says."""
    torch._dynamo.reset()
    whole = block_mask(Causal(), 256, 256)
    counts, indices = torch.ones(1, 1, 2).int(), torch.tensor([[[[0, 0], [1, 0]]]]).int()
    few = flex_module.BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=128, mask_mod=whole.mask_mod, seq_lengths=(256, 256)
    )
    q, heard = torch.randn(1, 2, 256, 16), Heard()
    with route_sdpa(heard):
        compiled = torch.compile(
            lambda made: flex_module.flex_attention(q, q, q, block_mask=made), backend="eager"
        )
        compiled(whole)
        compiled(few)
    assert heard.log[0][0] == "native_cpu"
    assert heard.log[1].startswith("flex_attention with blocks that are not those of its mask")


META = torch.empty(1, 2, 8, 16, device="meta")
REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "OUTPUT_LOGSUMEXP": (Q, {"kernel_options": {"OUTPUT_LOGSUMEXP": True}}),
    "OUTPUT_MAX": (Q, {"kernel_options": {"OUTPUT_MAX": True}}),
    "a misspelt backend": (Q, {"kernel_options": {"BACKEND": "x"}}),
    "options in a list": (Q, {"kernel_options": [1]}),
    "meta": (META, {}),
    "no keys": (Q[:, :, :0], {}),
    "no heads": (Q[:, :0], {}),
    "no block mask": (Q, {"block_mask": 1}),
    "no request": (Q, {"return_aux": True}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_by_torch(name: str) -> None:
    x, options = REFUSED[name]
    query = x if name != "no keys" else Q
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whichever torch has
        flex_module.flex_attention(query, x, x, **options)
    with route_sdpa(), pytest.raises(Exception) as ours:  # noqa: PT011
        flex_module.flex_attention(query, x, x, **options)
    assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))


def test_a_scale_without_end_gives_what_torch_gives() -> None:
    theirs = flex_module.flex_attention(Q, Q, Q, scale=float("nan"))
    with route_sdpa():
        ours = flex_module.flex_attention(Q, Q, Q, scale=float("nan"))
    assert ours.isnan().all() and theirs.isnan().all()


def test_options_of_speed_are_no_hindrance() -> None:
    heard = Heard()
    with route_sdpa(heard):
        flex_module.flex_attention(Q, Q, Q, kernel_options={"BLOCK_M": 32})
    assert len(heard.log) == 1 and isinstance(heard.log[0], tuple)

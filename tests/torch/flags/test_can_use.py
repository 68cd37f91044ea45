"""can_use_* agrees with what torch's own function does."""

from __future__ import annotations

import json
import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyattn import Causal, Facts, Problem
from polyattn.errors import InvalidProblem
from polyattn.masks import Window
from polyattn.problem import MaskFacts
from polyattn.selection import Rejected
from polyattn.selection.capabilities import Reason
from polyattn.torch import api
from polyattn.torch.flags import can_use, torch_reasons
from polyattn.torch.flags.can_use import (
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
    can_use_math_attention,
)

CASES = 900
PLAIN = Problem(batch=1, q_len=8, kv_len=8, heads=4, kv_heads=4, head_dim=64, dtype="bf16")


def params(q: Any, k: Any = None, v: Any = None, mask: Any = None, **options: Any) -> Any:
    k = q if k is None else k
    values = {"dropout": 0.0, "is_causal": False, "enable_gqa": False} | options
    return SDPAParams(q, k, k if v is None else v, mask, *values.values())


def facts_of(answer: Any) -> list[str]:
    return [reason.fact for reason in answer.reasons]


def runs(backend: SDPBackend, p: Any) -> bool:
    try:
        with sdpa_kernel(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            F.scaled_dot_product_attention(
                p.query,
                p.key,
                p.value,
                attn_mask=p.attn_mask,
                dropout_p=p.dropout,
                is_causal=p.is_causal,
                enable_gqa=p.enable_gqa,
            )
    except (RuntimeError, IndexError):
        return False
    return True


def random_mask(rng: random.Random, full: tuple[int, ...], dtype: torch.dtype) -> Any:
    kind = rng.choice(["none", "none", "bool", "float", "float32", "trained", "int"])
    if kind == "none":
        return None
    shape = tuple(1 if rng.random() < 0.25 else n for n in full)[-rng.choice([1, 2, 2, 3, 4, 4]) :]
    if rng.random() < 0.1:
        shape = (*shape[:-1], shape[-1] + 1)
    if rng.random() < 0.05:
        shape = (1, 1, *shape)
    if kind == "bool":
        mask = torch.rand((*shape[:-1], 2 * shape[-1])) > 0.3
        return mask[..., ::2] if rng.random() < 0.5 else mask[..., : shape[-1]]
    if kind == "int":
        return torch.ones(shape, dtype=torch.int32)
    mask = torch.randn(shape, dtype=torch.float32 if kind == "float32" else dtype)
    return mask.requires_grad_() if kind == "trained" else mask


def random_params(rng: random.Random) -> Any:
    b, groups, kv_heads = rng.choice([1, 2]), rng.choice([1, 1, 1, 2]), rng.choice([1, 2, 3])
    t, s = rng.choice([1, 3, 4, 8]), rng.choice([1, 4, 8])
    if rng.random() < 0.15:
        b, t, s = rng.choice([(0, t, s), (b, 0, s), (b, t, 0)])
    e = rng.choice([1, 4, 8, 16])
    heads = kv_heads * groups if rng.random() < 0.95 else kv_heads + 1
    shapes = [[b, heads, t, e], [b, kv_heads, s, e], [b, kv_heads, s, e]]
    if rng.random() < 0.12:
        shapes[2][3] = rng.choice([2, 5])
    if rng.random() < 0.05:
        shapes[1][3] = e + 1
    if rng.random() < 0.05:
        shapes[1][0] = shapes[2][0] = 1
    if groups > 1 and rng.random() < 0.3:
        shapes[2][1] = heads
    dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16, torch.float16])
    dtypes = [dtype, dtype, dtype if rng.random() < 0.96 else torch.float32]
    tensors = [torch.randn(shape).to(d) for shape, d in zip(shapes, dtypes, strict=True)]
    if rng.random() < 0.05 and b * t * s:  # torch multiplies empty integers, and calls it attention
        tensors = [x.to(torch.int32) for x in tensors]
    for i, x in enumerate(tensors):
        kind = rng.choice(["", "", "", "", "turned", "stepped", "grad"])
        if kind == "turned":
            tensors[i] = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif kind == "stepped":
            tensors[i] = x.repeat_interleave(2, -1)[..., ::2]
        elif kind == "grad" and x.is_floating_point():
            x.requires_grad_()
    full = (b, heads, t, s)
    if rng.random() < 0.12:
        drop = rng.choice([1, 1, 2])
        tensors = [x[(0,) * drop] if x.shape[0] and x.shape[1] else x for x in tensors]
    if rng.random() < 0.03:
        tensors[1] = tensors[1].unsqueeze(0)
    return params(
        *tensors,
        random_mask(rng, full, dtype),
        dropout=rng.choice([0.0] * 8 + [0.3, 1.0, 1.5, -0.5]),
        is_causal=rng.random() < 0.25,
        enable_gqa=rng.random() < (0.8 if groups > 1 else 0.1),
    )


def described(p: Any) -> str:
    shapes = [(tuple(x.shape), x.dtype, x.stride()) for x in (p.query, p.key, p.value)]
    mask = p.attn_mask
    said = None if mask is None else (tuple(mask.shape), mask.dtype, mask.requires_grad)
    return f"{shapes} mask={said} {p.dropout} causal={p.is_causal} gqa={p.enable_gqa}"


@pytest.mark.parametrize("block", range(6))
def test_answers_on_a_cpu_are_what_torch_does(block: int) -> None:
    """Random calls: the kernel runs under sdpa_kernel exactly where the answer is yes."""
    rng = random.Random(block)
    torch.manual_seed(block)
    yes = {"flash": 0, "math": 0}
    for _ in range(CASES // 6):
        p = random_params(rng)
        for name, ask, backend in (
            ("flash", can_use_flash_attention, SDPBackend.FLASH_ATTENTION),
            ("math", can_use_math_attention, SDPBackend.MATH),
        ):
            answer = ask(p)
            assert bool(answer) == runs(backend, p), f"{answer}\n{described(p)}"
            yes[name] += bool(answer)
    assert CASES // 6 > yes["flash"] > 5, "the cases are not worth their name"
    assert CASES // 6 > yes["math"] > 20


def test_under_autocast_the_answer_is_for_what_the_call_becomes() -> None:
    """Inputs that autocast makes alike are alike, and a cast copy may be contiguous."""
    q = torch.randn(1, 2, 4, 8)
    mixed = params(q, q.to(torch.bfloat16))
    stepped = params(torch.randn(1, 2, 4, 16)[..., ::2])
    assert not can_use_flash_attention(mixed) and not runs(SDPBackend.FLASH_ATTENTION, mixed)
    assert not can_use_flash_attention(stepped) and not runs(SDPBackend.FLASH_ATTENTION, stepped)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for p in (mixed, stepped):
            answer = can_use_flash_attention(p)
            assert bool(answer) == runs(SDPBackend.FLASH_ATTENTION, p), str(answer)
        assert can_use_flash_attention(mixed)


def test_every_reason_is_told_not_the_first() -> None:
    q, v = torch.randn(1, 1, 2, 4, 8), torch.randn(1, 1, 2, 4, 6)
    answer = can_use_flash_attention(
        params(q, q, v, torch.ones(4, 4).requires_grad_(), dropout=0.5)
    )
    assert facts_of(answer) == ["dropout", "rank", "bias gradient", "value dim"]


def test_values_that_are_fewer_than_keys_are_refused_though_torch_reads_past_them() -> None:
    """torch's check lets it through, and the kernel reads memory that is not the values'."""
    q = torch.randn(1, 2, 4, 8)
    answer = can_use_flash_attention(params(q, torch.randn(1, 2, 5, 8), torch.randn(1, 2, 3, 8)))
    assert [str(r) for r in answer.reasons] == [
        "value length: got 3 for 5 keys, takes as many values as keys"
    ]


def test_kernels_that_are_not_here_say_so() -> None:
    q = torch.randn(1, 2, 4, 8)
    for ask in (can_use_efficient_attention, can_use_cudnn_attention):
        reasons = {r.fact: r for r in ask(params(q)).reasons}
        assert reasons["device"] == Reason("device", "cpu", "cuda")
        if not torch.cuda.is_available():
            assert reasons["available"].fix


SWITCHES = {
    can_use_flash_attention: ("flash_sdp", SDPBackend.MATH),
    can_use_math_attention: ("math_sdp", SDPBackend.FLASH_ATTENTION),
    can_use_efficient_attention: ("mem_efficient_sdp", SDPBackend.MATH),
    can_use_cudnn_attention: ("cudnn_sdp", SDPBackend.MATH),
}


@pytest.mark.parametrize("ask", SWITCHES)
def test_torchs_switch_is_a_reason_like_any_other(ask: Any) -> None:
    name, other = SWITCHES[ask]
    assert "switch" not in facts_of(ask(PLAIN, device="h100"))
    with sdpa_kernel(other):
        (reason,) = [r for r in ask(PLAIN, device="h100").reasons if r.fact == "switch"]
    assert reason.got == f"torch.backends.cuda.{name}_enabled() is False"
    assert callable(getattr(torch.backends.cuda, f"enable_{name}"))
    assert "switch" not in facts_of(ask(PLAIN, device="h100"))


FLASH, EFFICIENT, CUDNN, MATH = (
    can_use_flash_attention,
    can_use_efficient_attention,
    can_use_cudnn_attention,
    can_use_math_attention,
)
TOP_LEFT, BOTTOM_RIGHT, WINDOW = (
    MaskFacts.of(mask) for mask in (Causal("top_left"), Causal(), Window(2, 0))
)


@pytest.mark.parametrize(
    ("ask", "device", "changes", "facts"),
    [
        (FLASH, "h100", {}, []),
        (FLASH, "cpu", {}, []),
        (FLASH, "t4", {}, ["compute capability"]),
        (FLASH, "h100", {"dtype": "float32"}, ["dtype"]),
        (FLASH, "h100", {"mask": WINDOW}, ["mask"]),
        (FLASH, "cpu", {"mask": WINDOW}, []),
        (FLASH, "h100", {"mask": TOP_LEFT}, []),
        (FLASH, "h100", {"mask": BOTTOM_RIGHT}, []),
        (FLASH, "h100", {"mask": TOP_LEFT, "q_len": 4}, ["mask"]),
        (FLASH, "h100", {"mask": BOTTOM_RIGHT, "q_len": 4}, ["mask"]),
        (FLASH, "h100", {"bias": "DenseBias(bfloat16)"}, ["mask"]),
        (FLASH, "cpu", {"bias": "DenseBias(bfloat16)", "bias_grad": True}, ["bias gradient"]),
        (FLASH, "h100", {"head_dim": 60}, []),  # torch pads
        (FLASH, "h100", {"head_dim": 264}, ["head dim"]),
        (FLASH, "h100", {"value_dim": 32}, ["value dim"]),
        (FLASH, "h100", {"head_dim": 264, "value_dim": 32}, ["value dim", "head dim"]),
        (FLASH, "h100", {"dropout_p": 0.1}, []),
        (FLASH, "cpu", {"dropout_p": 0.1}, ["dropout"]),
        (FLASH, "h100", {"kv_heads": 2}, []),
        (FLASH, "h100", {"contiguous": False}, ["strides"]),
        (FLASH, "h100", {"head_dim": 208, "grad": True}, []),
        (FLASH, "rtx4090", {"head_dim": 208, "grad": True}, ["head dim"]),
        (FLASH, "cuda:sm_87", {"head_dim": 208, "grad": True}, ["head dim"]),
        (FLASH, "rtx5090", {"head_dim": 256, "grad": True}, []),
        (FLASH, "rtx5090", {"head_dim": 256, "grad": True, "dropout_p": 0.5}, ["head dim"]),
        (FLASH, "cpu", {"softcap": 30.0, "sinks": 1, "lse": True}, ["soft cap", "sinks", "lse"]),
        (FLASH, "cpu", {"layout": "packed"}, ["layout"]),
        (EFFICIENT, "h100", {"mask": WINDOW, "head_dim": 512}, []),
        (EFFICIENT, "h100", {"head_dim": 60}, ["head dim"]),
        (EFFICIENT, "h100", {"head_dim": 60, "dtype": "float32"}, []),
        (EFFICIENT, "h100", {"head_dim": 62, "dtype": "float32"}, ["head dim"]),
        (EFFICIENT, "t4", {"head_dim": 61, "dtype": "float32"}, []),
        (EFFICIENT, "t4", {}, ["dtype"]),
        (EFFICIENT, "h100", {"kv_heads": 2}, ["GQA"]),
        (EFFICIENT, "h100", {"dtype": "float64"}, ["dtype"]),
        (EFFICIENT, "cpu", {}, ["device"]),
        (CUDNN, "h100", {"kv_heads": 2, "mask": WINDOW}, []),
        (CUDNN, "h100", {"deterministic": True}, ["determinism"]),
        (CUDNN, "h100", {"dropout_p": 0.1}, ["dropout"]),
        (CUDNN, "h100", {"dropout_p": 0.125}, []),
        (CUDNN, "h100", {"dropout_p": 0.125, "q_len": 1}, ["query length"]),
        (CUDNN, "h100", {"kv_len": 1}, ["key length"]),
        (CUDNN, "h100", {"head_dim": 192, "value_dim": 128}, []),
        (CUDNN, "a100", {"head_dim": 192, "value_dim": 128}, ["head dim"]),
        (CUDNN, "h100", {"batch": 70000}, ["grid"]),
        (CUDNN, "h100", {"bias": "DenseBias(bfloat16)", "bias_grad": True}, ["bias gradient"]),
        (MATH, "h100", {"dtype": "float64", "mask": WINDOW, "value_dim": 3}, []),
        (MATH, "cpu", {"kv_heads": 1, "contiguous": False}, []),
    ],
)
def test_machines_one_does_not_have(
    ask: Any, device: str, changes: dict[str, Any], facts: list[str]
) -> None:
    """What was read in torch's source, for problems without a tensor."""
    answer = ask(
        PLAIN.with_(**{"value_dim": changes.get("head_dim", 64), **changes}), device=device
    )
    here = [fact for fact in facts_of(answer) if fact != "available"]
    assert here == facts, str(answer)


def test_tensors_may_be_asked_about_elsewhere() -> None:
    """Tensors on a CPU, an object with the attributes of SDPAParams, facts instead of a name."""
    q = torch.empty(1, 2, 4, 8, dtype=torch.float16)
    assert can_use_flash_attention(params(q), device="h100")
    assert can_use_flash_attention(SimpleNamespace(query=q, key=q, value=q), device="a100")
    no_cuda = Facts("cuda", "sm_90", builds={"torch": "cpu"})
    assert facts_of(can_use_flash_attention(params(q), device=no_cuda)) == ["build"]
    moved = params(torch.empty(1, 2, 4, 9, dtype=torch.float16)[..., 1:])
    assert facts_of(can_use_efficient_attention(moved, device="h100")) == ["alignment"]
    assert can_use_efficient_attention(moved, device="t4")
    wide = params(q, mask=torch.ones(4, 8, dtype=torch.bool)[:, ::2])
    assert facts_of(can_use_efficient_attention(wide, device="h100")) == ["strides"]
    with pytest.raises(InvalidProblem, match="h1000"):
        can_use_flash_attention(params(q), device="h1000")


def test_meta_tensors_stand_for_the_shapes() -> None:
    q = torch.empty(1, 2, 4, 8, device="meta")
    assert can_use_flash_attention(params(q))
    assert not can_use_flash_attention(params(q, dropout=0.1))


def test_a_cuda_device_that_is_not_here_is_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    answer = can_use_flash_attention(PLAIN.with_(device="cuda:sm_90"))
    assert facts_of(answer) == ["machine"]


def test_what_is_no_call_is_an_error() -> None:
    for wrong in (None, 3, SimpleNamespace(query=torch.ones(2))):
        with pytest.raises(InvalidProblem, match="SDPAParams"):
            can_use_flash_attention(wrong)


def test_debug_warns_once_with_all_reasons() -> None:
    p = params(torch.randn(2, 4, 8), dropout=0.5)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        answer = can_use_flash_attention(p, True)
        can_use_flash_attention(params(torch.randn(1, 2, 4, 8)), True)
        can_use_flash_attention(p)
    assert [str(w.message) for w in seen] == [str(answer)]
    assert seen[0].filename == __file__ and seen[0].category is UserWarning
    assert str(answer).startswith("sdpa_flash cannot run it: dropout: got dropout_p=0.5")


def test_an_answer_is_plain_data() -> None:
    answer = can_use_flash_attention(params(torch.randn(1, 2, 4, 8), dropout=0.5))
    data = json.loads(json.dumps(answer.to_dict()))
    assert data == {
        "backend": "sdpa_flash",
        "can_use": False,
        "reasons": [{"fact": "dropout", "got": "dropout_p=0.5", "takes": "0 on a CPU", "fix": ""}],
    }
    assert not answer and answer.backend == "sdpa_flash"
    assert str(can_use_math_attention(PLAIN)) == "sdpa_math can run it"


def test_asking_changes_nothing() -> None:
    def state() -> Any:
        cuda = torch.backends.cuda
        on = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()]
        return on, cuda.math_sdp_enabled(), torch._C._get_sdp_priority_order(), warnings.filters[:]

    before = state()
    can_use._answers_empty.cache_clear()
    for ask in SWITCHES:
        ask(params(torch.randn(1, 2, 0, 8)))
    torch_reasons.torch_says(params(torch.randn(1, 2, 4, 8)))
    assert state() == before


# --- where torch itself can be asked ---


def test_torch_has_the_last_word_on_its_own_kernel_but_not_on_a_wrong_call() -> None:
    ours, wrong = (
        [Reason("head dim", "256", "128"), Reason("mask", "a", "b")],
        [Reason("mask", "a", "b")],
    )
    theirs = [Reason("mask", "their", "words"), Reason("grid", "65536", "65535")]
    assert can_use._settled(ours, wrong, None) == ours
    assert can_use._settled(ours, wrong, []) == wrong
    assert can_use._settled(ours, wrong, theirs) == [*ours, theirs[1]]
    assert can_use._settled([], [], theirs) == theirs


@pytest.mark.gpu
def test_torch_is_asked_on_its_device() -> None:
    q = torch.randn(1, 2, 8, 64, device="cuda", dtype=torch.float16)
    assert can_use_flash_attention(params(q)) == can_use.CanUse("sdpa_flash")
    mask = torch.ones(8, 8, dtype=torch.bool, device="cuda")
    assert facts_of(can_use_flash_attention(params(q, mask=mask))) == ["mask"]
    assert torch_reasons.torch_says(params(q))["sdpa_flash"] == []
    found = api.explain(q.float(), q.float(), q.float(), layout="BNTH")
    assert isinstance(found.decisions["sdpa_flash"], Rejected)

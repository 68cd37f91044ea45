"""The kernels behind torch's own function, each by itself; imports no framework.

Facts for CPUs were measured with torch 2.13, those for CUDA with torch 2.11 and cuDNN 9.19 on an
H100 (sm_90); of other GPUs they were read in torch's source
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from polyattn.backends.declaring import (
    BIASES,
    FLOATS,
    HALVES,
    LAYOUTS,
    loader,
    operator_of,
    torch_probe,
)
from polyattn.masks.structure import is_of_ranges
from polyattn.problem import Problem
from polyattn.selection.backend import Backend
from polyattn.selection.capabilities import ALL_MASKS, Capabilities, Reason, arch_number
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare", "rounds_bias", "rounds_sinks"]

PLACE = 0


def declare(registry: Registry) -> None:
    """Register them."""
    every = _flash(), _efficient(), _cudnn(), _math()
    for backend in every:
        registry.register(backend)
    registry.group("torch_sdpa", tuple(backend.name for backend in every), framework="torch")
    registry.register(_portable())


def _flash() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, scale=True, sinks=True, gqa=True, lse=True, backward=True,
        deterministic=True, deterministic_backward=True, strided=True, compiled=True,
    )  # fmt: skip
    cuda = Capabilities(
        devices={"cuda"}, dtypes=HALVES, head_dims=(8, 256, 8), archs=(80, 121),
        masks={"Causal", "Window", "Padding", "LeftPadding", "And"}, scale=True, gqa=True, lse=True,
        backward=True, dropout=True, deterministic=True, strided=True, compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_flash", "torch", (cpu, cuda),
        functools.partial(torch_probe, needs=operator_of("sdpa_flash")),
        loader("sdpa.torch", "load_flash"), _flash_extra, "torch",
        "torch's flash kernels: CPU, and FlashAttention 2 on CUDA",
        _fold_choices, any_lengths=True,
    )  # fmt: skip


def _fold_choices(problem: Problem) -> list[dict[str, bool]]:
    return [{"fold": True}, {"fold": False}] if problem.gqa and problem.device == "cpu" else []


def _flash_extra(p: Problem) -> Iterator[Reason]:
    if p.device != "cuda":
        return
    if p.mask and p.mask.kinds - {"Causal", "Window", "Full"}:
        yield from _flash_ranges(p)
    elif p.mask and p.q_len > p.kv_len:  # rows without keys, whose lse would be +inf
        yield Reason("mask", f"{p.mask} with T={p.q_len} > S={p.kv_len}", "T <= S")
    yield from _scales_infinities(p)
    if p.dropout_p == 1:
        yield Reason("dropout", "1", "less than 1")
    sm = arch_number(p.arch) if p.arch else 0
    small = 86 <= sm <= 89 or 120 <= sm <= 121
    if p.grad and small and p.head_dim > 192 and (p.head_dim <= 224 or p.dropout_p > 0):
        yield Reason("head dim", f"{p.head_dim} in training on {p.arch}", "at most 192")


_MOST_BATCH = 8192
"""Of each batch entry up to five sequences are made, and the grid has 65535 of them."""
_MOST_ROWS = 1 << 30
"""Where sequences begin are numbers of 32 bits; half of them, since classes are rounded up."""


def _flash_ranges(p: Problem) -> Iterator[Reason]:
    assert p.mask is not None
    if not is_of_ranges(p.mask.structure):
        yield Reason("mask", str(p.mask), "one window, or padding and causal masks joined by &")
    elif "Causal" in p.mask.kinds and p.q_len != p.kv_len:
        yield Reason("mask", f"{p.mask} with T={p.q_len}, S={p.kv_len}", "equal lengths")
    if p.dropout_p > 0:
        yield Reason("dropout", f"{p.dropout_p} under {p.mask}", "none with padding")
    batch, rows, keys = p.class_sizes  # what holds for one of a class has to hold for all
    if batch > _MOST_BATCH:
        yield Reason("grid", f"batch {p.batch} under {p.mask}", f"at most {_MOST_BATCH}")
    if batch * max(rows, keys) > _MOST_ROWS:
        got = f"batch {p.batch} with T={p.q_len}, S={p.kv_len} under {p.mask}"
        yield Reason("length", got, f"at most {_MOST_ROWS} rows of all sequences")


def _scales_infinities(p: Problem) -> Iterator[Reason]:
    """Refuse scales that turn the -inf of keys beyond the last, or of a mask, into NaN or +inf."""
    if p.scale is not None and p.scale <= 0:
        yield Reason("scale", str(p.scale), "a scale > 0")


def _efficient() -> Backend:
    cuda = Capabilities(
        devices={"cuda"}, dtypes=HALVES | {"float32"}, head_dims=(8, 1 << 16, 8), archs=(50, 121),
        layouts=LAYOUTS, masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, gqa=True,
        value_dim=True, lse=True, backward=True, dropout=True, deterministic=True, strided=True,
        compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_efficient",
        "torch",
        cuda,
        functools.partial(torch_probe, cuda_only=True, needs=operator_of("sdpa_efficient")),
        loader("sdpa.torch", "load_efficient"),
        _efficient_extra,
        "torch",
        "torch's memory-efficient kernel (CUTLASS), CUDA only",
        any_lengths=True,
    )


def rounds_bias(p: Problem) -> bool:
    """Say whether a bias in the dtype of the queries is coarser than the bias that is given."""
    bias = p.bias_structure
    if bias is None or p.dtype not in HALVES:
        return False
    return bias.kind == "Alibi" or bias.arguments[1] != p.dtype


def rounds_sinks(p: Problem) -> bool:
    """Say whether sinks in the dtype of the queries are coarser than their scores."""
    return p.dtype in HALVES and bool(p.sinks)


def _narrow_bias(p: Problem) -> Iterator[Reason]:
    if rounds_bias(p):
        yield Reason("bias", str(p.bias), f"biases in {p.dtype}, so that nothing is rounded")


def _efficient_extra(p: Problem) -> Iterator[Reason]:
    yield from _narrow_bias(p)
    if p.dropout_p == 1:
        yield Reason("dropout", "1", "less than 1")
    if (
        p.dtype == "bfloat16"
        and p.arch is not None
        and p.arch in ("sm_50", "sm_60", "sm_61", "sm_70", "sm_75")
    ):
        yield Reason("dtype", f"bfloat16 on {p.arch}", "bfloat16 from sm_80")
    if p.lse and p.grad and (p.bias_grad or p.dropout_p > 0):
        yield Reason("lse", "a differentiable lse with a trained bias or dropout", "one of them")


def _cudnn() -> Backend:
    cuda = Capabilities(
        devices={"cuda"}, dtypes=HALVES, head_dims=(8, 128, 8), archs=(80, 121), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, scale=True, gqa=True, value_dim=True, lse=True,
        backward=True, strided=True, compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_cudnn",
        "torch",
        cuda,
        functools.partial(torch_probe, cuda_only=True, needs=operator_of("sdpa_cudnn")),
        loader("sdpa.torch", "load_cudnn"),
        _cudnn_extra,
        "torch",
        "cuDNN's fused attention, CUDA only",
        any_lengths=True,
    )


def _cudnn_extra(p: Problem) -> Iterator[Reason]:
    yield from _narrow_bias(p)
    yield from _scales_infinities(p)
    if p.kv_len == 1:
        yield Reason("key length", "1", "2 and more")
    if p.mask and p.mask.is_causal("top_left") and p.q_len != p.kv_len:
        yield Reason("mask", f"top_left causal with T={p.q_len}, S={p.kv_len}", "equal lengths")
    if p.batch > 65535 or p.heads > 65535:
        yield Reason("grid", f"batch {p.batch}, heads {p.heads}", "at most 65535 of both")


def _math() -> Backend:
    anywhere = Capabilities(
        devices={"cpu", "cuda"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, sinks=True, sinks_grad=True,
        dropout=True, gqa=True, value_dim=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True, compiled=True, higher=True,
    )  # fmt: skip
    return Backend(
        "sdpa_math",
        "torch",
        anywhere,
        functools.partial(torch_probe, needs=operator_of("sdpa_math")),
        loader("sdpa.torch", "load_math"),
        None,
        "torch",
        "torch's unfused path: matmul, softmax, matmul; materialises the scores",
        any_lengths=True,
    )


def _portable() -> Backend:
    anywhere = Capabilities(
        devices={"cpu", "cuda", "meta"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1),
        layouts=LAYOUTS, masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True,
        sinks=True, sinks_grad=True, dropout=True, gqa=True, value_dim=True, lse=True,
        backward=True, deterministic=True, deterministic_backward=True, strided=True,
        compiled=True, higher=True,
    )  # fmt: skip
    return Backend(
        "portable",
        "torch",
        anywhere,
        functools.partial(torch_probe, meta=True),
        loader("sdpa.torch", "load_portable"),
        None,
        "torch",
        "torch's own operators, written out: what exported programs hold; materialises the scores",
        any_lengths=True,
    )

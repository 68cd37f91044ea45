"""What the registry loads: one function for each of the four kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from polyattn.backends.sdpa.torch.cuda_ways import short_way
from polyattn.backends.sdpa.torch.lost_sums import keeping_sums
from polyattn.backends.sdpa.torch.lowering import prepare as lowered
from polyattn.backends.sdpa.torch.operators import (
    FEW_KEYS,
    Op,
    cudnn,
    efficient,
    flash_cpu,
    flash_cuda,
    unfused,
    windowed,
)
from polyattn.backends.sdpa.torch.ranges import by_ranges, short_reading
from polyattn.backends.sdpa.torch.short_training import trained_flash_cpu, trains_short
from polyattn.backends.sdpa.torch.short_ways import (
    biased_flash_cpu,
    causal_flash_cpu,
    dense_flash_cpu,
    is_biased,
    is_dense,
    is_plain,
    is_square_causal,
    plain_flash_cpu,
    traced_flash_cpu,
)
from polyattn.masks.structure import is_of_ranges
from polyattn.problem import Problem
from polyattn.torch.internals import flash_attention_for_cpu

__all__ = ["load_cudnn", "load_efficient", "load_flash", "load_math"]


def load_flash() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load the flash kernels: of the CPU, or FlashAttention 2 on CUDA."""

    def prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
        if problem.device == "cuda":
            return _flash_on_cuda(problem, config)
        function = flash_attention_for_cpu  # costs 1.7 us less than the operator's handle
        careful = _careful_flash_cpu(function, problem, config)
        if trains_short(problem):
            return trained_flash_cpu(function, problem, careful)
        return careful

    return prepare


def _careful_flash_cpu(
    function: Any, problem: Problem, config: Mapping[str, Any]
) -> Callable[..., Any]:
    if is_plain(problem) and problem.mask is None:
        # a compiled problem has its lengths rounded up, by a factor of 4 at most
        if problem.compiled and problem.kv_len < 4 * FEW_KEYS:
            return traced_flash_cpu(function, problem)
        return plain_flash_cpu(function, problem)
    call = flash_cpu(function)
    if problem.bias is not None and not problem.compiled:
        call = keeping_sums(call)
    op = Op(
        call,
        grouped=True,
        zeroes_empty=True,
        causal_with_mask=True,
        wide=True,
        loses_nan=True,
        like_query=True,
    )
    kernel = lowered(op, problem, config)
    if is_plain(problem) and is_square_causal(problem) and not problem.compiled:
        return causal_flash_cpu(function, problem, kernel)
    if is_plain(problem) and is_dense(problem) and not problem.compiled:
        return dense_flash_cpu(function, problem, kernel)
    if is_biased(problem):
        return biased_flash_cpu(function, problem, kernel)
    return kernel


def _flash_on_cuda(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    mask = problem.mask
    if mask is not None and mask.structure.kind == "Window":
        names = mask.structure.named
        call = windowed(names["left"], names["right"])
        op = Op(call, grouped=True, folds=False, in_vectors=True, windows=True)
        return lowered(op, problem, config)
    if mask is not None and is_of_ranges(mask.structure):
        op = Op(by_ranges(problem), grouped=True, folds=False, in_vectors=True, ranges=True)
        return short_reading(problem, lowered(op, problem, config))
    return _on_cuda("sdpa_flash", Op(flash_cuda, grouped=True, in_vectors=True), problem, config)


def _on_cuda(
    backend: str, op: Op, problem: Problem, config: Mapping[str, Any]
) -> Callable[..., Any]:
    return short_way(backend, problem, lowered(op, problem, config))


def load_efficient() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load the memory-efficient kernel (CUTLASS), CUDA only."""
    return functools.partial(_on_cuda, "sdpa_efficient", Op(efficient, in_vectors=True))


def load_cudnn() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load cuDNN's fused attention, CUDA only."""
    op = Op(cudnn, grouped=True, folds=False, in_vectors=True)
    return functools.partial(_on_cuda, "sdpa_cudnn", op)


def load_math() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Load the unfused path: matmul, softmax, matmul, on every device."""
    return functools.partial(lowered, Op(unfused, wide=True))

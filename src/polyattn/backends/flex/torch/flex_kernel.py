"""torch's FlexAttention: any mask and any change of the scores, compiled into one tiled kernel.

A problem takes one of two routes, both FlexAttention's own, both on the same mask and score
functions (the mask's is `Mask.allows`, the one definition):

- *compiled*: from :data:`COMPILE_FROM` on, where compiling (4 to 7 s on a CPU) is worth it and
  possible. One function for each class of problems; other contents of masks and biases meet
  code that is there, and so do other lengths unless the mask or the bias has arrays of them.
- *eager*: FlexAttention's unfused implementation, called directly: torch's public way to it
  compiles again for each new shape (0.4 s), warns, refuses gradients, and rounds probabilities
  to the input's dtype. It materialises the scores; without gradients a few rows at a time.

Sinks are one more key whose score is the sink and whose value is zero.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyattn.backends.flex.declared import is_unfused
from polyattn.backends.flex.torch.blocks import Blocks, block_cache, build, rows_at_once
from polyattn.backends.flex.torch.routes import Klass, Result, compiled, eager
from polyattn.backends.flex.torch.terms import Spec, Terms, bias_rows, sink_rows, token_tables
from polyattn.masks import STATIC_KINDS, Mask
from polyattn.problem import Problem
from polyattn.torch.internals import compiles_calls, dual_levels, require_cpp_compiler
from polyattn.torch.kit.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.torch.kit.masking import Dims, expand_blocks, visible
from polyattn.torch.kit.nan_isolation import hide, is_readable, mend

__all__ = ["COMPILE_FROM", "can_compile", "load", "wants_compiling"]

COMPILE_FROM = 1 << 28
"""The work, B * N * T * S * (H + V), from which a problem is compiled unless told otherwise."""


def load() -> Callable[[Problem, Mapping[str, Any]], Callable[..., Any]]:
    """Return `prepare`, as :class:`polyattn.registry.Backend` describes it."""
    importlib.import_module("torch.nn.attention.flex_attention")
    return _prepare


def _prepare(problem: Problem, config: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a kernel for the problem; ``{"compile": bool}`` overrules the choice of route."""
    layout, attend = problem.layout, _Attend(problem, config)

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q, k, v = (to_bnth(x, layout) for x in (q, k, v))
        if not problem.contiguous:
            q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        out, lse = attend(q, k, v, mask, bias, sinks)
        out = from_bnth(out, layout)
        if not problem.lse:
            return out
        assert lse is not None  # both routes give it where they are asked for it
        return out, lse_from_bnt(lse, layout)

    return kernel


def wants_compiling(problem: Problem, config: Mapping[str, Any]) -> bool:
    """Say whether the problem goes to compiled code: it can, and it is told to or large."""
    if is_unfused(problem):
        return False
    if problem.device == "cpu" and _reads_past_keys(problem):
        return False
    pairs = problem.batch if problem.layout != "packed" else 1
    work = pairs * problem.heads * problem.q_len * problem.kv_len
    large = work * (problem.head_dim + problem.value_dim) >= COMPILE_FROM
    return bool(config.get("compile", large)) and can_compile(problem.device)


def _reads_past_keys(problem: Problem) -> bool:
    """Say whether torch's template for CPUs (2.13) reads beyond the keys, and uses what is there.

    It multiplies keys by 16 with vectors; with a head dim of one or two vectors and a tail of 8
    keys it takes the 8 after them too, and their scores overwrite the last row's maximum.
    """
    keys = problem.kv_len + (1 if problem.sinks else 0)
    return problem.head_dim in (8, 16) and keys % 16 == 8


def can_compile(device: str) -> bool:
    """Say whether FlexAttention compiles here; where it does not, the eager route is exact."""
    return compiles_calls() and _has_compiler(device)


@functools.cache
def _has_compiler(device: str) -> bool:
    if device != "cpu":
        return importlib.util.find_spec("triton") is not None
    if sys.platform == "darwin" or torch.backends.cpu.get_cpu_capability() not in (
        "AVX2",
        "AVX512",
    ):
        return False  # torch's template for CPUs is written for these
    try:
        require_cpp_compiler()
    except Exception:  # torch raises its own error where it finds none
        return False
    return Path(sysconfig.get_paths()["include"], "Python.h").exists()


def _trains(problem: Problem) -> bool:
    return problem.grad or problem.bias_grad or problem.sinks_grad


class _Attend:
    """The route of one problem, on (B, N, T, H) arrays."""

    def __init__(self, problem: Problem, config: Mapping[str, Any]) -> None:
        self.problem, self.trains = problem, _trains(problem)
        self.spec = Spec.of(problem)
        self.compiles = wants_compiling(problem, config)
        self.block = _block_size(problem)
        self.klass = _klass(problem, self.spec, self.block)
        self.packed = problem.layout == "packed"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any) -> Result:
        moves = dual_levels._current_level >= 0  # forward mode, whose tangents detach() drops
        if not (self.trains or moves):  # it refuses inputs that could have gradients, also unused
            q, k, v = q.detach(), k.detach(), v.detach()
        # a level around that of forward mode may record gradients, and shares the switch
        grad = torch.enable_grad() if self.trains or moves else torch.no_grad()
        with grad, torch.autocast(q.device.type, enabled=False):  # neither is to recompile
            return self._attend(q, k, v, mask, bias, sinks, moves)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any, moves: bool
    ) -> Result:
        dims, readable = Dims.of(q, k), is_readable(q)
        compiles, derives = self.compiles and not moves, self.trains or moves
        terms = self._terms(dims, q, mask, bias, sinks)
        blocks: Any = None
        if mask is not None and compiles:
            blocks = self._blocks(mask, terms, dims, q.device)
        if mask is not None and (derives or not readable):
            q, k, v = hide(q, k, v, visible(mask, dims, q.device) if blocks is None else blocks)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
            if not compiles:
                return eager(self.spec, q, k, v, terms, derives)
            if terms.sinks is not None:
                k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
            tensors = None if blocks is None else blocks.tensors
            return compiled(self.klass)(q, k, v, terms, tensors)

        if mask is None or not readable:
            return run(q, k, v)
        return mend(run, q, k, v, lambda: visible(mask, dims, q.device))

    def _terms(self, dims: Dims, q: Tensor, mask: Any, bias: Any, sinks: Any) -> Terms:
        softcap, wide = None, torch.promote_types(q.dtype, torch.float32)
        if self.problem.softcap is not None:
            softcap = torch.full((), self.problem.softcap, dtype=wide, device=q.device)
        lengths = (
            torch.full((), length, dtype=torch.int64, device=q.device)
            for length in (dims.q_len, dims.kv_len)
        )
        return Terms(
            None if mask is None else expand_blocks(mask, dims.kv_len),
            token_tables(mask, dims) if self.packed else None,
            None if bias is None else bias_rows(bias),
            None if sinks is None else sink_rows(sinks, wide),
            softcap,
            *lengths,
        )

    def _blocks(self, mask: Mask, terms: Terms, dims: Dims, device: torch.device) -> Blocks:
        key = (mask.signature, dims, terms.sinks is None, self.block)

        def make() -> Blocks:
            rows = rows_at_once(terms, dims, self.block, device)
            return build(terms, dims, self.block, device, rows)

        return block_cache.get(key, mask, device, make)


def _block_size(problem: Problem) -> tuple[int, int]:
    """Return torch's own block size, or that of a BlockMap which the kernels can follow."""
    maps = problem.mask.structure.of("BlockMap") if problem.mask else []
    fine = {32, 64, 128, 256} if problem.device == "cpu" else {128, 256}
    if problem.device != "cpu" and not _trains(problem):
        fine.add(64)  # of which the compiled backward pass has no tiles on CUDA (torch 2.11)
    if len(maps) == 1 and {*maps[0].arguments[:2]} <= fine:
        block_q, block_k, _ = maps[0].arguments
        return block_q, block_k
    return 128, 128


def _klass(problem: Problem, spec: Spec, block: tuple[int, int]) -> Klass:
    """Return the class of problems that share code.

    Torch (2.13) writes code for CPUs by replacing the names of symbols in it, and hits names that
    begin alike: it does not compile, or computes something else. So no symbol may reach the mask
    and score functions: numbers in masks are constants, and lengths are symbols only where no
    array in these functions has them in its shape.
    """
    mask, bias = problem.mask, problem.bias_structure
    long = mask is not None and mask.kinds - _SHORT_MASKS
    symbolic = problem.device == "cpu" and not long and (bias is None or bias.kind != "DenseBias")
    facts = problem.with_(contiguous=True)
    if symbolic:
        facts = facts.with_(q_len=min(problem.q_len, 2), kv_len=min(problem.kv_len, 2))
    return Klass(spec, block, facts, symbolic)


_SHORT_MASKS = STATIC_KINDS | {"Padding", "LeftPadding", "PrefixLM"}
"""The kinds without arrays that are as long as queries or keys."""

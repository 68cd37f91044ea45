"""torch's FlexAttention: any mask and any change of the scores, compiled into one tiled kernel.

A problem takes one of two routes, both FlexAttention's own, both on the same mask and score
functions (the mask's is `Mask.allows`, the one definition):

- *compiled*: from :data:`COMPILE_FROM` on, where compiling (4 to 7 s on a CPU) is worth it and
  possible. One function for each class of problems, compiled for symbolic lengths, so that other
  lengths and other contents of masks and biases meet code that is there.
- *eager*: FlexAttention's unfused implementation, called directly: torch's public way to it
  compiles again for each new shape (0.4 s), warns, refuses gradients, and rounds probabilities
  to the input's dtype. It materialises the scores; without gradients a few rows at a time.

Sinks are one more key whose score is the sink and whose value is zero.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
import sys
import sysconfig
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from polyattn.biases import Alibi
from polyattn.masks import Index, Mask, Packed
from polyattn.problem import Problem
from polyattn.torch.isolation import hide, is_readable, mend
from polyattn.torch.layouts import from_bnth, lse_from_bnt, to_bnth
from polyattn.torch.masking import Dims, Visible, expand_blocks, is_static, visible

__all__ = ["COMPILE_FROM", "block_cache", "can_compile", "load", "wants_compiling"]

COMPILE_FROM = 1 << 28
"""The work, B * N * T * S * (H + V), from which a problem is compiled unless told otherwise."""

_EAGER_SCORES = 1 << 26  # scores held at once by the eager route where no gradient needs them all
_BUILD_PAIRS = 1 << 24  # pairs of query and key looked at together while blocks are counted
_CACHE_BYTES = 64 << 20
_BLOCKS = (
    "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices",
    "q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices",
)  # fmt: skip

Result = tuple[Tensor, Tensor | None]


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


# --- which route ---------------------------------------------------------------------------


def wants_compiling(problem: Problem, config: Mapping[str, Any]) -> bool:
    """Say whether the problem goes to compiled code: it can, and it is told to or large."""
    if problem.compiled:
        return True  # the caller's compiler takes it in
    if problem.device == "cpu" and (
        problem.lse or _trains(problem) or problem.dtype == "float64"
    ):
        return False  # compiled FlexAttention on CPUs has neither lse, gradients nor float64
    pairs = problem.batch if problem.layout != "packed" else 1
    work = pairs * problem.heads * problem.q_len * problem.kv_len
    large = work * (problem.head_dim + problem.value_dim) >= COMPILE_FROM
    return bool(config.get("compile", large)) and can_compile(problem.device)


def can_compile(device: str) -> bool:
    """Say whether FlexAttention compiles here; where it does not, the eager route is exact."""
    return not torch._dynamo.config.disable and _has_compiler(device)


@functools.cache
def _has_compiler(device: str) -> bool:
    if device != "cpu":
        return importlib.util.find_spec("triton") is not None
    if sys.platform == "darwin" or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False  # torch's template for CPUs is written for these
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        get_cpp_compiler()
    except Exception:  # torch raises its own error where it finds none
        return False
    return Path(sysconfig.get_paths()["include"], "Python.h").exists()


def _trains(problem: Problem) -> bool:
    return problem.grad or problem.bias_grad or problem.sinks_grad


class _Attend:
    """The route of one problem, on (B, N, T, H) arrays."""

    def __init__(self, problem: Problem, config: Mapping[str, Any]) -> None:
        self.problem, self.trains = problem, _trains(problem)
        self.spec = _Spec.of(problem)
        self.compiles = wants_compiling(problem, config)
        self.block = _block_size(problem)
        self.packed = problem.layout == "packed"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any) -> Result:
        if not self.trains:  # FlexAttention refuses inputs that could have gradients, also unused
            q, k, v = q.detach(), k.detach(), v.detach()
        if self.problem.compiled:
            return self._attend(q, k, v, mask, bias, sinks)
        grad = torch.enable_grad() if self.trains else torch.no_grad()
        with grad, torch.autocast(q.device.type, enabled=False):  # neither is to recompile
            return self._attend(q, k, v, mask, bias, sinks)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Any, bias: Any, sinks: Any) -> Result:
        dims, readable = Dims.of(q, k), is_readable(q)
        tables = _token_tables(mask, dims) if self.packed else None
        terms = _Terms(
            None if mask is None else expand_blocks(mask, dims.kv_len), tables,
            None if bias is None else _bias_rows(bias), _sink_rows(sinks),
        )  # fmt: skip
        blocks: Any = None
        if mask is not None and self.compiles:
            blocks = self._blocks(mask, terms, dims, q.device)
        if mask is not None and (self.trains or not readable):
            seen = Visible(mask, None, blocks.seen) if blocks is not None else visible(mask, dims, q.device)
            q, k, v = hide(q, k, v, seen)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Result:
            if not self.compiles:
                return _eager(self.spec, q, k, v, terms, self.trains)
            if terms.sinks is not None:
                k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
            tensors = None if blocks is None else blocks.tensors
            if self.problem.compiled:
                return _native(self.spec, self.block, q, k, v, terms, tensors)
            one = (q.shape[2] == 1, dims.kv_len == 1, dims.batch == 1)
            return _compiled(self.spec, self.block, _klass(self.problem), one)(q, k, v, terms, tensors)

        if mask is None or not readable:
            return run(q, k, v)
        return mend(run, q, k, v, lambda: visible(mask, dims, q.device))

    def _blocks(self, mask: Mask, terms: _Terms, dims: Dims, device: torch.device) -> _Blocks:
        if self.problem.compiled:
            return _build(terms, dims, self.block, device, dims.q_len)
        key = (mask.signature, dims, terms.sinks is None, self.block, device)
        return block_cache.get(
            key, mask, lambda: _build(terms, dims, self.block, device, _rows_at_once(terms, dims, self.block, device))
        )


def _block_size(problem: Problem) -> tuple[int, int]:
    """Return torch's own block size, or that of a BlockMap which the kernels can follow."""
    sizes = re.findall(r"BlockMap\((\d+), (\d+),", problem.mask.signature) if problem.mask else []
    fine = {32, 64, 128, 256} if problem.device == "cpu" else {128, 256}
    if len(sizes) == 1 and {int(x) for x in sizes[0]} <= fine:
        return int(sizes[0][0]), int(sizes[0][1])
    return 128, 128


# --- what is added to the scores, and what is masked ----------------------------------------


@dataclass(frozen=True)
class _Spec:
    """The constants of a class of problems."""

    scale: float
    softcap: float | None
    alibi: bool
    gqa: bool
    lse: bool

    @classmethod
    def of(cls, p: Problem) -> _Spec:
        scale = p.scale if p.scale is not None else 1 / math.sqrt(p.head_dim)
        alibi = p.bias is not None and p.bias.startswith("Alibi")
        return cls(scale, p.softcap, alibi, p.gqa, p.lse)


class _Tables(NamedTuple):
    """For each token of a packed row: its sequence, its place in it, the sequence's lengths."""

    seq_q: Tensor
    seq_k: Tensor
    t: Tensor
    j: Tensor
    q_len: Tensor
    kv_len: Tensor


class _Terms(NamedTuple):
    """What a call brings beside q, k, v. `bias`, `sinks`: (B|1, N|1, T|1, S|1); Alibi's slopes too."""

    mask: Mask | None
    tables: _Tables | None
    bias: Tensor | None
    sinks: Tensor | None


def _token_tables(mask: Mask, dims: Dims) -> _Tables:
    packed = next(leaf for leaf in mask.leaves() if isinstance(leaf, Packed))
    cu_q, cu_kv = packed.cu_q.long(), packed.cu_kv.long()
    t = torch.arange(dims.q_len, device=cu_q.device)
    j = torch.arange(dims.kv_len, device=cu_q.device)
    seq_q = torch.searchsorted(cu_q, t, right=True) - 1
    seq_k = torch.searchsorted(cu_kv, j, right=True) - 1
    lengths = cu_q.diff()[seq_q], cu_kv.diff()[seq_q]
    return _Tables(seq_q, seq_k, t - cu_q[seq_q], j - cu_kv[seq_k], *lengths)


def _bias_rows(bias: Any) -> Tensor:
    array: Tensor = bias.payload
    if isinstance(bias, Alibi):
        return array.reshape(-1 if array.dim() == 2 else 1, array.shape[-1], 1, 1)
    return array.reshape((1,) * (4 - array.dim()) + tuple(array.shape))


def _sink_rows(sinks: Tensor | None) -> Tensor | None:
    if sinks is None:
        return None
    wide = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
    return wide.reshape(1, sinks.shape[0], 1, -1).logsumexp(-1, keepdim=True)


def _allowed(terms: _Terms, b: Any, n: Any, t: Any, j: Any, q_len: Any, kv_len: Any) -> Any:
    """Ask the mask, at scalars (by FlexAttention) or at arrays that broadcast."""
    mask, x = terms.mask, terms.tables
    assert mask is not None
    align = mask.align or "bottom_right"
    if x is None:
        return mask.allows(Index(b, n, t, j, q_len, kv_len, align))
    seq, same = x.seq_q[t], x.seq_q[t] == x.seq_k[j]
    return mask.allows(
        Index(seq, n, x.t[t], x.j[j], x.q_len[t], x.kv_len[t], align, same, t, j)
    )


def _mods(spec: _Spec, terms: _Terms, place: Any, q_len: Any, kv_len: Any) -> tuple[Any, Any]:
    """Return FlexAttention's two functions, each None if there is nothing to do.

    `place`: from the head and row that FlexAttention counts to the query's head and position.
    """
    bias, sinks = terms.bias, terms.sinks

    def score_mod(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        j = n if sinks is None else torch.where(n < kv_len, n, 0)
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        if bias is not None:
            added = _entry(bias, b, h, m, j).to(score.dtype)
            if spec.alibi:
                added = -added * (place(h, m)[1] + (kv_len - q_len) - j).abs().to(score.dtype)
            score = score + added
        if sinks is not None:
            score = torch.where(n < kv_len, score, _entry(sinks, b, h, m, n).to(score.dtype))
        return score

    def mask_mod(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        head, t = place(h, m)
        if sinks is None:
            return _allowed(terms, b, head, t, n, q_len, kv_len)  # type: ignore[no-any-return]
        j = torch.where(n < kv_len, n, 0)
        return _allowed(terms, b, head, t, j, q_len, kv_len) | (n >= kv_len)  # type: ignore[no-any-return]

    changed = spec.softcap is not None or bias is not None or sinks is not None
    return score_mod if changed else None, mask_mod if terms.mask is not None else None


def _entry(array: Tensor, *where: Tensor) -> Tensor:
    """Look up an array whose dims of size 1 broadcast; no two lookups meet, so gradients of
    lookups are sums in one fixed order."""
    kept = [d for d in range(4) if array.shape[d] != 1]
    array = array.squeeze([d for d in range(4) if d not in kept])
    return array[tuple(where[d] for d in kept)] if kept else array


# --- the eager route ------------------------------------------------------------------------


def _eager(spec: _Spec, q: Tensor, k: Tensor, v: Tensor, terms: _Terms, trains: bool) -> Result:
    """Run FlexAttention's unfused implementation in float32 at least, some rows at a time."""
    dtype, q_len, kv_len = q.dtype, q.shape[2], k.shape[2]
    wide = torch.promote_types(dtype, torch.float32)
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if terms.sinks is not None:
        k, v = (pad(x, (0, 0, 0, 1)) for x in (k, v))
    held = q.shape[0] * q.shape[1] * k.shape[2]
    rows = q_len if trains else max(1, min(q_len, _EAGER_SCORES // max(held, 1)))
    parts = [
        _eager_rows(spec, q[:, :, start : start + rows], k, v, terms, start, (q_len, kv_len))
        for start in range(0, q_len, rows)
    ]
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(x, 2) for x in zip(*parts, strict=True))
    return out.to(dtype), lse if spec.lse else None


def _eager_rows(
    spec: _Spec, q: Tensor, k: Tensor, v: Tensor, terms: _Terms, start: int, lengths: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Run some query rows; the heads of a group become rows, so that no key is repeated."""
    from torch._higher_order_ops.flex_attention import math_attention
    from torch.nn.attention.flex_attention import noop_mask

    heads, rows, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    groups = heads // kv_heads

    def place(h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        return h * groups + m // rows, start + m % rows

    def folded(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        x = x[:, :, start : start + rows] if x.shape[2] > 1 else x
        if groups == 1 or (x.shape[1] == 1 and x.shape[2] == 1):
            return x
        return x.expand(-1, heads, rows, -1).unflatten(1, (kv_heads, groups)).flatten(2, 3)

    terms = terms._replace(bias=folded(terms.bias), sinks=folded(terms.sinks))
    score_mod, mask_mod = _mods(spec, terms, place, *lengths)
    q = q.unflatten(1, (kv_heads, groups)).flatten(2, 3)
    out, lse, *_ = math_attention(
        q, k, v, score_mod or (lambda score, *_: score), (mask_mod or noop_mask,), spec.scale, {}
    )
    out, lse = (x.unflatten(2, (groups, rows)).flatten(1, 2) for x in (out, lse))
    return out, lse * math.log(2)  # it counts in powers of two


# --- the compiled route ---------------------------------------------------------------------


def _native(
    spec: _Spec, block: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, terms: _Terms, blocks: Any
) -> Result:
    """Call FlexAttention where a compiler takes it in; the sink's key is already in k and v."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    kv_len = k.shape[2] - (1 if terms.sinks is not None else 0)
    score_mod, mask_mod = _mods(spec, terms, lambda h, m: (h, m), q.shape[2], kv_len)
    block_mask = None
    if mask_mod is not None:
        block_mask = BlockMask((q.shape[2], k.shape[2]), *blocks, BLOCK_SIZE=block, mask_mod=mask_mod)
    aux = AuxRequest(lse=True) if spec.lse else None
    result = flex_attention(
        q, k, v, score_mod, block_mask, spec.scale, enable_gqa=spec.gqa, return_aux=aux
    )
    return (result[0], result[1].lse) if spec.lse else (result, None)


def _klass(problem: Problem) -> tuple[Any, ...]:
    """Return what distinguishes compiled code, lengths and sizes of arrays apart."""
    mask = re.sub(r"\d+(x\d+)*", "#", problem.mask.signature) if problem.mask else None
    bias = re.sub(r"\d+(x\d+)*", "#", problem.bias) if problem.bias else None
    return (
        problem.device, problem.dtype, problem.layout, problem.heads, problem.kv_heads,
        problem.head_dim, problem.value_dim, mask, bias, problem.sinks > 0, _trains(problem),
    )  # fmt: skip


@functools.lru_cache(maxsize=128)
def _compiled(spec: _Spec, block: tuple[int, int], klass: tuple[Any, ...], one: Any) -> _Compiled:
    return _Compiled(spec, block, klass[0])


class _Compiled:
    """FlexAttention compiled for one class of problems.

    The compiler keeps what it made by code object and stops after some (8) for one; a function
    with a code object of its own has them to itself, and when they are used up, a fresh one
    takes over instead of failing. On CPUs lengths are symbolic from the start; elsewhere as
    torch decides (static first), which is the way its kernels for GPUs are used most.
    """

    def __init__(self, spec: _Spec, block: tuple[int, int], device: str) -> None:
        self._spec, self._block, self._dynamic = spec, block, True if device == "cpu" else None
        self._run = self._fresh()

    def _fresh(self) -> Callable[..., Result]:
        spec, block = self._spec, self._block

        def attend(q: Tensor, k: Tensor, v: Tensor, terms: _Terms, blocks: Any) -> Result:
            return _native(spec, block, q, k, v, terms, blocks)

        name = f"flex_{id(self):x}_{id(attend):x}"
        own = types.FunctionType(
            attend.__code__.replace(co_name=name), attend.__globals__, name, None, attend.__closure__
        )
        return torch.compile(own, fullgraph=True, dynamic=self._dynamic)

    def __call__(self, *arguments: Any) -> Result:
        try:
            return self._run(*arguments)
        except torch._dynamo.exc.FailOnRecompileLimitHit:
            self._run = self._fresh()
            return self._run(*arguments)


# --- which blocks to visit ------------------------------------------------------------------


class _Blocks(NamedTuple):
    """A BlockMask's eight tensors, and the keys that some query sees, (B|1, K|1, S, 1)."""

    tensors: tuple[Tensor, ...]
    seen: Tensor


def _ask(terms: _Terms, dims: Dims, device: torch.device, start: Any, stop: Any) -> Tensor:
    b = torch.arange(dims.batch, device=device).view(-1, 1, 1, 1)
    n = torch.arange(dims.heads, device=device).view(1, -1, 1, 1)
    t = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
    j = torch.arange(dims.kv_len, device=device).view(1, 1, 1, -1)
    dense: Tensor = _allowed(terms, b, n, t, j, dims.q_len, dims.kv_len)
    dense = dense.reshape((1,) * (4 - dense.dim()) + tuple(dense.shape))
    return dense.expand(-1, -1, stop - start, dims.kv_len)


def _rows_at_once(terms: _Terms, dims: Dims, block: tuple[int, int], device: torch.device) -> int:
    pairs = _ask(terms, dims, device, 0, 1).numel()
    return max(block[0], _BUILD_PAIRS // max(pairs, 1) // block[0] * block[0])


def _build(terms: _Terms, dims: Dims, block: tuple[int, int], device: torch.device, rows: Any) -> _Blocks:
    """Count the visible pairs of each block, `rows` queries at a time, never all pairs at once."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, seen = [], None
    columns = dims.kv_len + (1 if terms.sinks is not None else 0)
    for start in range(0, dims.q_len, rows) if rows is not dims.q_len else (0,):
        stop = min(start + rows, dims.q_len) if rows is not dims.q_len else dims.q_len
        dense = _ask(terms, dims, device, start, stop)
        hit = dense.any(-2)
        seen = hit if seen is None else seen | hit
        if terms.sinks is not None:
            dense = pad(dense, (0, 1), value=True)
        dense = pad(dense, (0, -columns % block[1], 0, -(stop - start) % block[0]))
        dense = dense.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
        counts.append(dense.sum((-1, -3), dtype=torch.int32))
    count = torch.cat(counts, -2)
    full = count == block[0] * block[1]
    found = BlockMask.from_kv_blocks(
        *_listed((count > 0) & ~full), *_listed(full), BLOCK_SIZE=block, seq_lengths=(dims.q_len, columns)
    )
    assert seen is not None
    if seen.shape[1] > 1 and dims.heads != dims.kv_heads:
        seen = seen.unflatten(1, (dims.kv_heads, -1)).any(2)
    return _Blocks(tuple(getattr(found, name) for name in _BLOCKS), seen.unsqueeze(-1))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.to(torch.int32).contiguous()


class _BlockCache:
    """Blocks of masks by signature and sizes, bounded in bytes, least recently used first out.

    Never stale: on CPUs the arrays of the mask are compared with a copy; elsewhere, where that
    would wait for the device, they must be the same tensors with the same version counter.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes, self.built = limit, 0, 0
        self._entries: OrderedDict[Any, tuple[Any, _Blocks, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any, mask: Mask, make: Callable[[], _Blocks]) -> _Blocks:
        """Return the blocks of `mask`, made anew if an array of it has changed."""
        arrays = _arrays(mask)
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
        if entry is not None and _unchanged(entry[0], arrays):
            return entry[1]
        with torch.inference_mode(False):  # what is kept may serve a call that trains
            made = make()
            witness = _witness(arrays)
        self.built += 1
        size = sum(x.nbytes for x in (*made.tensors, made.seen, *arrays))
        if witness is not None and size <= self._limit:
            self._keep(key, (witness, made, size))
        return made

    def _keep(self, key: Any, entry: tuple[Any, _Blocks, int]) -> None:
        with self._lock:
            self._bytes += entry[2] - self._entries.pop(key, (None, None, 0))[2]
            self._entries[key] = entry
            while self._bytes > self._limit:
                self._bytes -= self._entries.popitem(last=False)[1][2]


def _arrays(mask: Mask) -> list[Tensor]:
    found: list[Tensor] = []

    def note(name: str, array: Any) -> Any:
        if array is not None:
            found.append(array)
        return array

    if not is_static(mask):
        mask.map(note)
    return found


def _witness(arrays: list[Tensor]) -> list[Any] | None:
    """Return what will show that the arrays have not changed; None if nothing can."""
    if any(x.is_inference() and x.device.type != "cpu" for x in arrays):
        return None  # no version counter
    return [
        x.clone() if x.device.type == "cpu" else (weakref.ref(x), x._version) for x in arrays
    ]


def _unchanged(witness: list[Any], arrays: list[Tensor]) -> bool:
    return all(
        torch.equal(w, x) if isinstance(w, Tensor) else not x.is_inference() and (w[0]() is x and w[1] == x._version)
        for w, x in zip(witness, arrays, strict=True)
    )


block_cache = _BlockCache(_CACHE_BYTES)
"""The blocks of this process."""

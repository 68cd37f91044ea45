"""Which backend to prefer where nothing was asked for and nothing was measured: rows of data.

The first row of the problem's framework whose condition holds gives the order; backends that it
does not name follow in order of registration. A row's reason says what it rests on; "not measured"
marks what was read only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from polyattn.masks.structure import is_of_ranges
from polyattn.problem import Problem
from polyattn.selection.capabilities import arch_number
from polyattn.selection.evidence.figures import UNMEASURED, Evidence
from polyattn.selection.evidence.problem_kinds import is_array, is_small, trains, work_of

__all__ = ["EVIDENCE", "EXPORTED", "ROWS", "Row", "preference"]


@dataclass(frozen=True)
class Row:
    """A condition on a framework's problems, the order it prefers, and why.

    `rests_on`: the features of a machine that the order needs and where they are known from. A row
    that rests on :data:`EVIDENCE` holds only where that says that its first backend is the faster;
    the reason is then what was measured.
    """

    name: str
    when: Callable[[Problem], bool]
    prefer: tuple[str, ...]
    reason: str
    framework: str = "torch"
    rests_on: str = ""


EVIDENCE = (
    "vendor, family and instruction sets of the processor, torch's release and the threads: a "
    "record of such a machine (polyattn.selection.evidence.shipped), or a calibration of this one"
)
_H100 = "by `polyattn bench gpu --record` on an NVIDIA H100 80GB with torch 2.11 and cuDNN 9.19"
_H200 = "by `polyattn bench gpu --record` on an NVIDIA H200 with torch 2.11 and cuDNN 9.19"
_UNMEASURED_GPU = "no record of such a device"
_OWN = frozenset({"sdpa_flash", "sdpa_math"})
"""What torch's own function may run on CPUs."""


def _sparse(p: Problem) -> bool:
    kinds = p.mask.kinds if p.mask else frozenset()
    few = kinds & {"Window", "Chunked", "BlockMap", "Segments", "Packed"}
    return bool(few) and "Not" not in kinds and p.class_sizes[2] >= 1024


def _ends_at_the_last_key(p: Problem) -> bool:
    """Say whether the mask is one window, or a causal mask of a rectangle, from the last key on."""
    if p.mask is None or p.q_len > p.kv_len:
        return False
    return p.mask.structure.kind == "Window" or (p.mask.is_causal() and p.q_len < p.kv_len)


def _is_padded(p: Problem) -> bool:
    """Say whether the mask is padding, of a square if it is causal as well."""
    if p.mask is None or not is_of_ranges(p.mask.structure):
        return False
    return "Causal" not in p.mask.kinds or p.q_len == p.kv_len


def _wants_wrapping(p: Problem) -> bool:
    """Say whether torch's kernel needs more than itself: not where a compiler fuses that away."""
    wrapped = is_array(p) if trains(p) else p.gqa or p.mask is not None
    return wrapped and not p.compiled


EXPORTED = Row(
    "exported programs",
    lambda p: True,
    ("portable",),
    "the program is exported, and runs elsewhere: torch's own operators, for any lengths; ask for "
    "another backend to export that one",
    rests_on="any machine",
)
"""Holds before all others while a program is exported: no matter of speed."""


ROWS: tuple[Row, ...] = (
    Row(
        "cpu, scores that fused kernels cannot express, small",
        lambda p: p.device == "cpu" and p.softcap is not None and work_of(p) < 1 << 28,
        ("native_cpu", "reference", "flex"),
        "the native kernels cap scores in their tiles; compiling FlexAttention takes seconds, the "
        "float64 reference less at this size",
        rests_on="any processor: torch's own function has no soft caps",
    ),
    Row(
        "cpu, scores that fused kernels cannot express",
        lambda p: p.device == "cpu" and p.softcap is not None,
        ("native_cpu", "flex", "reference"),
        "the native kernels cap scores in their tiles, and so does compiled FlexAttention",
        rests_on="any processor: torch's own function has no soft caps",
    ),
    Row(
        "cpu, sinks that train",
        lambda p: p.device == "cpu" and p.sinks_grad and not is_small(p),
        ("native_cpu", "sdpa_math", "reference", "flex"),
        "the native kernels train sinks in their tiles; torch's own function has none",
        rests_on="any processor: torch's own function has none",
    ),
    Row(
        "cpu, small, masked or with grouped heads",
        lambda p: p.device == "cpu" and _wants_wrapping(p) and is_small(p),
        ("native_cpu", "sdpa_flash", "sdpa_math", "reference", "flex"),
        "at this size torch's kernel takes longer to be given heads that are folded and masks as "
        "numbers, and to be asked for lost NaN, than the native kernels take to compute",
        rests_on="any processor: that is work around the kernel (`polyattn bench harm --only "
        "'causal (1,8,16,64)*'` prints what it comes to, and in training 'fwd+bwd tiny causal "
        "padding*')",
    ),
    Row(
        "cpu, native kernels",
        lambda p: p.device == "cpu",
        ("native_cpu", "sdpa_flash", "sdpa_math", "reference", "flex"),
        "torch's own function cannot run it",
        rests_on=EVIDENCE,
    ),
    Row(
        "cpu",
        lambda p: p.device == "cpu",
        ("sdpa_flash", "sdpa_math", "native_cpu", "reference", "flex"),
        "torch's flash kernel is faster than its math path on CPUs; "
        "FlexAttention must compile for seconds and is slower unless it skips blocks",
        rests_on="any processor",
    ),
    Row(
        "jax, a spread sequence",
        lambda p: p.spread is not None,
        ("jax_ulysses", "jax_ring", "jax_hybrid"),
        "an exchange of heads moves each array once, a ring the keys as often as there are devices "
        "(not measured over a real network)",
        framework="jax",
        rests_on="any devices",
    ),
    Row(
        "jax, cpu",
        lambda p: p.device == "cpu",
        ("native_cpu", "jax_paged_decode", "jax_blockwise", "jax_xla", "jax_reference"),
        "the native kernels are several times faster than XLA's unfused attention, at every size",
        framework="jax",
        rests_on="any processor: XLA writes the scores to memory and reads them back "
        "(`polyattn bench jax` prints what it comes to)",
    ),
    Row(
        "jax, accelerators, few queries",
        lambda p: p.q_len <= 16,
        ("jax_paged_decode", "jax_decode", "jax_cudnn", "pallas", "splash", "jax_blockwise"),
        "kernels that have a program for each block of queries leave most of a device idle where "
        "there is one block (not measured)",
        framework="jax",
        rests_on=_UNMEASURED_GPU,
    ),
    Row(
        "jax, cuda",
        lambda p: p.device == "cuda",
        ("jax_cudnn", "pallas", "jax_paged_decode", "jax_blockwise", "jax_xla", "jax_reference"),
        "cuDNN's fused kernel where it can, then what never writes the scores (not measured)",
        framework="jax",
        rests_on=_UNMEASURED_GPU,
    ),
    Row(
        "jax, other accelerators",
        lambda p: True,
        ("splash", "pallas", "jax_paged_decode", "jax_blockwise", "jax_xla", "jax_reference"),
        "kernels that never write the scores first (not measured)",
        framework="jax",
        rests_on=_UNMEASURED_GPU,
    ),
    Row(
        "cuda, windows",
        lambda p: p.device == "cuda" and _ends_at_the_last_key(p),
        ("sdpa_flash", "flex", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"),
        "FlashAttention 2 masks windows, and causal calls of fewer queries than keys, by itself: "
        f"a window of 256 in 8192 keys 9 x torch's own call, 4 x FlexAttention, {_H100}",
        rests_on=_H100,
    ),
    Row(
        "cuda, padding",
        lambda p: p.device == "cuda" and _is_padded(p),
        ("sdpa_flash", "sdpa_cudnn", "flex", "sdpa_efficient", "sdpa_math"),
        "FlashAttention 2 reads no key that padding hides, where the others are handed a mask "
        "and copies without what it hides: three times as fast as cuDNN where half of 2048 keys "
        f"are hidden, eight times for one query on 32768, {_H200}",
        rests_on=_H200,
    ),
    Row(
        "cuda, block-sparse masks",
        lambda p: p.device == "cuda" and _sparse(p),
        ("flex", "sdpa_cudnn", "sdpa_efficient", "sdpa_math"),
        "FlexAttention skips the tiles that the mask empties: where a tenth is left 2 x torch's "
        f"own call, {_H100}",
        rests_on=_H100,
    ),
    Row(
        "cuda, Hopper",
        lambda p: p.device == "cuda" and p.arch is not None and arch_number(p.arch) == 90,
        ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient", "flex", "sdpa_math"),
        "cuDNN uses Hopper's own instructions, the flash kernel in torch does not: it takes 1.6 to "
        f"2 times as long, the memory-efficient one 2 to 4 times and more, {_H100}",
        rests_on=_H100,
    ),
    Row(
        "cuda",
        lambda p: p.device == "cuda",
        ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "flex", "sdpa_math"),
        "torch's own order: flash, memory-efficient, cuDNN (not measured)",
        rests_on=_UNMEASURED_GPU,
    ),
)


def preference(
    problem: Problem, names: Iterable[str], evidence: Evidence = UNMEASURED
) -> tuple[tuple[str, ...], str]:
    """Return all of `names` in preferred order, and the reason.

    >>> p = Problem(batch=1, q_len=8, kv_len=8, heads=1, kv_heads=1, head_dim=8)
    >>> preference(p, ["flex", "sdpa_flash"])[0]
    ('sdpa_flash', 'flex')
    """
    known = tuple(names)
    passed_over = ""
    for row in ROWS:
        if row.framework != problem.framework or not row.when(problem):
            continue
        reason = row.reason
        if row.rests_on is EVIDENCE and row.prefer[0] in known and not _OWN.isdisjoint(known):
            verdict = evidence.verdict(problem)
            if verdict is None:
                continue
            reason = verdict.said
            if not verdict.prefers_native:
                passed_over = reason
                continue
        return _ordered(row, known, passed_over or reason)
    where = f"{problem.framework} on {problem.device}"
    return known, f"order of registration (no row for {where})"


def _ordered(row: Row, known: tuple[str, ...], reason: str) -> tuple[tuple[str, ...], str]:
    """Return the names in a row's order; the reason says which of the first cannot."""
    listed = tuple(name for name in row.prefer if name in known)
    passed = [name for name in row.prefer if name not in known]
    first = row.prefer.index(listed[0]) if listed else len(row.prefer)
    cannot = f"{', '.join(passed[:first])} cannot run it; " if passed[:first] else ""
    return (*listed, *(name for name in known if name not in listed)), cannot + reason

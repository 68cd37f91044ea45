"""The table's part on precision: what float32 products are computed in, and 16-bit sums."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from polyattn.flags.cells import Access, Cell
from polyattn.torch.flags.declare import XPU_BUILD, knob
from polyattn.torch.flags.float32 import (
    CELLS,
    CUDNN_BOOL,
    INHERITS,
    MATMUL_NAME,
    matmul_name,
    plain_cudnn_bool,
    put,
    put_cudnn_bool,
)
from polyattn.torch.flags.state import ReductionCells
from polyattn.torch.internals.switches import (
    ABSENT,
    Switch,
    cublas_tf32,
    fp32_precision,
    has_xpu,
    setter_of,
    switch,
)

__all__ = ["precision"]

_CUDA = ("none", "ieee", "tf32")
_ONEDNN = ("none", "ieee", "tf32", "bf16")
_MIXING = (
    "torch's getters of the names from before 2.9 raise where the new names were set to something "
    "else; polyattn still reads and restores both."
)
_YIELDS = (
    "torch 2.13 starts with a tf32 that yields to fp32_precision and that nothing can set again: "
    "after the first setting, torch's own cudnn.flags() or a scope here included, tf32 stays until "
    "it is set."
)


def precision() -> Iterator[Access]:
    """Yield the knobs of precision."""
    yield from _old_names()
    yield from _levels()
    yield from _operators()
    yield from _reductions()


def _cells(*names: str) -> tuple[Cell, ...]:
    return tuple(CELLS.cell(name) for name in names)


def _old_names() -> Iterator[Access]:
    yield knob(
        MATMUL_NAME, matmul_name, torch.set_float32_matmul_precision,
        "What float32 matrix products may be computed in: float32, TF32 or (oneDNN) bfloat16.",
        verify=lambda value: torch.get_float32_matmul_precision() == value,
        type="str", allowed=("highest", "high", "medium"),
        where="torch.set_float32_matmul_precision",
        touches=_cells(MATMUL_NAME, "cuda.matmul", "mkldnn.matmul"), rank=0, trap=_MIXING,
        couples=(
            "cuda.matmul.fp32_precision", "mkldnn.matmul.fp32_precision", "cuda.matmul.allow_tf32",
        ),
        replaced_by="cuda.matmul.fp32_precision and mkldnn.matmul.fp32_precision (2.9)",
        aliases=("set_float32_matmul_precision", "get_float32_matmul_precision"),
    )  # fmt: skip
    yield knob(
        "cuda.matmul.allow_tf32", lambda: matmul_name() != "highest",
        switch("cuda.matmul.allow_tf32").put,
        "Whether float32 matrix products may run in TF32 on Ampere and newer GPUs.",
        touches=_cells(MATMUL_NAME, "cuda.matmul"), rank=1, trap=_MIXING,
        verify=lambda value: cublas_tf32() == value,
        couples=(MATMUL_NAME, "cuda.matmul.fp32_precision"),
        deprecated="2.9", replaced_by="cuda.matmul.fp32_precision",
    )  # fmt: skip
    yield knob(
        "cudnn.allow_tf32", plain_cudnn_bool, put_cudnn_bool,
        "Whether cuDNN's float32 convolutions and recurrent networks may run in TF32.",
        touches=_cells(CUDNN_BOOL, "cuda.conv", "cuda.rnn"), rank=1, trap=f"{_MIXING} {_YIELDS}",
        couples=("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision"), freezes=True,
        deprecated="2.9", replaced_by="cudnn.conv.fp32_precision and cudnn.rnn.fp32_precision",
    )  # fmt: skip
    yield knob(
        "mkldnn.allow_tf32",
        *_onednn(),
        "Whether oneDNN may run float32 in TF32 on Intel GPUs.",
        freezes=True,
        builds=XPU_BUILD,
        deprecated="2.9",
        replaced_by="mkldnn.fp32_precision",
    )


def _onednn() -> Switch:
    """The getter of other builds answers None, and the setter only warns."""
    return switch("mkldnn.allow_tf32") if has_xpu() else Switch(ABSENT, ABSENT)


_OPERATORS = ("matmul", "conv", "rnn")
_BELOW_CUDA = (
    "cuda.matmul.fp32_precision",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
)
_BELOW_ONEDNN = tuple(f"mkldnn.{operator}.fp32_precision" for operator in _OPERATORS)


def _levels() -> Iterator[Access]:
    shared: dict[str, Any] = {"type": "str", "freezes": True, "since": "2.9"}
    yield _precision(
        "fp32_precision",
        "generic",
        "all",
        _ONEDNN,
        rank=2,
        **shared,
        about="What float32 convolutions, recurrent networks and products are computed in where "
        "nothing more special is set.",
        couples=("cudnn.fp32_precision", "mkldnn.fp32_precision", *_BELOW_CUDA, *_BELOW_ONEDNN),
    )
    yield _precision(
        "cudnn.fp32_precision",
        "cuda",
        "all",
        _CUDA,
        rank=3,
        couples=_BELOW_CUDA,
        **shared,
        about="The same for CUDA; cuda.matmul, cudnn.conv and cudnn.rnn inherit it.",
    )
    yield _precision(
        "mkldnn.fp32_precision",
        "mkldnn",
        "all",
        _ONEDNN,
        rank=3,
        couples=_BELOW_ONEDNN,
        **shared,
        about="The same for oneDNN; mkldnn.matmul, mkldnn.conv and mkldnn.rnn inherit it.",
        trap="torch's attribute reads this level and sets the general one (fp32_precision); here "
        "it sets this level.",
    )


def _precision(
    name: str, backend: str, operator: str, allowed: tuple[str, ...], *, about: str, **facts: Any
) -> Access:
    touches = _cells(f"{backend}.{operator}")
    if operator == "all" and backend != "mkldnn":
        touches += _cells(INHERITS)
    write = partial(put, backend, operator)

    def get() -> str:
        return fp32_precision(backend, operator)

    def verify(value: str) -> bool:
        """``none`` inherits, so it need not read as itself."""
        return value == "none" or get() == value

    def settle(value: str) -> None:
        """Inherit the reading if the levels above give it, and store it if not."""
        if get() != value:
            write("none")
        if get() != value:
            write(value)

    return knob(
        name,
        get,
        write,
        about,
        allowed=allowed,
        verify=verify,
        settle=settle,
        touches=touches,
        **facts,
    )


def _operators() -> Iterator[Access]:
    kinds = {"matmul": "matrix products", "conv": "convolutions", "rnn": "recurrent networks"}
    for operator, what in kinds.items():
        home = "cuda" if operator == "matmul" else "cudnn"
        yield _precision(
            f"{home}.{operator}.fp32_precision", "cuda", operator, _CUDA, rank=4, type="str",
            about=f"What float32 {what} are computed in on CUDA; none inherits.", since="2.9",
            couples=() if operator == "matmul" else ("cudnn.allow_tf32",),
            freezes=operator == "rnn" and "CudnnRNN" in type(torch.backends.cudnn.rnn).__name__,
            trap=_MIXING if operator == "matmul" else f"{_MIXING} {_YIELDS}",
        )  # fmt: skip
        yield _precision(
            f"mkldnn.{operator}.fp32_precision",
            "mkldnn",
            operator,
            _ONEDNN,
            rank=4,
            type="str",
            about=f"What float32 {what} are computed in by oneDNN; none inherits.",
            since="2.9",
        )


def _reductions() -> Iterator[Access]:
    for dtype in ("fp16", "bf16"):
        yield from _reduction(dtype, ReductionCells(dtype))
    yield knob(
        "cuda.matmul.allow_fp16_accumulation",
        *switch("cuda.matmul.allow_fp16_accumulation"),
        "Whether float16 products may be accumulated in float16: faster on some GPUs, coarse.",
    )
    yield knob(
        "cuda.matmul.prefer_cublaslt_grouped_gemm",
        *switch("cuda.matmul.prefer_cublaslt_grouped_gemm"),
        "Whether products of groups of matrices prefer cuBLASLt.",
        since="2.15",
    )
    yield knob(
        "cpu.allow_fp16_reduced_precision_reduction",
        *switch("cpu.allow_fp16_reduced_precision_reduction"),
        "Whether the CPU may sum float16 products in float16 (ARM).",
        lacks=_no_fp16_sums,
        where=setter_of("cpu.allow_fp16_reduced_precision_reduction"),
    )


def _no_fp16_sums(value: bool | None = None) -> str:
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return "only ARM processors with float16 arithmetic have it" if value and not arm else ""


def _reduction(dtype: str, cells: ReductionCells) -> Iterator[Access]:
    stem = f"cuda.matmul.allow_{dtype}_reduced_precision_reduction"

    def allow(value: bool) -> None:
        cells.put(value, True if value else cells.pair()[1])

    def split(value: bool) -> None:
        cells.put(cells.pair()[0], value)

    both = (cells.cell("allow"), cells.cell("split"))
    yield knob(
        stem,
        lambda: cells.pair()[0],
        allow,
        touches=both,
        rank=5,
        couples=(f"{stem}_split_k",),
        about=f"Whether partial sums of {dtype} products may be added up in {dtype}.",
    )
    pairs = isinstance(cells._get(), tuple)
    yield knob(
        f"{stem}_split_k",
        (lambda: cells.pair()[1]) if pairs else ABSENT,
        split if pairs else ABSENT,
        about=f"Whether {dtype} products may be split along the summed dim; off only while "
        "reduced precision is off too.",
        touches=both,
        rank=6,
        since="2.10",
        where=f"torch.backends.{stem} = (allow, split_k)",
    )

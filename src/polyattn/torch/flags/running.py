"""The table's part on how programs run: determinism, threads, and the modes of a thread."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.utils.deterministic

from polyattn.flags.cells import Access
from polyattn.torch.flags.declare import knob, query
from polyattn.torch.flags.state import DETERMINISM, THREADS, inductor_deterministic, put_inductor
from polyattn.torch.internals import INDUCTOR_CONFIG
from polyattn.torch.internals.switches import ABSENT, set_grad_enabled, set_sparse_checks, switch

__all__ = ["running"]


def running() -> Iterator[Access]:
    """Yield the knobs of how programs run."""
    yield from _determinism()
    yield from _threads()
    yield from _numbers()
    yield from _gradients()
    yield from _autocast()


def _determinism() -> Iterator[Access]:
    mode, warn, inductor = (DETERMINISM.cell(name) for name in ("mode", "warn_only", "inductor"))
    switched = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10)
    yield knob(
        "deterministic_algorithms", torch.are_deterministic_algorithms_enabled, _deterministic,
        "Whether operations without a deterministic algorithm raise (or warn).",
        where="torch.use_deterministic_algorithms", rank=1,
        touches=(mode, inductor) if switched else (mode,),
        couples=("deterministic_debug_mode", "_inductor.config.deterministic"),
        aliases=("use_deterministic_algorithms", "are_deterministic_algorithms_enabled"),
        trap="On CUDA some matrix products need env.CUBLAS_WORKSPACE_CONFIG=:4096:8 as well.",
    )  # fmt: skip
    yield knob(
        "_inductor.config.deterministic",
        inductor_deterministic if switched else ABSENT,
        put_inductor if switched else ABSENT,
        "Inductor's own switch: no measuring that could change results.",
        per_thread=True,
        where=f"{INDUCTOR_CONFIG}.deterministic",
        touches=(inductor,),
        rank=3,
        since="2.10",
    )
    yield knob(
        "deterministic_algorithms_warn_only",
        torch.is_deterministic_algorithms_warn_only_enabled,
        lambda value: DETERMINISM.write({"warn_only": value}),
        "Whether deterministic_algorithms warns instead of raising.",
        where="torch.use_deterministic_algorithms(warn_only=...)",
        touches=(warn,),
        rank=2,
        couples=("deterministic_debug_mode",),
        aliases=("is_deterministic_algorithms_warn_only_enabled",),
    )
    yield from _deterministic_rest()


def _deterministic_rest() -> Iterator[Access]:
    mode, warn = (DETERMINISM.cell(name) for name in ("mode", "warn_only"))
    yield knob(
        "deterministic_debug_mode", torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
        "Both in one number: 0 off, 1 warns, 2 raises; leaves Inductor's switch alone.",
        type="int", allowed=(0, 1, 2), convert=_debug_mode, touches=(mode, warn), rank=0,
        where="torch.set_deterministic_debug_mode",
        couples=("deterministic_algorithms", "deterministic_algorithms_warn_only"),
    )  # fmt: skip
    yield knob(
        "utils.deterministic.fill_uninitialized_memory",
        *switch("utils.deterministic.fill_uninitialized_memory"),
        "Whether torch.empty is filled while deterministic_algorithms is on.",
        where="torch.utils.deterministic.fill_uninitialized_memory",
        aliases=("deterministic.fill_uninitialized_memory", "fill_uninitialized_memory"),
    )


def _deterministic(value: bool) -> None:
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(value, warn_only=warn_only)


def _debug_mode(value: Any) -> Any:
    if isinstance(value, str):
        return {"default": 0, "warn": 1, "error": 2}.get(value, value)
    return value


def _threads() -> Iterator[Access]:
    yield knob(
        "num_threads", torch.get_num_threads, torch.set_num_threads,
        "How many threads an operation may use.", type="int", low=1, high=1024, per_thread=True,
        where="torch.set_num_threads", touches=(THREADS.cell("own"), THREADS.cell("later")),
        trap="It is the calling thread's, and what threads begin with that start later; a thread "
        "that has already used torch keeps its own.",
    )  # fmt: skip
    yield query(
        "num_interop_threads",
        torch.get_num_interop_threads,
        "How many threads run operations side by side.",
        type="int",
        where="torch.set_num_interop_threads",
        why_fixed="torch takes it once, before any parallel work, and cannot take it back: call "
        "torch.set_num_interop_threads first of all",
    )
    yield knob(
        "flush_denormal",
        _flushes,
        torch.set_flush_denormal,
        "Whether the CPU treats denormal numbers as zero.",
        per_thread=True,
        where="torch.set_flush_denormal",
        verify=lambda value: _flushes() == value,
        trap="Torch cannot read it; it is seen here by dividing the smallest normal number.",
    )


def _flushes() -> bool:
    smallest_normal = float.fromhex("0x1p-1022")
    return smallest_normal / float(torch.get_num_threads() * 0 + 2) == 0.0


def _numbers() -> Iterator[Access]:
    yield knob(
        "default_dtype",
        lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda value: torch.set_default_dtype(getattr(torch, value)),
        "The dtype of new floating-point tensors.",
        type="str",
        allowed=("float32", "float64", "float16", "bfloat16"),
        convert=_dtype,
        where="torch.set_default_dtype",
    )
    yield query(
        "default_device",
        lambda: str(torch.get_default_device()),
        "Where new tensors are made.",
        type="str",
        where="torch.set_default_device",
        per_thread=True,
        why_fixed="use `with torch.device(...)`, which is a scope of the thread",
    )
    yield knob(
        "sparse.check_sparse_tensor_invariants",
        torch.sparse.check_sparse_tensor_invariants.is_enabled,
        set_sparse_checks,
        "Whether new sparse tensors are checked.",
        where="torch.sparse.check_sparse_tensor_invariants",
    )
    yield knob(
        "warn_always",
        torch.is_warn_always_enabled,
        torch.set_warn_always,
        "Whether torch repeats warnings that it gives once.",
        where="torch.set_warn_always",
    )


def _dtype(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def _autocast_dtype(device: str) -> str:
    return _dtype(torch.get_autocast_dtype(device))


def _gradients() -> Iterator[Access]:
    yield knob(
        "grad_enabled",
        torch.is_grad_enabled,
        set_grad_enabled,
        "Whether operations are recorded for gradients.",
        where="torch.set_grad_enabled",
        per_thread=True,
    )
    yield query(
        "inference_mode",
        torch.is_inference_mode_enabled,
        "Whether new tensors are for inference only.",
        where="torch.inference_mode",
        per_thread=True,
        why_fixed="use `with torch.inference_mode():`",
    )
    yield knob(
        "autograd.multithreading_enabled",
        *switch("autograd.multithreading_enabled"),
        "Whether backward passes use a thread for each device.",
        where="torch.autograd.set_multithreading_enabled",
        per_thread=True,
    )
    yield knob(
        "autograd.anomaly_enabled",
        torch.is_anomaly_enabled,
        lambda value: torch.set_anomaly_enabled(value, torch.is_anomaly_check_nan_enabled()),
        "Whether a backward pass says which forward operation it belongs to.",
        where="torch.autograd.set_detect_anomaly",
    )


def _autocast() -> Iterator[Access]:
    instead = "use `with torch.autocast(...)`, which also empties its cache of cast weights"
    for device in ("cpu", "cuda"):
        yield query(
            f"autocast.{device}.enabled",
            partial(torch.is_autocast_enabled, device),
            f"Whether autocast is on for {device}.",
            where="torch.autocast",
            per_thread=True,
            why_fixed=instead,
        )
        yield query(
            f"autocast.{device}.dtype",
            partial(_autocast_dtype, device),
            f"What autocast casts to on {device}.",
            type="str",
            where="torch.autocast",
            per_thread=True,
            why_fixed=instead,
        )
    yield query(
        "autocast.cache_enabled",
        torch.is_autocast_cache_enabled,
        "Whether autocast keeps cast weights.",
        where="torch.autocast",
        per_thread=True,
        why_fixed=instead,
    )

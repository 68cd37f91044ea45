"""Named sets of knobs: deterministic, fastest, full precision."""

from __future__ import annotations

from typing import Any

import torch

from polyattn import settings
from polyattn.torch.flags.scope import FlagScope, OnConflict
from polyattn.torch.flags.tables import access

__all__ = ["PRESETS", "Preset", "deterministic", "fastest", "full_precision"]


class Preset(FlagScope):
    """A scope with a name. `print(...)` shows what it sets, and what this build does not have."""

    def __init__(self, name: str, changes: dict[str, Any], on_conflict: OnConflict) -> None:
        self.name = name
        self.left_out = {
            knob: why for knob, value in changes.items() if (why := access(knob).lacks(value))
        }
        self.remarks = _REMARKS[name]()
        taken = {knob: value for knob, value in changes.items() if knob not in self.left_out}
        super().__init__(taken, on_conflict)

    def _recreate_cm(self) -> Preset:
        return PRESETS[self.name](on_conflict=self._on_conflict)

    def __repr__(self) -> str:
        return f"{self.name}()"

    def __str__(self) -> str:
        width = max(map(len, (*self.changes, *self.left_out)), default=0)
        lines = [f"{self.name}:"]
        lines += [f"  {knob:<{width}}  {value!r}" for knob, value in self.changes.items()]
        lines += [f"  {knob:<{width}}  left out: {why}" for knob, why in self.left_out.items()]
        lines += [f"  note: {remark}" for remark in self.remarks]
        return "\n".join(lines)


def deterministic(*, on_conflict: OnConflict = "warn") -> Preset:
    """Return a scope in which torch gives the same bits every time, or raises where it cannot.

    >>> with deterministic():
    ...     torch.are_deterministic_algorithms_enabled()
    True
    """
    return Preset("deterministic", _DETERMINISTIC, on_conflict)


def fastest(*, on_conflict: OnConflict = "warn") -> Preset:
    """Return a scope in which torch may take every shortcut that TF32 and 16-bit sums allow.

    float32 keeps its range and is computed with 10 bits of mantissa (TF32) where hardware has it.
    bfloat16 for float32 (``float32_matmul_precision="medium"``) and float16 accumulation are not
    part of it: they are a different class of error.

    >>> fastest().changes["cudnn.benchmark"]
    True
    """
    return Preset("fastest", _FASTEST, on_conflict)


def full_precision(*, on_conflict: OnConflict = "warn") -> Preset:
    """Return a scope in which float32 is computed in float32, and 16-bit products summed in it.

    >>> with full_precision():
    ...     torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32
    ('ieee', False)
    """
    return Preset("full_precision", _FULL, on_conflict)


_DETERMINISTIC: dict[str, Any] = {
    "deterministic_algorithms": True,
    "deterministic_algorithms_warn_only": False,
    "utils.deterministic.fill_uninitialized_memory": True,
    "cudnn.deterministic": True,
    "cudnn.benchmark": False,
    "mkldnn.deterministic": True,
}

# The old names first: torch's getters of them raise where only the new ones are set, and libraries
# inside the scope call those getters (torch's own cudnn.flags() does).
_FASTEST: dict[str, Any] = {
    "float32_matmul_precision": "high",
    "cudnn.allow_tf32": True,
    "cudnn.enabled": True,
    "cudnn.benchmark": True,
    "cudnn.deterministic": False,
    "mkldnn.enabled": True,
    "mkldnn.deterministic": False,
    "nnpack.enabled": True,
    "deterministic_algorithms": False,
    "cuda.matmul.allow_fp16_reduced_precision_reduction": True,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": True,
    "cuda.fp16_bf16_reduction_math_sdp_allowed": True,
    "cuda.flash_sdp_enabled": True,
    "cuda.mem_efficient_sdp_enabled": True,
    "cuda.cudnn_sdp_enabled": True,
    "cuda.math_sdp_enabled": True,
    "mha.fastpath_enabled": True,
    "opt_einsum.enabled": True,
}

_FULL: dict[str, Any] = {
    "float32_matmul_precision": "highest",
    "cudnn.allow_tf32": False,
    "fp32_precision": "ieee",
    "cudnn.fp32_precision": "ieee",
    "mkldnn.fp32_precision": "ieee",
    "cuda.matmul.fp32_precision": "ieee",
    "cudnn.conv.fp32_precision": "ieee",
    "cudnn.rnn.fp32_precision": "ieee",
    "mkldnn.matmul.fp32_precision": "ieee",
    "mkldnn.conv.fp32_precision": "ieee",
    "mkldnn.rnn.fp32_precision": "ieee",
    "cuda.matmul.allow_fp16_reduced_precision_reduction": False,
    "cuda.matmul.allow_bf16_reduced_precision_reduction": False,
    "cuda.matmul.allow_fp16_accumulation": False,
    "cpu.allow_fp16_reduced_precision_reduction": False,
    "cuda.fp16_bf16_reduction_math_sdp_allowed": False,
}


def _unrepeatable() -> list[str]:
    work_space = settings.variable("CUBLAS_WORKSPACE_CONFIG")
    if not torch.backends.cuda.is_built() or work_space in (":4096:8", ":16:8"):
        return []
    stands = "not set" if work_space is None else repr(work_space)
    remark = f"CUBLAS_WORKSPACE_CONFIG is {stands}; some products on CUDA raise unless it is "
    return [f"{remark}:4096:8 (or :16:8) before the program starts"]


def _lowering() -> list[str]:
    on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    return [f"autocast is on for {device} and lowers precision all the same" for device in on]


_REMARKS = {"deterministic": _unrepeatable, "fastest": list, "full_precision": _lowering}

PRESETS = {"deterministic": deterministic, "fastest": fastest, "full_precision": full_precision}

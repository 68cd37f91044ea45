"""What the torch backends of this package declare; imports no framework.

Facts for CPUs were measured with torch 2.13; facts for CUDA were read in torch's source
(`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`) and are marked where a GPU has not
confirmed them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Any

from polyattn.native import instructions, module
from polyattn.problem import Problem
from polyattn.selection.capabilities import ALL_MASKS, Capabilities, Reason, arch_number
from polyattn.selection.registry import Available, Backend, Missing, Probe, Registry

__all__ = ["declare"]

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
HALVES = frozenset({"float16", "bfloat16"})
BIASES = frozenset({"DenseBias", "Alibi"})
LAYOUTS = frozenset({"BTNH", "BNTH", "packed"})


def declare(registry: Registry) -> None:
    """Register this package's torch backends."""
    for backend in (
        _flash(), _efficient(), _cudnn(), _math(), _native_cpu(), _flex(), _reference(),
    ):  # fmt: skip
        registry.register(backend)
    sdpa = ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math")
    registry.group("torch_sdpa", sdpa, framework="torch")


def _torch_probe(cuda_only: bool = False, needs: Callable[[], str | None] | None = None) -> Probe:
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return Missing("torch is not installed", "pip install 'polyattn[torch]'")
    torch = importlib.import_module("torch")
    devices = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    if cuda_only:
        devices.discard("cpu")
        if not torch.backends.cuda.is_built():
            return Missing("this torch is a CPU build", "install a CUDA build of torch")
        if not devices:
            return Missing("torch sees no CUDA device", "run where there is an NVIDIA GPU")
    if needs is not None and (lack := needs()) is not None:
        return Missing(lack, "pip install --upgrade torch")
    return Available(f"torch {torch.__version__}", devices=frozenset(devices))


def _operator_of(backend: str) -> Callable[[], str | None]:
    def lack() -> str | None:
        internals = importlib.import_module("polyattn.torch.internals")
        name = internals.missing_operator(backend)
        return None if name is None else f"torch has no {name}"

    return lack


def _loader(module: str, function: str = "load") -> Callable[[], Any]:
    def load() -> Any:
        return getattr(importlib.import_module(f"polyattn.torch.backends.{module}"), function)()

    return load


def _flash() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, scale=True, sinks=True, gqa=True, lse=True, backward=True,
        deterministic=True, deterministic_backward=True, strided=True, compiled=True,
    )  # fmt: skip
    cuda = Capabilities(
        devices={"cuda"}, dtypes=HALVES, head_dims=(8, 256, 8), archs=(80, 121),
        masks={"Causal"}, scale=True, gqa=True, lse=True, backward=True, dropout=True,
        deterministic=True, strided=True, compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_flash", "torch", (cpu, cuda),
        functools.partial(_torch_probe, needs=_operator_of("sdpa_flash")),
        _loader("sdpa", "load_flash"), _flash_extra, "torch",
        "torch's flash kernels: CPU, and FlashAttention 2 on CUDA",
        _fold_choices, any_lengths=True,
    )  # fmt: skip


def _fold_choices(problem: Problem) -> list[dict[str, bool]]:
    return [{"fold": True}, {"fold": False}] if problem.gqa and problem.device == "cpu" else []


def _flash_extra(p: Problem) -> Iterator[Reason]:
    if p.device != "cuda":
        return
    if p.mask and p.q_len > p.kv_len:  # rows without keys, whose lse would be +inf
        yield Reason("mask", f"a causal mask with T={p.q_len} > S={p.kv_len}", "T <= S")
    if p.mask and p.scale is not None and p.scale <= 0:  # the kernel scales its -inf
        yield Reason("scale", f"{p.scale} with a causal mask", "a scale > 0")
    sm = arch_number(p.arch) if p.arch else 0
    small = 86 <= sm <= 89 or 120 <= sm <= 121
    if p.grad and small and p.head_dim > 192 and (p.head_dim <= 224 or p.dropout_p > 0):
        yield Reason("head dim", f"{p.head_dim} in training on {p.arch}", "at most 192")


def _efficient() -> Backend:
    cuda = Capabilities(
        devices={"cuda"}, dtypes=HALVES | {"float32"}, head_dims=(8, 1 << 16, 8), archs=(50, 121),
        layouts=LAYOUTS, masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, gqa=True,
        value_dim=True, lse=True, backward=True, dropout=True, deterministic=True, strided=True,
        compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_efficient", "torch", cuda,
        functools.partial(
            _torch_probe, cuda_only=True, needs=_operator_of("sdpa_efficient")
        ),
        _loader("sdpa", "load_efficient"), _efficient_extra, "torch",
        "torch's memory-efficient kernel (CUTLASS), CUDA only", any_lengths=True,
    )  # fmt: skip


def _narrow_bias(p: Problem) -> Iterator[Reason]:
    if p.bias is None or p.dtype not in HALVES:
        return
    if p.bias.startswith("Alibi") or p.dtype not in p.bias:
        yield Reason("bias", p.bias, f"biases in {p.dtype}, so that nothing is rounded")


def _efficient_extra(p: Problem) -> Iterator[Reason]:
    yield from _narrow_bias(p)
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
        masks=ALL_MASKS, biases=BIASES, scale=True, gqa=True, lse=True, backward=True,
        strided=True, compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_cudnn", "torch", cuda,
        functools.partial(
            _torch_probe, cuda_only=True, needs=_operator_of("sdpa_cudnn")
        ),
        _loader("sdpa", "load_cudnn"), _cudnn_extra, "torch", "cuDNN's fused attention, CUDA only",
        any_lengths=True,
    )  # fmt: skip


def _cudnn_extra(p: Problem) -> Iterator[Reason]:
    yield from _narrow_bias(p)
    if p.kv_len == 1:
        yield Reason("key length", "1", "2 and more")
    if p.mask and p.mask.signature == "Causal('top_left')" and p.q_len != p.kv_len:
        yield Reason("mask", f"top_left causal with T={p.q_len}, S={p.kv_len}", "equal lengths")
    if p.batch > 65535 or p.heads > 65535:
        yield Reason("grid", f"batch {p.batch}, heads {p.heads}", "at most 65535 of both")


def _math() -> Backend:
    anywhere = Capabilities(
        devices={"cpu", "cuda"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, sinks=True, sinks_grad=True,
        dropout=True, gqa=True, value_dim=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True, compiled=True,
    )  # fmt: skip
    return Backend(
        "sdpa_math", "torch", anywhere,
        functools.partial(_torch_probe, needs=_operator_of("sdpa_math")),
        _loader("sdpa", "load_math"), None, "torch",
        "torch's unfused path: matmul, softmax, matmul; materialises the scores", any_lengths=True,
    )  # fmt: skip


def _native_cpu() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=HALVES | {"float32"}, head_dims=(1, 1024, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True, compiled=True, isolates_compiled=True,
        paged=True,
    )  # fmt: skip
    return Backend(
        "native_cpu", "torch", cpu, _native_probe, _loader("native_cpu.backend"), _native_extra,
        "torch", "the C++ kernels of this package: tiles that a mask empties are skipped, and "
        "scores are never materialised, forward and backward", foretell=instructions.foretell,
        any_lengths=True,
    )  # fmt: skip


def _native_probe() -> Probe:
    found = module.status()
    if isinstance(found, Missing):
        return found
    torch = _torch_probe()
    return torch if isinstance(torch, Missing) else found


def _native_extra(p: Problem) -> Iterator[Reason]:
    if p.paged is not None and (p.grad or p.sinks_grad):
        yield Reason("backward", "paged keys with gradients", "inference only where keys are paged")
    if p.bias_grad and p.bias is not None and p.bias.startswith("Alibi"):
        # it would take an array of all scores, which these kernels are there to avoid
        yield Reason("bias gradient", "slopes of Alibi that need a gradient", "dense biases")
    elif p.bias_grad and p.bias is not None and p.bias.endswith("float64)"):
        yield Reason("bias gradient", f"{p.bias}", "biases of at most 32 bits: it sums in float32")


def _flex() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True,
    )  # fmt: skip
    cuda = Capabilities(  # read in torch's source, not run on a GPU
        devices={"cuda"}, dtypes=HALVES | {"float32"}, head_dims=(16, 256, 1), archs=(75, 121),
        masks=ALL_MASKS, layouts=LAYOUTS, biases=BIASES, scale=True, softcap=True, sinks=True,
        gqa=True, value_dim=True, lse=True, backward=True, deterministic=True, strided=True,
    )  # fmt: skip
    return Backend(
        "flex", "torch", (cpu, cuda), _flex_probe, _loader("flex"), None, "torch",
        "torch's FlexAttention; large problems are compiled for their class and skip masked "
        "blocks, small ones (and on CPUs lse, gradients and float64) run its unfused form, which "
        "materialises the scores",
        _flex_choices,
    )  # fmt: skip


def _flex_probe() -> Probe:
    found = _torch_probe(needs=_has_flex)
    if isinstance(found, Missing):
        return found
    devices = found.devices or frozenset()
    if importlib.util.find_spec("triton") is None:
        devices = devices - {"cuda"}
    detail = ""
    if not any(map(shutil.which, ("g++", "clang++", "cl"))):
        detail = "no C++ compiler found, so on CPUs it runs its unfused form: exact, but slow"
    return Available(found.version, detail, devices)


def _flex_choices(p: Problem) -> list[dict[str, bool]]:
    unfused = p.lse or p.grad or p.bias_grad or p.sinks_grad or p.dtype == "float64"
    return [] if p.device == "cpu" and unfused else [{"compile": True}, {"compile": False}]


def _has_flex() -> str | None:
    found = importlib.util.find_spec("torch.nn.attention.flex_attention")
    return None if found else "torch has no torch.nn.attention.flex_attention"


def _reference() -> Backend:
    anywhere = Capabilities(
        devices={"cpu", "cuda"}, dtypes=FLOATS, head_dims=(1, 1 << 16, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, dropout=True, gqa=True, value_dim=True, lse=True, backward=True,
        deterministic=True, deterministic_backward=True, strided=True, compiled=True,
        isolates_compiled=True, paged=True,
    )  # fmt: skip
    return Backend(
        "reference", "torch", anywhere, _torch_probe, _loader("reference"), None, "torch",
        "the definition, in float64; slow, and right", any_lengths=True,
    )  # fmt: skip

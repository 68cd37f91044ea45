"""The C++ kernels of this package for CPUs; imports no framework."""

from __future__ import annotations

from collections.abc import Iterator

from polyattn.backends.declaring import BIASES, HALVES, LAYOUTS, jax_probe, loader, torch_probe
from polyattn.native import instructions, module
from polyattn.problem import Problem
from polyattn.selection.backend import Backend, Missing, Probe
from polyattn.selection.capabilities import ALL_MASKS, Capabilities, Reason
from polyattn.selection.registry import Registry

__all__ = ["PLACE", "declare"]

PLACE = 10


def declare(registry: Registry) -> None:
    """Register them, for torch and for JAX."""
    registry.register(_native_cpu())
    registry.register(_of_jax())


def _native_cpu() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=HALVES | {"float32"}, head_dims=(1, 1024, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True, compiled=True, isolates_compiled=True,
        paged=True, quantized=True, higher=True,
    )  # fmt: skip
    return Backend(
        "native_cpu", "torch", cpu, _native_probe, loader("native_cpu.torch.native_kernel"),
        _native_extra, "torch",
        "the C++ kernels of this package: tiles that a mask empties are skipped, and "
        "scores are never materialised, forward and backward", foretell=instructions.foretell,
        any_lengths=True,
    )  # fmt: skip


def _native_probe() -> Probe:
    found = module.status()
    if isinstance(found, Missing):
        return found
    torch = torch_probe()
    return torch if isinstance(torch, Missing) else found


def _of_jax() -> Backend:
    cpu = Capabilities(
        devices={"cpu"}, dtypes=HALVES | {"float32"}, head_dims=(1, 1024, 1), layouts=LAYOUTS,
        masks=ALL_MASKS, biases=BIASES, bias_grad=True, scale=True, softcap=True, sinks=True,
        sinks_grad=True, gqa=True, value_dim=True, lse=True, backward=True, deterministic=True,
        deterministic_backward=True, strided=True,
    )  # fmt: skip
    return Backend(
        "native_cpu", "jax", cpu, _jax_probe, loader("native_cpu.jax"), _native_extra, "jax",
        "the C++ kernels of this package, called by compiled code through XLA's foreign function "
        "interface", foretell=instructions.foretell, any_lengths=True,
    )  # fmt: skip


def _jax_probe() -> Probe:
    found = module.status()
    if isinstance(found, Missing):
        return found
    jax = jax_probe()
    return jax if isinstance(jax, Missing) else found


_LARGEST_SCALE = 2.0**127  # the kernels multiply it by log2(e), in float32
_SMALLEST_CAP = 2.0**-126


def _native_extra(p: Problem) -> Iterator[Reason]:
    if p.scale is not None and abs(p.scale) > _LARGEST_SCALE:
        yield Reason("scale", f"scale={p.scale:g}", f"scales up to {_LARGEST_SCALE:.3g}")
    if p.softcap is not None and p.softcap < _SMALLEST_CAP:
        yield Reason("soft cap", f"softcap={p.softcap:g}", f"caps from {_SMALLEST_CAP:.3g} on")
    if p.paged is not None and (p.grad or p.sinks_grad):
        yield Reason("backward", "paged keys with gradients", "inference only where keys are paged")
    if p.quantized is not None and (p.grad or p.bias_grad or p.sinks_grad):
        yield Reason("backward", "quantised keys with gradients", "inference only on codes of keys")
    if p.higher and (p.paged is not None or p.quantized is not None):
        form = "in pages" if p.paged is not None else "as codes"
        yield Reason("derivatives", f"function transforms and keys {form}", "plain calls of them")
    if not p.bias_grad or (bias := p.bias_structure) is None:
        return
    if bias.kind == "Alibi":
        # it would take an array of all scores, which these kernels are there to avoid
        yield Reason("bias gradient", "slopes of Alibi that need a gradient", "dense biases")
    elif bias.arguments[1] == "float64":
        yield Reason("bias gradient", f"{p.bias}", "biases of at most 32 bits: it sums in float32")

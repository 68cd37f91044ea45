"""What declarations of kernels share: sets of dtypes and layouts, probes, loaders."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from polyattn.selection.backend import Available, Missing, Probe

__all__ = [
    "BIASES", "FLOATS", "HALVES", "JAX_DEVICES", "LAYOUTS", "jax_probe", "loader", "operator_of",
    "torch_probe",
]  # fmt: skip

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
HALVES = frozenset({"float16", "bfloat16"})
BIASES = frozenset({"DenseBias", "Alibi"})
LAYOUTS = frozenset({"BTNH", "BNTH", "packed"})
JAX_DEVICES = frozenset({"cpu", "cuda", "rocm", "tpu"})


def torch_probe(
    cuda_only: bool = False, needs: Callable[[], str | None] | None = None, meta: bool = False
) -> Probe:
    """Say whether torch is here, on which devices, and with what the kernel `needs` of it.

    `meta`: it also runs on tensors without values.
    """
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        return Missing("torch is not installed", "pip install 'polyattn[torch]'")
    torch = importlib.import_module("torch")
    devices = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    devices |= {"meta"} if meta else set()
    if cuda_only:
        devices.discard("cpu")
        if not torch.backends.cuda.is_built():
            return Missing("this torch is a CPU build", "install a CUDA build of torch")
        if not devices:
            return Missing("torch sees no CUDA device", "run where there is an NVIDIA GPU")
    if needs is not None and (lack := needs()) is not None:
        return Missing(lack, "pip install --upgrade torch")
    return Available(f"torch {torch.__version__}", devices=frozenset(devices))


def jax_probe(accelerators_only: bool = False) -> Probe:
    """Say whether JAX is here, and on which devices."""
    if "jax" not in sys.modules and importlib.util.find_spec("jax") is None:
        return Missing("JAX is not installed", "pip install 'polyattn[jax]'")
    jax = importlib.import_module("jax")
    if not hasattr(jax, "make_user_context"):
        how = "pip install --upgrade 'jax>=0.8'"
        return Missing(f"JAX {jax.__version__} is too old: polyattn asks for 0.8", how)
    kind_of = importlib.import_module("polyattn.jax.kit.devices").kind_of
    devices = {"cpu"} | {kind_of(device) for device in jax.devices()}
    if accelerators_only and devices == {"cpu"}:
        return Missing("JAX sees no accelerator", "run where there is a GPU or a TPU")
    return Available(f"jax {jax.__version__}", devices=frozenset(devices))


def operator_of(backend: str) -> Callable[[], str | None]:
    """Return what says which operator of torch a backend lacks here, if any."""

    def lack() -> str | None:
        internals = importlib.import_module("polyattn.torch.internals")
        name = internals.missing_operator(backend)
        return None if name is None else f"torch has no {name}"

    return lack


def loader(module: str, function: str = "load") -> Callable[[], Any]:
    """Return what imports a kernel's implementation, such as ``sdpa.torch``, when it is loaded."""

    def load() -> Any:
        return getattr(importlib.import_module(f"{__package__}.{module}"), function)()

    return load

"""Every architecture of transformers and diffusers that can be built small, offloaded.

They are those of ``polyattn bench models``, with more layers, so that blocks come and go.
"""

from __future__ import annotations

import importlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.bench.models.model_row import Row
from polyattn.bench.offload.situations import tried

__all__ = ["PACKAGES", "built", "examine", "names"]

PACKAGES = ("transformers", "diffusers")
_LAYERS = 4
_MOST_WEIGHTS = 20_000_000
"""A model is copied some times, and written to a disk."""
_REASON = 240

_NO_TRANSFORMERS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "UNet2DConditionModel": (
        {
            "block_out_channels": (4, 8), "norm_num_groups": 4, "layers_per_block": 2,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "cross_attention_dim": 8,
            "attention_head_dim": 2, "out_channels": 4, "in_channels": 4, "sample_size": 16,
        },
        {"sample": (1, 4, 16, 16), "timestep": (1,), "encoder_hidden_states": (1, 6, 8)},
    ),
    "AutoencoderKL": (
        {
            "block_out_channels": [4, 8, 8], "in_channels": 3, "out_channels": 3,
            "down_block_types": ["DownEncoderBlock2D"] * 3,
            "up_block_types": ["UpDecoderBlock2D"] * 3, "latent_channels": 4, "norm_num_groups": 4,
        },
        {"sample": (1, 3, 16, 16)},
    ),
}  # fmt: skip
"""Of diffusers, beside its transformers: the configuration, and the inputs' shapes."""


def names(package: str) -> list[str]:
    """Return what is tried of a package, each as ``package/name``."""
    listed = importlib.import_module(f"polyattn.bench.models.{package}_models.model_classes")
    others = list(_NO_TRANSFORMERS) if package == "diffusers" else []
    return [f"{package}/{name}" for name in (*listed.model_types(), *others)]


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """Build one of :func:`names`; raises whatever keeps it from being built or from running."""
    package, _, kind = name.partition("/")
    model, inputs = _of_diffusers(kind) if package == "diffusers" else _of_transformers(kind)
    with torch.no_grad():
        model(**inputs)
    return model.eval().requires_grad_(False), inputs


def _of_transformers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from polyattn.bench.models.transformers_models.building import built as small

    found = small(name, _LAYERS, _MOST_WEIGHTS)
    for module in found.model.modules():  # a block that is called twice appends to them twice
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
    return found.model, found.cases["unpadded"][0]


def _of_diffusers(name: str) -> tuple[nn.Module, dict[str, Any]]:
    from polyattn.bench.models.diffusers_models.building import built as small

    if name in _NO_TRANSFORMERS:
        configuration, shapes = _NO_TRANSFORMERS[name]
        torch.manual_seed(0)
        model = getattr(importlib.import_module("diffusers"), name)(**configuration)
        return model, {key: torch.randn(shape) for key, shape in shapes.items()}
    try:
        return small(name, _LAYERS)
    except Exception:  # a recipe whose lists go with its number of layers
        return small(name)


def examine(name: str) -> Row:
    """Offload one model and try every situation; ``extra`` has those after which bits differ."""
    library = importlib.import_module(name.partition("/")[0])
    library.utils.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        model, inputs = built(name)
    except Exception as error:  # a model that cannot be built says nothing of offload
        text = " ".join(str(error).split())
        return Row(name, "not built", f"{type(error).__name__}: {text}"[:_REASON])
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = tried(model, inputs, Path(folder))
        except Exception as error:  # one that cannot be offloaded is a result
            found = {"attach": f"{type(error).__name__}: {error}"}
    if found == {"plain": "nothing to stream"}:
        return Row(name, "one block", model=type(model).__name__)
    wrong = {situation: verdict for situation, verdict in found.items() if verdict != "same"}
    same = tuple(situation for situation in found if situation not in wrong)
    outcome = "different" if wrong else "equal"
    return Row(name, outcome, model=type(model).__name__, cases=same, extra=wrong)

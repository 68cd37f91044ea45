"""Every architecture of transformers that can be built small from its configuration alone."""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Built", "built", "names"]

_SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "embedding_size": 32, "hidden_dim": 32, "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4,
    "num_layers": 4, "encoder_layers": 3, "decoder_layers": 3, "num_decoder_layers": 3,
    "num_encoder_layers": 3, "depth": 4, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "n_inner": 64,
    "decoder_ffn_dim": 64, "d_ff": 64, "d_kv": 8, "vocab_size": 128, "max_position_embeddings": 64,
    "n_positions": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_intermediate_size": 32, "num_experts_per_tok": 2, "image_size": 32, "patch_size": 8,
    "projection_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "type_vocab_size": 2,
    "decoder_start_token_id": 1, "num_channels": 3, "kv_lora_rank": 8, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "rotary_dim": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_VARIANTS: tuple[dict[str, int], ...] = ({}, {"num_key_value_heads": 4, "head_dim": 0})
"""Sizes that are others where the first do not run; 0: as the configuration has it."""
_MOST_WEIGHTS = 20_000_000


class Built:
    """A model, its twin with the same weights, and inputs that both take."""

    def __init__(self, name: str, model: nn.Module, inputs: dict[str, Any]) -> None:
        self.name = name
        self.model = model
        self.inputs = inputs


def names() -> list[str]:
    """Return the model types that transformers knows."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    return sorted(auto.CONFIG_MAPPING_NAMES)


def built(name: str) -> Built:
    """Build a model type small; raises whatever keeps it from being built or from running."""
    transformers = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    failure: Exception | None = None
    for variant in _VARIANTS:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _built(transformers, name, variant)
        except Exception as error:  # the next variant may do
            failure = failure or error
    assert failure is not None
    raise failure


def _built(transformers: Any, name: str, variant: dict[str, int]) -> Built:
    config = transformers.AutoConfig.for_model(name)
    _shrink(config, {**_SIZES, **variant})
    with torch.device("meta"):
        weights = sum(p.numel() for p in _model(transformers, config).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights, though its configuration was made small")
    torch.manual_seed(0)
    model = _model(transformers, config).eval().requires_grad_(False)
    for inputs in _inputs(config):
        with contextlib.suppress(Exception), torch.no_grad():
            model(**inputs)
            return Built(name, model, inputs)
    raise ValueError("no inputs that were tried suit it")


def _model(transformers: Any, config: Any) -> nn.Module:
    made: nn.Module = transformers.AutoModel.from_config(config)
    return made


def _shrink(config: Any, sizes: dict[str, int]) -> None:
    for key, size in sizes.items():
        if size and isinstance(getattr(config, key, None), int):
            with contextlib.suppress(Exception):
                setattr(config, key, size)
    layers = getattr(config, "num_hidden_layers", 4)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, key, None)
        if isinstance(kinds, list):
            with contextlib.suppress(Exception):
                setattr(config, key, kinds[:layers])
    for value in list(vars(config).values()):
        if hasattr(value, "model_type"):
            _shrink(value, sizes)


def _inputs(config: Any) -> Iterator[dict[str, Any]]:
    ids = torch.arange(3, 12)[None] % 100
    side = getattr(getattr(config, "vision_config", config), "image_size", 32)
    side = side if isinstance(side, int) else 32
    picture = torch.linspace(-1, 1, 3 * side * side).view(1, 3, side, side)
    sound = torch.linspace(-1, 1, 16000)[None]
    yield {"input_ids": ids}
    yield {"input_ids": ids, "decoder_input_ids": ids[:, :5]}
    yield {"pixel_values": picture}
    yield {"input_ids": ids, "pixel_values": picture}
    yield {"input_values": sound}
    yield {"input_features": torch.zeros(1, 80, 3000), "decoder_input_ids": ids[:, :5]}
    yield {"inputs_embeds": torch.zeros(1, 9, getattr(config, "hidden_size", 32))}

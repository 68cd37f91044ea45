"""Small models of transformers with random weights, large enough that every mask shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

from polyattn import record_selections
from polyattn.bench.models.nearness import compare, tensors_of

WORDS = 96
_TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_KINDS = ["sliding_attention", "full_attention"]
_PICTURE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4,
}  # fmt: skip
_BOTH: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip


def _text(**more: Any) -> dict[str, Any]:
    return _TEXT | more


_MADE: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TEXT)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=128,
                      bos_token_id=1, eos_token_id=2, pad_token_id=0)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(
        hf.Gemma2Config(**_text(query_pre_attn_scalar=8, sliding_window=5, layer_types=_KINDS,
                                attn_logit_softcapping=1.5))),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_text(query_pre_attn_scalar=8, sliding_window=5,
                                    layer_types=_KINDS))),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**_text(sliding_window=5, layer_types=_KINDS, num_local_experts=2,
                                num_experts_per_tok=2))),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**_text(sliding_window=5))),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(**_text(attention_chunk_size=6, num_local_experts=2,
                                    intermediate_size_mlp=48, no_rope_layers=[1, 0],
                                    layer_types=["chunked_attention", "full_attention"]))),
    "bert": lambda: hf.BertModel(
        hf.BertConfig(**{k: v for k, v in _TEXT.items() if "key_value" not in k})),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**_PICTURE)),
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(text_config={k: v for k, v in _TEXT.items() if "key_value" not in k},
                      vision_config=_PICTURE, projection_dim=16)),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(vocab_size=WORDS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                    relative_attention_num_buckets=8, decoder_start_token_id=1, pad_token_id=0,
                    eos_token_id=2)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**_BOTH)),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(**_BOTH, num_mel_bins=8, max_source_positions=12,
                         max_target_positions=64, suppress_tokens=None,
                         begin_suppress_tokens=None)),
    "paligemma": lambda: hf.PaliGemmaModel(
        hf.PaliGemmaConfig(text_config={**_TEXT, "model_type": "gemma"},
                           vision_config={**_PICTURE, "model_type": "siglip_vision_model"},
                           projection_dim=32, image_token_id=WORDS - 1)),
}  # fmt: skip

TEXT = ("llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "mistral", "llama4")
"""The names of those that continue a text."""


def small(name: str) -> Any:
    """Return the model, in eval mode, on transformers' own eager attention."""
    torch.manual_seed(11)
    model = _MADE[name]().eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for part in model.parameters():
            if part.dim() > 1:
                part.normal_(std=part[0].numel() ** -0.5)
            else:
                part.add_(torch.randn_like(part), alpha=0.2)
    model.set_attn_implementation("eager")
    return model


def words(batch: int, length: int) -> torch.Tensor:
    return torch.arange(batch * length).view(batch, length) * 7 % (WORDS - 10) + 3


def padding(batch: int, length: int, side: str) -> torch.Tensor:
    """A padding mask in which the first row has three tokens fewer."""
    mask = torch.ones(batch, length, dtype=torch.long)
    if side == "left":
        mask[0, :3] = 0
    elif side == "right":
        mask[0, -3:] = 0
    return mask


def ours(model: Any, run: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Run with the model on polyattn; returns the result and what was selected."""
    before = model.config._attn_implementation
    model.set_attn_implementation("polyattn")
    try:
        with record_selections() as ran:
            return run(), ran
    finally:
        model.set_attn_implementation(before)


def masks_of(ran: list[Any]) -> set[str]:
    """Return the masks that calls had, as they are written."""
    return {one.problem.mask.signature if one.problem.mask else "none" for one in ran}


def kinds_of(ran: list[Any]) -> set[str]:
    """Return the classes of masks that calls had."""
    return set().union(*(one.problem.mask.kinds for one in ran if one.problem.mask))


def agree(got: Any, stock: Any, exact: dict[str, torch.Tensor], valid: Any = None) -> None:
    """Fail unless what came out is as near to float64 as what came out of eager attention."""
    compared = compare(tensors_of(got), tensors_of(stock), exact, valid)
    assert compared.excess is None, compared

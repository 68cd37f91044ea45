"""Language models of transformers, small and with their real code, and what they are run on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["bert", "gpt2", "llama", "mamba", "mixtral", "t5", "tokens"]

VOCABULARY = 96


def tokens(length: int, seed: int, batch: int = 2) -> Tensor:
    """Return token ids of shape (batch, length), none of them special."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCABULARY, (batch, length), generator=source)


def _padded(length: int, batch: int = 2) -> Tensor:
    """A mask in which each further row is two tokens shorter."""
    return torch.stack([(torch.arange(length) < length - 2 * row).long() for row in range(batch)])


def llama(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Llama: grouped heads, rotary positions, a gated MLP."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        attn_implementation="sdpa",
        rms_norm_eps=1e-5,
        attention_bias=True,
    )
    return LlamaForCausalLM(config), {"input_ids": tokens(11, seed), "use_cache": False}


def gpt2(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2: transposed and fused projections, learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=48,
        n_layer=3,
        n_head=4,
        attn_implementation="sdpa",
    )
    return GPT2LMHeadModel(config), {"input_ids": tokens(13, seed), "use_cache": False}


def bert(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """BERT: norms after the residual, padding."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    ids = tokens(12, seed)
    return BertForMaskedLM(config), {"input_ids": ids, "attention_mask": _padded(12)}


def t5(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """T5: encoder and decoder, biases by relative position, no scale in the softmax."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=56, d_kv=12, d_ff=80, num_layers=2, num_decoder_layers=2,
        num_heads=4, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
        tie_word_embeddings=True,
    )  # fmt: skip
    inputs = {
        "input_ids": tokens(12, seed),
        "attention_mask": _padded(12),
        "decoder_input_ids": tokens(9, seed + 1),
        "use_cache": False,
    }
    return T5ForConditionalGeneration(config), inputs


def mixtral(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Mixtral: each token goes to two of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=72, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=None, attn_implementation="sdpa",
    )  # fmt: skip
    return MixtralForCausalLM(config), {"input_ids": tokens(10, seed), "use_cache": False}


def mamba(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """Mamba: a state-space model, no attention."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=40,
        state_size=8,
        num_hidden_layers=3,
        conv_kernel=4,
        expand=2,
        time_step_rank=6,
    )
    return MambaForCausalLM(config), {"input_ids": tokens(10, seed), "use_cache": False}

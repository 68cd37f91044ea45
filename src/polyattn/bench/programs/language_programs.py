"""Language models of transformers, made from their configurations with seeded weights.

Few layers and a small vocabulary, so that a run takes about a second; heads, head dims, windows
and lengths are those of models that people run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polyattn.bench.programs.switched_program import Program, of_transformers

__all__ = ["LANGUAGE", "Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Of a model: `width` of a token, heads, `length` of the text, its `window` and `batch`."""

    width: int = 512
    inner: int = 1024
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    length: int = 2048
    window: int = 512
    batch: int = 1
    fresh: int = 200
    vocabulary: int = 1024


def _decoder(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": sizes.vocabulary, "hidden_size": sizes.width,
        "intermediate_size": sizes.inner, "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "max_position_embeddings": 8192, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip


def _llama(sizes: Sizes) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_decoder(sizes)))


def _gemma_2(sizes: Sizes) -> Any:
    """Gemma 2: capped scores, and every other layer looks at a window."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        **_decoder(sizes), sliding_window=sizes.window, attn_logit_softcapping=50.0,
        query_pre_attn_scalar=sizes.head_dim,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


def _gpt_oss(sizes: Sizes) -> Any:
    """GPT-OSS: a sink in every head, and every other layer looks at a window."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **_decoder(sizes), sliding_window=128, num_local_experts=4, num_experts_per_tok=2
    )
    return GptOssForCausalLM(config)


def _mistral(sizes: Sizes) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**_decoder(sizes), sliding_window=sizes.window))


def _bert(sizes: Sizes) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=sizes.vocabulary, hidden_size=sizes.width, num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads, intermediate_size=sizes.inner,
        max_position_embeddings=sizes.length,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False)


def _made(make: Callable[[Sizes], Any], sizes: Sizes, dtype: str, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make(sizes).eval().to(getattr(torch, dtype))


def _text(sizes: Sizes, seed: int) -> Tensor:
    source = torch.Generator().manual_seed(seed + 1)
    return torch.randint(4, sizes.vocabulary, (sizes.batch, sizes.length), generator=source)


def _prefill(make: Callable[[Sizes], Any]) -> Callable[[Sizes, str, int], Program]:
    def build(sizes: Sizes, dtype: str, seed: int) -> Program:
        model, ids = _made(make, sizes, dtype, seed), _text(sizes, seed)

        @torch.inference_mode()
        def step() -> Tensor:
            return model(input_ids=ids, use_cache=False, logits_to_keep=64).logits.float()

        return of_transformers(model, step)

    return build


def _padded(sizes: Sizes, dtype: str, seed: int) -> Program:
    """Texts of many lengths in one batch, padded on the right to the longest, as is usual."""
    model, ids = _made(_bert, sizes, dtype, seed), _text(sizes, seed)
    shortest = max(1, sizes.length // 8)
    lengths = torch.linspace(shortest, sizes.length, sizes.batch).long()
    present = torch.arange(sizes.length)[None] < lengths[:, None]

    @torch.inference_mode()
    def step() -> Tensor:
        return model(input_ids=ids, attention_mask=present.long()).last_hidden_state.float()

    return of_transformers(model, step, present)


def _generate(sizes: Sizes, dtype: str, seed: int) -> Program:
    """Tokens are sampled from no one's logits: of a step the logits of its prompt are compared."""
    model, ids = _made(_llama, sizes, dtype, seed), _text(sizes, seed)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def step() -> Tensor:
        told = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=sizes.fresh,
            do_sample=False, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        return told.logits[0].float()

    return of_transformers(model, step)


LANGUAGE: Mapping[str, tuple[Callable[[Sizes, str, int], Program], Sizes]] = {
    "llama prefill 2k": (_prefill(_llama), Sizes()),
    "gemma-2 prefill 4k": (_prefill(_gemma_2), Sizes(length=4096, heads=4, head_dim=128)),
    "gpt-oss prefill 2k": (_prefill(_gpt_oss), Sizes(inner=512)),
    "mistral window prefill 4k": (_prefill(_mistral), Sizes(length=4096)),
    "bert padded batch": (_padded, Sizes(length=512, batch=16, kv_heads=8)),
    "llama generate 1k + 200": (_generate, Sizes(length=1024)),
}
"""Each program: what builds it, and its usual sizes."""

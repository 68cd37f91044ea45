"""What models hand to their attention besides tensors, and what of it says nothing about it.

Nothing that means something is passed over: a name that is not here is an error.
"""

from __future__ import annotations

from typing import Any

from polyattn.errors import Unsupported

__all__ = ["OF_OTHERS", "refuse_unknown"]

OF_OTHERS = frozenset({
    # read by the model around the attention, and handed on with everything else
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "return_dict",
    "use_cache", "cache_position", "position_ids", "input_ids", "logits_to_keep", "seq_idx",
    "grid_thw", "mm_token_type_ids",
    # of a tokenizer's batch or a Trainer's, for models that know them; others hand them on
    "token_type_ids", "special_tokens_mask", "offset_mapping", "length", "overflowing_tokens",
    "num_truncated_tokens", "overflow_to_sample_mapping", "labels", "label", "label_ids",
    "start_positions", "end_positions", "return_loss",
    # put there by transformers, from the configuration of a part that sees pictures
    "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio",
    # what the mask says already: it is made of the same config
    "sliding_window", "is_causal",
    # the lengths of what `cu_seq_lens_q` and `cu_seq_lens_k` say
    "max_length_q", "max_length_k",
})  # fmt: skip
"""Names that ask nothing of an attention function."""


def refuse_unknown(given: dict[str, Any], known: frozenset[str]) -> None:
    """Raise for a keyword that is not `known`, unless it says nothing (None or False)."""
    for name, value in given.items():
        if name in known or name in OF_OTHERS or value is None or value is False:
            continue
        if name == "output_attentions":
            raise Unsupported(
                "got output_attentions=True, expected it unset: no probabilities are ever made "
                'here. Use model.set_attn_implementation("eager") for them.'
            )
        raise Unsupported(
            f"got the keyword {name}={type(value).__name__} for attention, which polyattn does "
            "not know; expected none that could change a result. Use another attn_implementation "
            "for this model, and report the name."
        )

"""A configuration made small, of any model: by what its fields mean, told from their names.

Widths are divided by one number, so that what is a sum, a product or an equal of others stays
so. Of the layers one of each kind is kept. Windows and chunks become shorter than the inputs, and
soft caps low, so that they matter.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

__all__ = ["VOCABULARY", "shrink", "ways"]

VOCABULARY = 384
_WIDTHS_BY, _HEADS_BY = 16, 4
_MOST_LAYERS = 5
_PATCHES = 4
_LONG = 40  # from this value on a field is a width, and not a count

_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|(encoder|decoder)_(num_)?(hidden_)?layers|depth"
    r"|num_(encoder|decoder)_layers|num_hidden_layers_\w+|layers|num_blocks)$"
)
_HEADS = re.compile(r"(^|_)(heads?|n_heads?|num_heads|attention_heads|num_query_groups)$|_heads$")
_HEAD_WIDTHS = re.compile(r"(head_dim|d_kv|rotary_dim|head_size|head_width)$|^kv_channels$")
_WIDTHS = re.compile(
    r"(hidden|intermediate|embed|embedding|ffn|mlp|proj|projection|inner|model|latent|feature|"
    r"lora|expert|output|inter|neck|fpn|width|adapter|text|vision|audio|decoder|encoder|rank)"
    r"\w*_?(size|dim|dims|channels|rank|width)?$|^(d_model|n_embd|dim|d_ff|width|n_inner)$"
    r"|_(dim|rank)$|(hidden|intermediate|embedding)_size"
)
_NO_WIDTHS = re.compile(
    r"vocab|image|patch|position|window|kernel|token|num_|max_|block|codebook|chunk|stride|"
    r"layer|scale|pool|length|grid|mel|bins|factor|_id$|type|level|range|ratio|(^|_)n_|index"
)
_EXPERTS = re.compile(r"^(num_(local_)?experts|n_routed_experts|moe_num_experts|num_moe_experts)$")
_OTHER: dict[str, Any] = {
    "sliding_window": 5, "attention_chunk_size": 6, "local_attention": 8, "sliding_window_size": 5,
    "num_experts_per_tok": 2, "num_experts_per_token": 2, "moe_topk": 2, "moe_top_k": 2,
    "top_k_experts": 2, "moe_k": 2, "n_group": 2, "topk_group": 1, "index_topk": 4,
    "attn_logit_softcapping": 2.0, "first_k_dense_replace": 1, "max_window_layers": 0,
    "max_position_embeddings": 512, "n_positions": 512, "max_target_positions": 512,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0, "moe_layer_freq": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
    "depth_coefficient": 1.0,
}  # fmt: skip


def shrink(config: Any, layers: int = 2) -> None:
    """Make a configuration, and those in it, small in place, of `layers` layers at least."""
    _Shrinking(_by_division, layers).of(config)


def keep_widths(config: Any, layers: int = 2) -> None:
    """Keep only few layers and words; everything else is as it was."""
    _Shrinking(lambda name, value: None, layers).of(config)


def set_sizes(config: Any, layers: int = 2) -> None:
    """Set the sizes that most configurations have to numbers that suit each other."""
    _Shrinking(lambda name, value: _SIZES.get(name), layers).of(config)


def shrink_pictures(config: Any) -> None:
    """Give the parts that see pictures small ones: of a few patches a side."""
    side, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if type(side) is int and type(patch) is int and side > _PATCHES * patch:
        with contextlib.suppress(Exception):
            config.image_size = _PATCHES * patch
    for part in list(vars(config).values()):
        if hasattr(part, "model_type"):
            shrink_pictures(part)


def share_rotations(config: Any) -> None:
    """Share the rotary pairs out among time, height and width, where no configuration says how."""
    rope, heads = (
        getattr(config, name, None) for name in ("rope_parameters", "num_attention_heads")
    )
    if isinstance(rope, dict) and type(heads) is int:
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        third, rest = divmod(int(width * rope.get("partial_rotary_factor", 1.0)) // 2, 3)
        config.rope_parameters = rope | {"mrope_section": [third + rest, third, third]}
    for part in list(vars(config).values()):
        if hasattr(part, "model_type"):
            share_rotations(part)


def _both(first: Callable[[Any], None], then: Callable[[Any], None]) -> Callable[[Any], None]:
    def way(config: Any) -> None:
        first(config)
        then(config)

    return way


def ways(layers: int = 2) -> tuple[Callable[[Any], None], ...]:
    """Return how a configuration is made small; the first that gives a model that runs is taken."""
    divide, set_all, keep = (
        functools.partial(how, layers=layers) for how in (shrink, set_sizes, keep_widths)
    )
    return (
        _both(divide, shrink_pictures), _both(_both(divide, share_rotations), shrink_pictures),
        _both(set_all, shrink_pictures), divide, set_all, keep,
    )  # fmt: skip


_SIZES = {
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "dim": 64, "embed_dim": 64,
    "word_embed_proj_dim": 64, "embedding_size": 64, "hidden_dim": 64, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 96, "ffn_dim": 96, "encoder_ffn_dim": 96, "n_inner": 96,
    "decoder_ffn_dim": 96, "d_ff": 96, "d_kv": 16, "moe_intermediate_size": 32,
    "projection_dim": 64, "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "qk_head_dim": 32, "v_head_dim": 16, "rotary_dim": 8,
}  # fmt: skip


def _by_division(name: str, value: int) -> int | None:
    if _HEAD_WIDTHS.search(name):
        return max(value // (_WIDTHS_BY // _HEADS_BY), 4) if value >= 16 else None
    if _HEADS.search(name):
        return max(value // _HEADS_BY, 1)
    if value >= _LONG and _WIDTHS.search(name) and not _NO_WIDTHS.search(name):
        return max(value // _WIDTHS_BY, 4)
    return None


class _Shrinking:
    def __init__(
        self, width: Callable[[str, int], int | None], least: int,
        ids: dict[int, int] | None = None,
    ) -> None:  # fmt: skip
        self._width, self._least = width, least
        self._ids = {} if ids is None else ids  # of special tokens, in the small vocabulary
        self._layers = 0

    def of(self, config: Any) -> None:
        apart = _taken_out(config)
        _fill(config)
        self._layers = _layer_count(config)
        kept = _kept_layers(config, self._layers, self._least)
        for name, value in list(vars(config).items()):
            if hasattr(value, "model_type"):
                _Shrinking(self._width, self._least, self._ids).of(value)
            else:
                found = self._changed(name, value, kept)
                if found is not None:
                    with contextlib.suppress(Exception):
                        setattr(config, name, found)
        if apart:
            config.per_layer_config = {
                i: {name: self._small(name, value, kept) for name, value in apart[place].items()}
                for i, place in enumerate(kept)
                if place in apart
            }

    def _small(self, name: str, value: Any, kept: tuple[int, ...]) -> Any:
        found = self._changed(name, value, kept)
        return value if found is None else found

    def _changed(self, name: str, value: Any, kept: tuple[int, ...]) -> Any:
        if isinstance(value, bool) or name.startswith("_"):
            return None
        if name in _OTHER and isinstance(value, (int, float)):
            return min(value, _OTHER[name])
        if isinstance(value, int):
            return self._number(name, value, len(kept))
        if isinstance(value, list) and value:
            return self._list(name, value, kept)
        if isinstance(value, dict) and "mrope_section" in value:
            return value | {"mrope_section": [x // 4 for x in value["mrope_section"]]}
        return None

    def _number(self, name: str, value: int, layers: int) -> int | None:
        if name.endswith(("token_id", "token_index", "_id")):
            return self._token(value)
        if "vocab_size" in name and value > VOCABULARY:
            return VOCABULARY
        if _LAYERS.search(name):
            return min(value, layers)
        if _EXPERTS.search(name):
            return min(value, 8)
        return self._width(name, value)

    def _token(self, value: int) -> int | None:
        if value < VOCABULARY - 100:
            return None
        return self._ids.setdefault(value, VOCABULARY - 1 - len(self._ids) % 90)

    def _list(self, name: str, value: list[Any], kept: tuple[int, ...]) -> list[Any] | None:
        if len(value) == self._layers > len(kept):
            return [value[i] for i in kept]
        if all(isinstance(x, int) and not isinstance(x, bool) for x in value):
            if name.endswith("mrope_section"):
                return [x // 4 for x in value]
            if name.endswith("token_id"):
                return [x if self._token(x) is None else self._token(x) for x in value]
        return None


_NEEDED = {
    "vocab_size": VOCABULARY, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "pad_token_id": 0,
}  # fmt: skip


def _taken_out(config: Any) -> dict[int, dict[str, Any]]:
    """Take what single layers have of their own out of a configuration, and return it by layer."""
    names = getattr(config, "per_layer_attributes", None)
    if not names:
        return {}
    layers = enumerate(config.per_layer_config)
    found = {i: {name: getattr(layer, name, None) for name in names} for i, layer in layers}
    config.per_layer_config = None
    return found


def _fill(config: Any) -> None:
    """Say what a configuration leaves open, and its models need: as every checkpoint of it does."""
    heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
    if type(heads) is not int or type(width) is not int:
        return
    missing = {"num_key_value_heads": heads, "head_dim": width // max(heads, 1)} | _NEEDED
    for name, value in missing.items():
        if getattr(config, name, 0) is None:
            with contextlib.suppress(Exception):
                setattr(config, name, value)


def _layer_count(config: Any) -> int:
    for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        count = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return 0


def _kept_layers(config: Any, count: int, least: int) -> tuple[int, ...]:
    """Return which layers are kept: the first of each kind, and `least` at least."""
    lists = [
        value
        for value in vars(config).values()
        if isinstance(value, list) and len(value) == count > 0 and isinstance(value[0], (str, bool))
    ]
    kinds = [str(kind) for kind in zip(*lists, strict=True)] if lists and count > 2 else []
    first = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    places = sorted(first.values())[:_MOST_LAYERS]
    if len(places) < 2 and least == 2:
        return (0, 1)
    others = [place for place in range(max(count, least)) if place not in places]
    return tuple(sorted(places + others[: max(least - len(places), 0)]))

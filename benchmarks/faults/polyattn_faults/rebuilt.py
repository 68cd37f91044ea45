"""Ports of another make: other names, wrappers, extra modules, fused and split projections."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyattn.torch.internals import children_of, set_children

__all__ = [
    "channels_last", "functional", "fused", "other_name", "renamed", "split", "with_extras",
    "wrapped",
]  # fmt: skip

_NAMES = {
    "model": "net", "layers": "blocks", "self_attn": "attention", "q_proj": "wq", "k_proj": "wk",
    "v_proj": "wv", "o_proj": "wo", "mlp": "ffn", "embed_tokens": "tok_embeddings",
    "transformer_blocks": "double", "attn1": "self_attention", "attn2": "cross_attention",
    "to_q": "q", "to_k": "k", "to_v": "v", "conv1": "conv_in_block", "norm1": "pre_norm",
    "norm2": "mid_norm", "resnets": "res", "encoder": "enc", "decoder": "dec", "ln_1": "norm_1",
    "c_fc": "up", "query": "q", "key": "k", "value": "v", "dense": "proj", "lm_head": "head",
    "down_blocks": "downs", "up_blocks": "ups", "block": "stages", "mixer": "ssm", "fc1": "up",
    "linear_1": "lin_a", "linear_2": "lin_b", "ff": "ffn", "SelfAttention": "attn",
}  # fmt: skip


def other_name(name: str) -> str:
    """The name that a module has in a renamed port."""
    return ".".join(_NAMES.get(part, part) for part in name.split("."))


def renamed(model: nn.Module) -> nn.Module:
    """Modules registered under other names and of classes with other names; the code is as it was.

    The code finds them under the old names still, which are properties.
    """
    for module in list(model.modules()):
        old = {name: _NAMES[name] for name in children_of(module) if name in _NAMES}
        if any(new in children_of(module) for new in old.values()):
            old = {}
        cls = type(module)
        if old:
            aliases = {name: property(_child(new)) for name, new in old.items()}
            module.__class__ = type(f"Ported{cls.__name__}", (cls,), aliases)
        children = children_of(module)
        set_children(module, {old.get(name, name): one for name, one in children.items()})
    return model


def _child(name: str) -> Callable[[nn.Module], nn.Module | None]:
    return lambda module: children_of(module)[name]


class _Wrapper(nn.Module):
    """Holds a module and calls it; what is asked of it is asked of that."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


class _Extra(_Wrapper):
    """With modules around it that do nothing."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.before, self.after = nn.Identity(), nn.Dropout(0.1)
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(self.before(args[0]), *args[1:], **kwargs)
        return self.after(out).contiguous() if isinstance(out, Tensor) else out


def wrapped(model: nn.Module) -> nn.Module:
    """The model, and each layer of a list of layers, inside a wrapper."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList)]
    for layers in lists:
        if len({type(one) for one in layers}) == 1 and len(layers) > 1:
            for name, one in list(layers.named_children()):
                children_of(layers)[name] = _Wrapper(one)
    return _Wrapper(model)


def with_extras(model: nn.Module) -> nn.Module:
    """Identities and idle dropouts around linear layers and norms."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | nn.LayerNorm | nn.GroupNorm):
                children_of(module)[name] = _Extra(child)
    return model


_TOGETHER = (
    ("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("to_q", "to_k", "to_v"),
    ("q", "k", "v"), ("gate_proj", "up_proj"), ("wi_0", "wi_1"),
)  # fmt: skip


def fused(model: nn.Module) -> nn.Module | None:
    """One matrix for projections of the same input: queries, keys and values; gate and up."""
    found = False
    for module in list(model.modules()):
        for names in _TOGETHER:
            parts = [children_of(module).get(name) for name in names]
            plain = all(isinstance(one, nn.Linear) for one in parts)
            if plain and len({one.in_features for one in parts}) == 1 and not _cross(module):  # type: ignore[union-attr]
                found = True
                _fuse(module, names, parts)  # type: ignore[arg-type]
    return model if found else None


def _cross(module: nn.Module) -> bool:
    """Whether keys come from elsewhere than queries."""
    name = type(module).__name__
    return (
        bool(getattr(module, "is_cross_attention", False))
        or "Joint" in name
        or any(
            bool(getattr(module, one, None)) for one in ("added_kv_proj_dim", "is_decoder_cross")
        )
    )


class _Together:
    """Calls the fused matrix for the first of its parts, and hands out the others' shares."""

    def __init__(self, whole: nn.Linear, sizes: Sequence[int], parts: Sequence[nn.Linear]) -> None:
        self.whole, self.sizes, self.parts = whole, list(sizes), parts
        self.given: Tensor | None = None
        self.made: Sequence[Tensor] = ()

    def share(self, at: int) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            if x is not self.given:
                self.given, self.made = x, self.whole(x).split(self.sizes, -1)
            return self.made[at]

        call.weight, call.bias = self.parts[at].weight, self.parts[at].bias  # type: ignore
        return call


def _fuse(module: nn.Module, names: Sequence[str], parts: Sequence[nn.Linear]) -> None:
    sizes = [one.out_features for one in parts]
    biased = any(one.bias is not None for one in parts)
    whole = nn.Linear(parts[0].in_features, sum(sizes), bias=biased)
    whole.to(parts[0].weight.dtype).eval()
    with torch.no_grad():
        whole.weight.copy_(torch.cat([one.weight for one in parts]))
        if biased:
            zeros = [torch.zeros_like(one.weight[:, 0]) for one in parts]
            whole.bias.copy_(
                torch.cat(
                    [
                        zero if one.bias is None else one.bias
                        for one, zero in zip(parts, zeros, strict=True)
                    ]
                )
            )
    together = _Together(whole, sizes, parts)
    for at, name in enumerate(names):
        del children_of(module)[name]
        object.__setattr__(module, name, together.share(at))
    children_of(module)["_".join(names)] = whole


def split(model: nn.Module) -> nn.Module | None:
    """Three matrices for one of queries, keys and values."""
    holders = [one for one in model.modules() if "c_attn" in children_of(one)]
    for module in holders:
        whole: Any = children_of(module).pop("c_attn")
        parts = []
        for name, w, b in zip("qkv", whole.weight.chunk(3, 1), whole.bias.chunk(3), strict=True):
            part = nn.Linear(w.shape[0], w.shape[1]).to(w.dtype).eval()
            with torch.no_grad():
                part.weight.copy_(w.T)
                part.bias.copy_(b)
            children_of(module)[f"{name}_proj"] = part
            parts.append(part)
        object.__setattr__(module, "c_attn", _joined(parts))
    return model if holders else None


def _joined(parts: Sequence[nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([part(x) for part in parts], -1)


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU": F.silu, "SiLUActivation": F.silu, "ReLU": F.relu, "GELUActivation": F.gelu,
    "GELU": F.gelu, "NewGELUActivation": lambda x: F.gelu(x, approximate="tanh"),
    "GELUTanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def functional(model: nn.Module) -> nn.Module | None:
    """Activations as functions, so that no module is seen."""
    found = False
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        for name, child in list(module.named_children()):
            act = _FUNCTIONS.get(type(child).__name__)
            if act is not None and not list(child.children()):
                approximate = getattr(child, "approximate", "none")
                if approximate == "tanh":
                    act = _FUNCTIONS["GELUTanh"]
                found = True
                del children_of(module)[name]
                object.__setattr__(module, name, act)
    return model if found else None


def channels_last(model: nn.Module) -> nn.Module | None:
    """Another layout in memory of images and of the weights that see them."""
    if not any(isinstance(one, nn.Conv2d) for one in model.modules()):
        return None
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

"""Clean ports: the same mathematics computed, written or named in another way; none is wrong."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyattn_faults import rebuilt
from polyattn_faults.kinds.kind import of
from polyattn_faults.operations import Call, rewritten

__all__ = ["PORTS", "Port"]


@dataclass(frozen=True)
class Port:
    """`made(model)` gives a port of the model, or None where this way means nothing for it."""

    name: str
    made: Callable[[nn.Module], AbstractContextManager[nn.Module | None]]


Changes = Mapping[str, Callable[[Call], Any]]


def _computed(name: str, changes: Changes) -> Port:
    """The very same modules, with operations computed in another way."""

    @contextmanager
    def made(model: nn.Module) -> Iterator[nn.Module]:
        with rewritten(model, changes):
            yield model

    return Port(name, made)


def _built(name: str, change: Callable[[nn.Module], nn.Module | None]) -> Port:
    """Modules of another make."""

    @contextmanager
    def made(model: nn.Module) -> Iterator[nn.Module | None]:
        yield change(copy.deepcopy(model))

    return Port(name, made)


def _product(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """Left, right and addend of a linear layer or addmm."""
    if call.name == "addmm":
        return call.args[1], call.args[2], call.args[0]
    return call.args[0], of(call, 1, "weight").T, of(call, 2, "bias")


def _in_chunks(call: Call) -> Tensor:
    """The sum over the inner dimension in three parts, the last first."""
    x, w, bias = _product(call)
    cuts = torch.arange(x.shape[-1]).tensor_split(3)
    parts = [x[..., one[0] : one[-1] + 1] @ w[one[0] : one[-1] + 1] for one in cuts if len(one)]
    total = parts[-1]
    for one in parts[:-1]:
        total = total + one
    return total if bias is None else total + bias


def _unfused(call: Call) -> Tensor:
    x, w, bias = _product(call)
    return x @ w if bias is None else bias + x @ w


def _in_float64(call: Call) -> Any:
    def wide(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.double() if floats else value

    kwargs = {name: wide(value) for name, value in call.kwargs.items()}
    out = call.func(*map(wide, call.args), **kwargs)
    dtypes = [one.dtype for one in call.tensors if one.is_floating_point()]
    return out.to(dtypes[0])


def _attention(call: Call) -> Tensor:
    """Attention written out, in float32 inside, half of the queries at a time."""
    query, key, value = call.args[:3]
    mask, causal = of(call, 3, "attn_mask"), of(call, 5, "is_causal", False)
    scale = call.kwargs.get("scale") or query.shape[-1] ** -0.5
    times = query.shape[-3] // key.shape[-3]
    key, value = (one.repeat_interleave(times, -3) for one in (key, value))
    logits = (query.float() * scale) @ key.float().transpose(-1, -2)
    if causal:
        ones = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~ones, -torch.inf)
    if mask is not None and mask.dtype is torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask
    parts = [
        (one.softmax(-1) @ value.float()).to(query.dtype)
        for one in logits.tensor_split(2, -2)
        if one.shape[-2]
    ]
    return torch.cat(parts, -2)


def _layer_norm(call: Call) -> Tensor:
    x, shape = call.args[0].float(), of(call, 1, "normalized_shape")
    dims = tuple(range(-len(shape), 0))
    centred = x - x.mean(dims, keepdim=True)
    out = centred / (centred.square().mean(dims, keepdim=True) + of(call, 4, "eps", 1e-5)).sqrt()
    weight, bias = of(call, 2, "weight"), of(call, 3, "bias")
    out = out if weight is None else out * weight.float()
    return (out if bias is None else out + bias.float()).to(call.args[0].dtype)


def _silu(call: Call) -> Tensor:
    x: Tensor = call.args[0]
    return (x.float() / (1 + (-x.float()).exp())).to(x.dtype)


def _convolution(call: Call) -> Any:
    """The bias added afterwards."""
    bias = of(call, 2, "bias")
    if bias is None:
        return call.again()
    plain = (
        call.again(bias=None)
        if "bias" in call.kwargs
        else call.func(*call.args[:2], None, *call.args[3:], **call.kwargs)
    )
    return plain + bias.view(-1, *[1] * (plain.dim() - 2))


@contextmanager
def _polyattn(model: nn.Module) -> Iterator[nn.Module]:
    """Torch's attention replaced by that of polyattn, in the model's modules alone."""
    import polyattn.torch as front

    def ours(call: Call) -> Any:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        given = dict(zip(names, call.args, strict=False)) | call.kwargs
        return front.scaled_dot_product_attention(**given)

    with rewritten(model, {"scaled_dot_product_attention": ours}):
        yield model


@contextmanager
def _eager(model: nn.Module) -> Iterator[nn.Module | None]:
    """The library's own other implementation of attention."""
    port: Any = copy.deepcopy(model)
    if hasattr(port, "set_attn_implementation"):
        port.set_attn_implementation("eager")
    elif hasattr(port, "set_default_attn_processor"):
        from diffusers.models.attention_processor import AttnProcessor

        port.set_attn_processor(AttnProcessor())
    else:
        port = None
    yield port


PORTS = [
    Port("eager attention", _eager),
    Port("polyattn attention", _polyattn),
    _computed("attention written out", {"scaled_dot_product_attention": _attention}),
    _computed("products in chunks", {"linear": _in_chunks, "addmm": _in_chunks}),
    _computed("products unfused", {
        "linear": _unfused, "addmm": _unfused, "conv1d": _convolution, "conv2d": _convolution,
    }),
    _computed("norms and activations written out", {"layer_norm": _layer_norm, "silu": _silu}),
    _computed("sums in float64", dict.fromkeys(
        ("linear", "addmm", "conv1d", "conv2d", "matmul", "bmm", "layer_norm", "group_norm",
         "scaled_dot_product_attention"), _in_float64)),
    _built("renamed", rebuilt.renamed),
    _built("wrapped", rebuilt.wrapped),
    _built("extra modules", rebuilt.with_extras),
    _built("projections fused", rebuilt.fused),
    _built("projections split", rebuilt.split),
    _built("activations as functions", rebuilt.functional),
    _built("channels last", rebuilt.channels_last),
]  # fmt: skip

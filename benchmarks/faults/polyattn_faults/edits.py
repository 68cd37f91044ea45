"""Bugs in a model's parts and weights: what is set, loaded or exchanged wrongly before it runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from polyattn.torch.internals import children_of, own_parameters

__all__ = ["EDITS", "Edit", "Place"]


@dataclass(frozen=True)
class Place:
    """Where an edit is possible: `at`, a module's name; `culprits`: the modules that it is in;
    `apply` makes it in a copy of the model.
    """

    at: str
    culprits: tuple[str, ...]
    apply: Callable[[nn.Module], None]


@dataclass(frozen=True)
class Edit:
    """A kind of bug: `places` yields where a model can have it."""

    name: str
    places: Callable[[nn.Module], Iterable[Place]]


def _each(
    fits: Callable[[nn.Module], bool], change: Callable[[nn.Module], None]
) -> Callable[[nn.Module], Iterator[Place]]:
    """Places in every module that fits, which is the culprit then."""

    def places(model: nn.Module) -> Iterator[Place]:
        for name, module in model.named_modules():
            if fits(module):
                yield Place(name, _sharing(model, name), _on(name, change))

    return places


def _sharing(model: nn.Module, *names: str) -> tuple[str, ...]:
    """The modules of these names, and those that have the same weights, as tied ones."""
    own = {id(p) for name in names for p in model.get_submodule(name).parameters(recurse=False)}
    tied = [
        name
        for name, module in model.named_modules()
        if name not in names and any(id(p) in own for p in module.parameters(recurse=False))
    ]
    return (*names, *tied)


def _on(name: str, change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        with torch.no_grad():
            change(model.get_submodule(name))

    return apply


_EPSILONS = ("eps", "variance_epsilon")


def _has_eps(module: nn.Module) -> bool:
    found = next((vars(module)[name] for name in _EPSILONS if name in vars(module)), None)
    return isinstance(found, float) and "Norm" in type(module).__name__


def _eps(to: Callable[[float], float]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for name in _EPSILONS:
            if name in vars(module):
                setattr(module, name, to(float(vars(module)[name])))

    return change


def _matrix(module: nn.Module) -> Tensor | None:
    weight = own_parameters(module).get("weight")
    return weight if weight is not None and weight.dim() >= 2 else None


def _has_matrix(module: nn.Module) -> bool:
    return _matrix(module) is not None


def _square(module: nn.Module) -> bool:
    weight = _matrix(module)
    return weight is not None and weight.dim() == 2 and weight.shape[0] == weight.shape[1] > 1


def _transposed(module: nn.Module) -> None:
    _weight(module).copy_(_weight(module).T.clone())


def _weight(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    return weight  # type: ignore[no-any-return]


def _rows_exchanged(module: nn.Module) -> None:
    weight = _weight(module)
    order = torch.arange(len(weight))
    first, last = (4, 5) if len(weight) > 8 else (0, 1)  # tokens below 4 are never used
    order[first], order[last] = last, first
    weight.copy_(weight[order])


def _blocks_exchanged(module: nn.Module) -> None:
    """The first and the last quarter of the rows, as of heads in another order."""
    weight, size = _weight(module), len(_weight(module)) // 4
    order = torch.arange(len(weight))
    order[:size], order[-size:] = order[-size:].clone(), order[:size].clone()
    weight.copy_(weight[order])


def _rounded(module: nn.Module) -> None:
    weight = _weight(module)
    coarse = torch.bfloat16 if weight.dtype is torch.float32 else torch.float8_e4m3fn
    weight.copy_(weight.to(coarse).to(weight.dtype))


def _one_element(module: nn.Module) -> None:
    weight = _weight(module)
    weight.view(-1)[weight.numel() // 2] += weight.std() * 3


def _bias(module: nn.Module) -> None:
    own_parameters(module)["bias"].zero_()  # type: ignore[union-attr]


_LAYER = re.compile(r"\.\d+(?=\.|$)")


def _weights_exchanged(model: nn.Module) -> Iterator[Place]:
    """Weights of the same part of two layers."""
    modules = {name: one for name, one in model.named_modules() if _has_matrix(one)}
    alike: dict[str, list[str]] = {}
    for name in modules:
        alike.setdefault(_LAYER.sub(".#", name), []).append(name)
    for names in alike.values():
        for one, other in pairwise(names):
            if _weight(modules[one]).shape == _weight(modules[other]).shape:
                yield Place(one, _sharing(model, one, other), _exchange(one, other))


def _exchange(one: str, other: str) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        a, b = (_weight(model.get_submodule(name)) for name in (one, other))
        with torch.no_grad():
            kept = a.clone()
            a.copy_(b)
            b.copy_(kept)

    return apply


class _Backwards(nn.ModuleList):
    """Children that are run in another order."""

    def __iter__(self) -> Iterator[nn.Module]:
        found = list(children_of(self).values())
        found[:2] = found[1::-1]
        return iter(found)  # type: ignore[arg-type]

    def __getitem__(self, at: Any) -> Any:
        return list(self)[at]


def _layer_order(model: nn.Module) -> Iterator[Place]:
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 1 == len(set(map(type, module))):
            around = name.rpartition(".")[0]
            if not isinstance(model.get_submodule(around), nn.ModuleList):
                yield Place(name, (around,), _on(name, _reorder))


def _reorder(module: nn.Module) -> None:
    module.__class__ = _Backwards


_ACTIVATIONS = ("GELU", "SiLU", "ReLU", "Swish", "Tanh", "Mish")


def _activation(module: nn.Module) -> bool:
    name = type(module).__name__
    plain = not list(module.parameters()) and not list(module.children())
    return plain and any(one.lower() in name.lower() for one in _ACTIVATIONS)


def _other_class(model: nn.Module) -> Iterator[Place]:
    for name, module in model.named_modules():
        if _activation(module):
            other = nn.SiLU if "gelu" in type(module).__name__.lower() else nn.GELU
            yield Place(name, (name,), _replaced(name, other))


def _replaced(name: str, by: Callable[[], nn.Module]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        above, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(above), leaf, by())

    return apply


def _dropout_on(module: nn.Module) -> None:
    module.p = 0.1  # type: ignore[assignment]
    module.train()


def _padding(module: nn.Module) -> None:
    module.padding_mode = "circular"  # type: ignore[assignment]
    module.__setstate__(vars(module).copy())


def _padded(module: nn.Module) -> bool:
    padding: Any = getattr(module, "padding", ())
    plain = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    return plain and any(p > 0 for p in padding if isinstance(p, int))


def _rotary_base(module: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        if name.endswith("inv_freq"):
            buffer.copy_(buffer**1.1)


def _time(**to: Any) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        for name, value in to.items():
            old = getattr(module, name)
            setattr(module, name, not old if value is None else value)

    return change


def _has(*names: str) -> Callable[[nn.Module], bool]:
    return lambda module: all(name in vars(module) | children_of(module) for name in names)


def _embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding) and module.padding_idx is None


def _shifted(module: nn.Module) -> None:
    _weight(module).copy_(_weight(module).roll(1, 0))


def _gated(module: nn.Module) -> bool:
    return _has("gate_proj", "up_proj", "down_proj", "act_fn")(module) or _has(
        "wi_0", "wi_1", "wo", "act"
    )(module)


def _gates_exchanged(module: nn.Module) -> None:
    llama = hasattr(module, "gate_proj")
    names = (
        ("gate_proj", "up_proj", "act_fn", "down_proj") if llama else ("wi_0", "wi_1", "act", "wo")
    )
    gate, up, act, down = (getattr(module, name) for name in names)
    # the bug of one who takes `up` for the gate
    module.forward = lambda x: down(act(up(x)) * gate(x))


EDITS = [
    Edit("norm eps ten times", _each(_has_eps, _eps(lambda eps: eps * 10))),
    Edit("norm eps a tenth", _each(_has_eps, _eps(lambda eps: eps / 10))),
    Edit("norm eps a thousand times", _each(_has_eps, _eps(lambda eps: eps * 1000))),
    Edit("weight transposed", _each(_square, _transposed)),
    Edit("two rows exchanged", _each(_has_matrix, _rows_exchanged)),
    Edit("heads of a weight exchanged",
         _each(lambda m: isinstance(m, nn.Linear) and len(m.weight) % 4 == 0, _blocks_exchanged)),
    Edit("weight in lower precision", _each(_has_matrix, _rounded)),
    Edit("one element of a weight", _each(_has_matrix, _one_element)),
    Edit("bias zero", _each(lambda m: own_parameters(m).get("bias") is not None, _bias)),
    Edit("weights of two layers exchanged", _weights_exchanged),
    Edit("layers in another order", _layer_order),
    Edit("activation of another class", _other_class),
    Edit("dropout module left on", _each(lambda m: isinstance(m, nn.Dropout), _dropout_on)),
    Edit("padding mode", _each(_padded, _padding)),
    Edit("rotary base", _each(
        lambda m: any(n.endswith("inv_freq") for n, _ in m.named_buffers(recurse=False)),
        _rotary_base)),
    Edit("sine and cosine of time exchanged",
         _each(_has("flip_sin_to_cos", "num_channels"), _time(flip_sin_to_cos=None))),
    Edit("frequency shift of time",
         _each(_has("downscale_freq_shift", "num_channels"), _time(downscale_freq_shift=0.5))),
    Edit("rows of a table off by one", _each(_embedding, _shifted)),
    Edit("gate and up exchanged", _each(_gated, _gates_exchanged)),
]  # fmt: skip

"""What people do with an offloaded model: after each of it, the same bits as of one that is not."""

from __future__ import annotations

import contextlib
import copy
import io
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polyattn.bench.offload.weights_of_others import quantised, with_adapters
from polyattn.hooks.layerwise_offload import LayerwiseOffload, offload

__all__ = ["SITUATIONS", "Pair", "tried"]


class Pair:
    """A model that is offloaded and its twin that is not."""

    def __init__(
        self, ours: nn.Module, theirs: nn.Module, handle: LayerwiseOffload, inputs: Any
    ) -> None:
        self.ours, self.theirs, self.handle, self.inputs = ours, theirs, handle, inputs

    def same(self) -> bool:
        """Whether both give the same bits."""
        with torch.no_grad():
            mine, others = (self._outputs(model) for model in (self.ours, self.theirs))
        return len(mine) == len(others) and all(map(_equal, mine, others))

    def fails_alike(self) -> bool:
        """Whether the model that is not offloaded fails, and the other one with the same error."""
        found = []
        for model in (self.theirs, self.ours):
            try:
                with torch.no_grad():
                    self._outputs(model)
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        return len(found) == 2 and found[0] == found[1]

    def _outputs(self, model: nn.Module) -> list[Tensor]:
        _seed()
        return list(_tensors(model(**self.inputs)))


def _seed() -> None:
    """Begin every sequence of random numbers anew: some models draw noise, or what they mask."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _plain(pair: Pair) -> bool:
    return pair.same() and pair.same()


def _failed_and_called_again(pair: Pair) -> bool:
    name = pair.handle.units[len(pair.handle.units) // 2]
    hook = pair.ours.get_submodule(name).register_forward_pre_hook(_fail)
    with contextlib.suppress(ArithmeticError), torch.no_grad():
        pair.ours(**pair.inputs)
    hook.remove()
    return pair.same()


def _fail(*_: object) -> None:
    raise ArithmeticError


def _merged(pair: Pair) -> bool:
    """As adapters are merged: by ``.data``, which torch does not count."""
    for model in (pair.ours, pair.theirs):
        for parameter in model.parameters():
            if parameter.dim() == 2 and parameter.is_floating_point():
                parameter.data += 0.01 * parameter.data.flip(0)
    return pair.same()


def _saved_and_loaded(pair: Pair) -> bool:
    file = io.BytesIO()
    torch.save(pair.ours.state_dict(), file)
    file.seek(0)
    pair.theirs.load_state_dict(torch.load(file))
    return pair.same()


def _loaded_into(pair: Pair) -> bool:
    with torch.no_grad():
        state = {k: v * 0.5 for k, v in pair.theirs.state_dict().items() if v.is_floating_point()}
    for model in (pair.ours, pair.theirs):
        model.load_state_dict(state, strict=False)
    return pair.same()


def _copied(pair: Pair) -> bool:
    twin = Pair(copy.deepcopy(pair.ours), pair.theirs, pair.handle, pair.inputs)
    return twin.same()


def _used_by_themselves(pair: Pair) -> bool:
    """Weights of units are read, and used, outside any call."""
    pairs = zip(pair.ours.parameters(), pair.theirs.parameters(), strict=True)
    return all(_equal(a.data, b.data) for a, b in pairs)


class _Stub(nn.Module):
    """Stands in the place of a block and gives what that gave once, without calling it."""

    def __init__(self, block: nn.Module, output: Any) -> None:
        super().__init__()
        self._told = block, output  # in a tuple, so that it is no part of the model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._told[0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._told[1]


def _middle_block(pair: Pair) -> str:
    return pair.handle.units[len(pair.handle.units) // 2]


def _skipped(pair: Pair) -> bool:
    """A block is passed over, as caching of steps does: the next comes earlier than expected."""
    name, outputs = _middle_block(pair), []
    where, _, last = name.rpartition(".")
    for model in (pair.ours, pair.theirs):
        block = model.get_submodule(name)
        note = block.register_forward_hook(lambda module, args, output: outputs.append(output))
        with torch.no_grad():
            _seed()
            model(**pair.inputs)
        note.remove()
        if not outputs:
            return pair.same()  # nothing calls it
        setattr(model.get_submodule(where), last, _Stub(block, outputs[0]))
    try:  # some models look into the block that was taken away
        return pair.fails_alike() or (pair.same() and pair.same())
    finally:
        for model in (pair.ours, pair.theirs):
            parent = model.get_submodule(where)
            setattr(parent, last, getattr(parent, last)._told[0])


def _repeated(pair: Pair) -> bool:
    """Each call of a block is made twice."""
    handles = []
    for model in (pair.ours, pair.theirs):
        block = model.get_submodule(_middle_block(pair))
        again = {"inside": False}

        def call(
            module: nn.Module, args: Any, kwargs: Any, output: Any, again: Any = again
        ) -> None:
            if not again["inside"]:
                again["inside"] = True
                try:
                    module(*args, **kwargs)
                finally:
                    again["inside"] = False

        handles.append(block.register_forward_hook(call, with_kwargs=True))
    try:  # some models count the calls of a block: their caches grow
        return pair.fails_alike() or (pair.same() and pair.same())
    finally:
        for handle in handles:
            handle.remove()


def _inference(pair: Pair) -> bool:
    with torch.inference_mode():
        same = pair.same()
    return same and pair.same()


def _detached(pair: Pair) -> bool:
    pair.handle.detach()
    return pair.same() and _used_by_themselves(pair)


SITUATIONS: dict[str, Callable[[Pair], bool]] = {
    "plain": _plain, "inference_mode": _inference, "skip": _skipped, "repeat": _repeated,
    "exception, then again": _failed_and_called_again,
    "weights read": _used_by_themselves, "deepcopy": _copied, "merged by .data": _merged,
    "save": _saved_and_loaded, "load": _loaded_into, "detach": _detached,
}  # fmt: skip
"""Each, by name, in the order in which one model goes through all."""


def _trained(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """Return the gradients of a model's adapters, None ones left out."""
    model.zero_grad()
    _seed()
    parts = [t for t in _tensors(model(**inputs)) if t.is_floating_point() and t.requires_grad]
    torch.stack([t.float().square().mean() for t in parts]).sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def with_other_weights(model: nn.Module, inputs: dict[str, Any], folder: Path) -> dict[str, str]:
    """Try a model whose layers are quantised, and one with adapters that train."""
    found: dict[str, str] = {}
    changes = (
        ("quantised", quantised), ("adapters train", with_adapters),
        ("checkpointing", _with_checkpoints),
    )  # fmt: skip
    for name, change in changes:
        ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
        if not change(ours) or not change(theirs) or not _runs(theirs, inputs, name):
            continue  # it reads its layers' weights in ways that such weights do not know
        handle = offload(ours, device="cpu", disk=folder)
        try:
            pair = Pair(ours, theirs, handle, inputs)
            same = pair.same()
            if name != "quantised":
                mine, others = _trained(ours, inputs), _trained(theirs, inputs)
                same = same and len(mine) == len(others) and all(map(_equal, mine, others))
            found[name] = "same" if same else "differs"
        except Exception as error:  # one that fails is a result
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
        finally:
            handle.detach()
    return found


def _with_checkpoints(model: nn.Module) -> int:
    """Train adapters of a model that computes its blocks again in backward; 0 if it cannot."""
    if getattr(model, "supports_gradient_checkpointing", False):
        enable = getattr(model, "gradient_checkpointing_enable", None)
        options = {"gradient_checkpointing_kwargs": {"use_reentrant": False}}
    else:
        can = getattr(model, "_supports_gradient_checkpointing", False)
        enable, options = getattr(model, "enable_gradient_checkpointing", None) if can else None, {}
    if enable is None:
        return 0
    try:
        enable(**options)
    except ValueError:  # it says that it can, and has no block that does
        return 0
    model.train()
    return with_adapters(model)


def _runs(model: nn.Module, inputs: dict[str, Any], name: str) -> bool:
    try:
        if name != "quantised":
            return bool(_trained(model, inputs))
        with torch.no_grad():
            model(**inputs)
    except Exception:
        return False
    return True


def tried(model: nn.Module, inputs: dict[str, Any], folder: Path) -> dict[str, str]:
    """Return for each situation ``same``, ``differs``, or the error."""
    theirs = copy.deepcopy(model)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, str] = {}
    handle = offload(model, device="cpu", disk=folder)
    if not handle.units:
        handle.detach()
        return {"plain": "nothing to stream"}
    pair = Pair(model, theirs, handle, inputs)
    lists = {name.rpartition(".")[0] for name in handle.units}
    try:
        for name, situation in SITUATIONS.items():
            try:
                found[name] = "same" if situation(pair) else "differs"
            except Exception as error:  # one that fails is a result
                found[name] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    finally:
        handle.detach()
    if len(lists) > 1:
        found["two lists"] = found["plain"]
    model.load_state_dict(start)
    return {**found, **with_other_weights(model, inputs, folder)}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        torch.nan_to_num(a.detach()) if a.is_floating_point() else a.detach(),
        torch.nan_to_num(b.detach()) if b.is_floating_point() else b.detach(),
    )

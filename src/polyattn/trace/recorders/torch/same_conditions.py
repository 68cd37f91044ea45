"""Running two models alike: copies of the same inputs, the same random numbers, no dropout."""

from __future__ import annotations

import copy
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from polyattn.errors import TraceError

__all__ = ["Inputs", "SameConditions", "refuse_what_cannot_run"]

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any] | Callable[[nn.Module], Any]

_COMPUTED_IN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DROPOUT = (
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
)  # fmt: skip
_RATES = (
    "dropout", "dropout_p", "dropout_prob", "attention_dropout", "attn_dropout", "hidden_dropout",
    "activation_dropout", "drop_prob", "layerdrop",
)  # fmt: skip


class SameConditions:
    """Calls models with copies of `inputs`, each from the state of all random numbers of now.

    `inputs`: a tensor, a tuple of positional arguments, a dict of keyword arguments, or a function
    that takes the model and runs it, which is called as it is. Copies are moved to the device of
    the model that gets them. If `models` compute in different dtypes, tensors in one of these are
    rounded to both and given to each model in its own. As a context manager it puts the random
    numbers back. `drew`: whether any call drew random numbers.
    """

    def __init__(self, inputs: Inputs, models: tuple[nn.Module, ...]) -> None:
        if not isinstance(inputs, Tensor | tuple | Mapping) and not callable(inputs):
            raise TraceError(
                f"got inputs of type {type(inputs).__name__}, expected a tensor, a tuple of "
                "positional arguments, a dict of keyword arguments, or a function that takes the "
                "model and runs it."
            )
        self._inputs = inputs
        self._dtypes = tuple(dict.fromkeys(d for m in models if (d := _dtype(m)) is not None))
        self._random = _RandomNumbers()
        self.drew = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._random.restore()

    def call(self, model: nn.Module) -> tuple[Any, list[Tensor]]:
        """Return the model's output, and those of the inputs that require gradients."""
        __tracebackhide__ = True
        self._random.restore()
        try:
            if not isinstance(self._inputs, Tensor | tuple | Mapping):
                return self._inputs(model), []
            copies = _Copies(_device(model), _dtype(model), self._dtypes)
            given = copies.of(self._inputs)
            needing = [t for t in copies.tensors if t.requires_grad]
            if isinstance(given, Tensor):
                return model(given), needing
            if isinstance(given, tuple):
                return model(*given), needing
            return model(**given), needing
        finally:
            self.drew = self.drew or self._random.drawn()


class _Copies:
    """Copies values with the tensors in them, one that comes twice once."""

    def __init__(
        self,
        device: torch.device | None,
        dtype: torch.dtype | None,
        rounded: tuple[torch.dtype, ...],
    ) -> None:
        self._device, self._dtype, self._rounded = device, dtype, rounded
        self._memo: dict[int, Any] = {}
        self.tensors: list[Tensor] = []

    def of(self, value: Any) -> Any:
        """Return a copy of inputs; other objects in them are copied deeply."""
        if isinstance(value, Tensor):
            if id(value) not in self._memo:
                self._memo[id(value)] = self._tensor(value)
                self.tensors.append(self._memo[id(value)])
            return self._memo[id(value)]
        if isinstance(value, tuple):
            parts = [self.of(one) for one in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if type(value) is list:
            return [self.of(one) for one in value]
        if type(value) is dict:
            return {key: self.of(one) for key, one in value.items()}
        if isinstance(value, Mapping) and not hasattr(value, "__dataclass_fields__"):
            return {key: self.of(value[key]) for key in value}  # of a tokeniser
        try:
            return copy.deepcopy(value)
        except Exception as error:
            raise TraceError(
                f"got a {type(value).__name__} in the inputs, which cannot be copied for each of "
                f"the models ({error}); give a function that takes a model and runs it."
            ) from error

    def _tensor(self, t: Tensor) -> Tensor:
        with torch.inference_mode(False):
            made = t.detach().clone()
            if len(self._rounded) > 1 and t.dtype in self._rounded and self._dtype is not None:
                for dtype in self._rounded:
                    made = made.to(dtype)
                made = made.to(self._dtype)
            if self._device is not None:
                made = made.to(self._device)
            return made.requires_grad_(t.requires_grad)


def _dtype(model: nn.Module) -> torch.dtype | None:
    """What most of the weights are in, or None without any."""
    sizes: Counter[torch.dtype] = Counter()
    for one in model.parameters():
        if one.dtype in _COMPUTED_IN:
            sizes[one.dtype] += max(1, one.numel())
    return sizes.most_common(1)[0][0] if sizes else None


def _device(model: nn.Module) -> torch.device | None:
    """Where all weights are; None if there are none, or in several places."""
    found = {one.device for one in (*model.parameters(), *model.buffers())}
    only = found.pop() if len(found) == 1 else None
    return None if only is not None and only.type == "meta" else only


class _RandomNumbers:
    """The states of the generators that everybody shares, as they are when this is made."""

    def __init__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._device = _of_device("get_rng_state_all") or _of_device("get_rng_state")
        self._devices = self._device() if self._device is not None else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._devices is not None:
            several = isinstance(self._devices, list)
            put = _of_device("set_rng_state_all" if several else "set_rng_state")
            assert put is not None
            put(self._devices)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def drawn(self) -> bool:
        """Whether torch's or Python's generators have moved on."""
        if not torch.equal(torch.get_rng_state(), self._cpu) or random.getstate() != self._python:
            return True
        if self._device is None:
            return False
        now, then = (x if isinstance(x, list) else [x] for x in (self._device(), self._devices))
        return any(not torch.equal(a, b) for a, b in zip(now, then, strict=True))


def _of_device(name: str) -> Callable[..., Any] | None:
    """A function of the accelerator's module, if there is one that is in use."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    ready = getattr(module, "is_initialized", None)
    return getattr(module, name, None) if ready is None or ready() else None


def refuse_what_cannot_run(model: Any, said: str) -> None:
    """Raise TraceError for what is no module, has weights without values, or active dropout.

    `said`: what the model is, as "the port".

    >>> refuse_what_cannot_run(nn.Sequential(nn.Dropout(0.1)), "the port")
    Traceback (most recent call last):
      ...
    polyattn.errors.TraceError: got the port in training mode with dropout on in '0' (Dropout,
    p=0.1): two runs of it differ by chance. Call .eval() on both models, or set its rate to 0.
    """
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"got a {type(model).__name__} as {said}, expected a torch.nn.Module: first the "
            "reference, then the port, then their inputs."
        )
    modules = list(model.named_modules())
    if not any(hasattr(module, "_hf_hook") for _, module in modules):  # accelerate brings weights
        for name, weight in (*model.named_parameters(), *model.named_buffers()):
            if weight.is_meta:
                raise TraceError(
                    f"got {said} with {name!r} on the meta device, where it has no values, "
                    "expected a model that can run: load its weights first."
                )
    for name, module in modules:
        rate = _rate(module) if module.training else None
        if rate is not None:
            raise TraceError(
                f"got {said} in training mode with dropout on in {name!r} "
                f"({type(module).__name__}, {rate}): two runs of it differ by chance. Call .eval() "
                "on both models, or set its rate to 0."
            )


def _rate(module: nn.Module) -> str | None:
    """The rate of dropout of this very module, as text; None if it drops nothing."""
    names = ("p",) if isinstance(module, _DROPOUT) else _RATES
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, float | int) and not isinstance(value, bool) and value > 0:
            if isinstance(module, nn.RNNBase) and module.num_layers == 1:
                continue  # it has no place where it could drop
            return f"{name}={value}"
    return None

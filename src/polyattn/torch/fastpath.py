"""Options -> (check, run, plan): the cache in front of selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import is_grad_enabled

from polyattn import scopes

__all__ = ["Entry", "FastTable", "tensor_check"]

Entry = tuple[Callable[..., bool], Callable[..., Any], Any]
Row = tuple[Callable[..., bool], Callable[..., Any], tuple[Entry, ...]]
Bare = tuple[Callable[..., bool], Any, Any]
Plain = tuple[Callable[..., bool], Any, Any, bool, Any, tuple[Bare, ...]]
_MOST_SHAPES = 12
_MOST_PLAIN = 4
_MOST_KEYS = 4096


def tensor_check(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., bool]:
    """Return ``check(q, k, v)``: whether three tensors are alike in all that a choice rests on.

    torch's own compiled guard looks at type, dtype, device, shape, strides, gradients and the
    dispatch state (autocast, inference mode, function transforms) in 0.2 us.
    """
    check = _check(q, k, v)
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return check
    mode = is_grad_enabled()  # which the compiled guard does not look at
    return lambda q, k, v: is_grad_enabled() is mode and check(q, k, v)


def _check(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., bool]:
    if q is k or k is v or q is v:
        return _check_of_same(q, k, v)
    check = _compiled_check(q, k, v)
    return check if check is not None and check(q, k, v) else _slow_check(q, k, v)


def _compiled_check(*tensors: Tensor) -> Callable[..., bool] | None:
    try:
        from torch._C._dynamo.guards import TensorGuards

        return TensorGuards(  # type: ignore[no-any-return]
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],  # type: ignore[misc]
            dynamic_dims_strides=[list(x.stride()) for x in tensors],  # type: ignore[misc]
        ).check
    except (ImportError, TypeError, SystemError):
        return None


def _check_of_same(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., bool]:
    """Check calls that pass one tensor twice or thrice, which the compiled guard never accepts."""
    if q is k and k is v:
        one = _compiled_check(q)
        if one is None or not one(q):
            return _slow_check(q, k, v)
        return lambda q, k, v: q is k and k is v and one(q)
    other = v if q is k else k
    two = _compiled_check(q, other)
    if two is None or not two(q, other):
        return _slow_check(q, k, v)
    if q is k:
        return lambda q, k, v: q is k and two(q, v)
    if k is v:
        return lambda q, k, v: k is v and two(q, k)
    return lambda q, k, v: q is v and two(q, k)


def _facts(x: Tensor) -> tuple[Any, ...]:
    kind = x.device.type
    return (
        type(x), x.dtype, x.device, x.shape, x.stride(), x.requires_grad, x.is_inference(),
        x.is_neg(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch._C._functorch.maybe_current_level(),
    )  # fmt: skip


def _slow_check(*tensors: Tensor) -> Callable[..., bool]:
    facts = tuple(map(_facts, tensors))

    def check(*others: Tensor) -> bool:
        return all(isinstance(x, Tensor) for x in others) and tuple(map(_facts, others)) == facts

    return check


class FastTable:
    """From option keys to the shapes seen with them; emptied when a choice may change.

    `entries`: the newest entry laid open, then all of them, newest first. `plain`: by layout, the
    newest entry of calls without any option, with the operator that its kernel is nothing but (see
    `polyattn.torch.backends.sdpa`), the switches it was chosen under, and the older ones of those.
    """

    def __init__(self) -> None:
        self.entries: dict[Any, Row] = {}
        self.plain: dict[str, Plain] = {}
        scopes.listeners.append(self._forget)

    def _forget(self) -> None:
        self.entries.clear()
        self.plain.clear()

    def find(self, key: Any, q: Tensor, k: Tensor, v: Tensor) -> Entry | None:
        """Return the entry of these options and tensors, if there is one."""
        row = self.entries.get(key)
        return None if row is None else next((e for e in row[2] if e[0](q, k, v)), None)

    def add(self, key: Any, entry: Entry, epoch: str) -> None:
        """Put an entry first among those of its options, unless its `epoch` has passed."""
        with scopes.lock:
            if epoch != scopes.state.epoch:
                return
            if len(self.entries) >= _MOST_KEYS:
                self._forget()
            older = self.entries[key][2] if key in self.entries else ()
            self.entries[key] = entry[0], entry[1], (entry, *older)[:_MOST_SHAPES]
            layout, *rest = key
            if rest[:4] == [None] * 4 and len(rest) == 6:
                self._add_plain(layout, entry, rest[4], rest[5])

    def _add_plain(self, layout: str, entry: Entry, determined: bool, environ: Any) -> None:
        older: tuple[Bare, ...] = ()
        known = self.plain.get(layout)
        if known is not None and known[3:5] == (determined, environ):
            older = (known[:3], *known[5])[:_MOST_PLAIN]
        operator = getattr(entry[1], "operator", None)
        self.plain[layout] = entry[0], entry[1], operator, determined, environ, older

"""One key for a call, one table from keys to what runs: the cache in front of selection.

Eager calls, torch's signature and paged calls look here; the table is emptied as a whole when a
choice may change (`polyattn.scopes.invalidate`) and when it is full.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polyattn import scopes, settings
from polyattn.torch.internals import (
    is_allowed,
    is_grad_enabled,
    tensor_guards,
    transform_level,
)
from polyattn.torch.internals import is_deterministic as determined

__all__ = [
    "PLAIN",
    "STRANGE",
    "SWITCHES",
    "Entry",
    "Key",
    "Table",
    "around",
    "array_key",
    "bias_key",
    "determined",
    "key_for",
    "switches",
    "table",
    "tensor_check",
]

PLAIN = (Tensor, torch.nn.Parameter)
"""The types of tensors that the table holds; others take the long way each time."""

SWITCHES = (
    is_allowed["sdpa_flash"],
    is_allowed["sdpa_efficient"],
    is_allowed["sdpa_math"],
    is_allowed["sdpa_cudnn"],
)
"""torch's own switches of its kernels: flash, efficient, math, cuDNN."""

_MOST_ENTRIES = 4096
_MOST_ALIKE = 8
_MOST_PLAIN = 4
_state, _local = scopes.state, scopes.local


class Key(NamedTuple):
    """All that a choice rests on but the tensors themselves, which an entry's check compares.

    Built once for a call, by :meth:`of`, and handed down. `mask` and `bias` are signatures (of
    torch's own signature: what is asked of its arrays), `around` what is in force there (see
    :func:`around`), `switches` torch's own (see :func:`switches`), `door` the way in.
    """

    layout: str
    mask: Any
    scale: Any
    softcap: Any
    dropout_p: Any
    return_lse: Any
    deterministic: Any
    backend: Any
    around: Any
    determined: bool
    switches: Any
    environ: Any
    bias: Any = None
    sinks: Any = None
    layer: Any = None
    cast: Any = None
    pages: Any = None
    causal: Any = None  # of torch's signature, as the next
    gqa: Any = None
    door: str = "attention"
    noted: Any = None  # the choice that a recomputation has to repeat

    @classmethod
    def of(
        cls, mask: Any, bias: Any, scale: Any, softcap: Any, sinks: Any, dropout_p: Any,
        layout: Any, return_lse: Any, deterministic: Any, backend: Any,
    ) -> Key:  # fmt: skip
        """Return the key of a call of ``attention``; TypeError where an option has no hash."""
        key = cls(
            layout, None if mask is None else mask.signature, scale, softcap, dropout_p,
            return_lse, deterministic, backend, around(), determined(), switches(),
            settings.raw(settings.BACKEND), bias_key(bias), array_key(sinks),
        )  # fmt: skip
        hash(key)
        return key

    @classmethod
    def of_sdpa(cls, attn_mask: Any, dropout_p: Any, is_causal: Any, scale: Any, gqa: Any) -> Key:
        """Return the key of a call with torch's signature."""
        key = cls(
            "BNTH", array_key(attn_mask), scale, None, dropout_p, False, None, None, around(),
            determined(), switches(), settings.raw(settings.BACKEND), causal=is_causal, gqa=gqa,
            door="sdpa",
        )  # fmt: skip
        hash(key)
        return key

    @classmethod
    def of_paged(
        cls, block_table: Any, lengths: Any, mask: Any, scale: Any, softcap: Any, sinks: Any,
        layout: Any, return_lse: Any, backend: Any,
    ) -> Key:  # fmt: skip
        """Return the key of a call on pages."""
        key = cls.of(mask, None, scale, softcap, sinks, 0.0, layout, return_lse, None, backend)
        return key._replace(pages=(array_key(block_table), array_key(lengths)), door="paged")

    @property
    def is_plainest(self) -> bool:
        """Whether nothing is asked of the call, by its options or from around it."""
        return self == Key(
            self.layout, None, None, None, 0.0, False, None, None, None, self.determined, None,
            self.environ,
        )  # fmt: skip


STRANGE = (LookupError, TypeError, AttributeError, ValueError, RuntimeError)
"""What making a key may raise: the options of a call are anything, and it may be no call at all."""


def key_for(q: Any, k: Any, v: Any, of: Callable[..., Key], *options: Any) -> Key | None:
    """Return ``of(*options)``, or None for calls that the table cannot hold."""
    try:
        if q.is_nested or k.is_nested or v.is_nested:  # which have no shapes, and no check takes
            return None
        return of(*options)
    except STRANGE:  # for admission to say
        return None


def around() -> Any:
    """Return what is in force around a call, as part of a key; None if nothing ever was."""
    if not _state.armed:
        return None
    asked = scopes.scope.get("") or None, _local.traced, _local.module
    return None if asked == _NOTHING else asked


_NOTHING = (None, None, None)


def switches() -> tuple[bool, ...] | None:
    """Return torch's own switches, in the order of :data:`SWITCHES`; None: all are on."""
    flash, efficient, math, cudnn = SWITCHES
    found = flash(), efficient(), math(), cudnn()
    return None if found == _ALL_ON else found


_ALL_ON = (True, True, True, True)


def array_key(x: Any) -> Any:
    """Return what a choice rests on of an array that is no input."""
    if x is None:
        return None
    return x.shape, x.dtype, x.device, x.requires_grad and is_grad_enabled(), type(x)


def bias_key(bias: Any) -> Any:
    """Return what a choice rests on of a bias."""
    return None if bias is None else (bias.signature, array_key(bias.payload))


class Entry(NamedTuple):
    """What runs for tensors like those it was made with: ``check(q, k, v)`` says which those are.

    `operator`: what `run` is nothing but, where it is so (see `polyattn.torch.backends.sdpa`).
    """

    check: Callable[..., bool]
    run: Callable[..., Any]
    plan: Any
    operator: Any = None


class Row(NamedTuple):
    """The entries of one key: the newest laid open, and all of them by the shapes of q, k, v."""

    check: Callable[..., bool]
    run: Callable[..., Any]
    plan: Any
    by_shapes: dict[Any, tuple[Entry, ...]]


Bare = tuple[Callable[..., bool], Any, Any]
Plain = tuple[Callable[..., bool], Any, Any, bool, Any, tuple[Bare, ...]]


def tensor_check(q: Tensor, k: Tensor, v: Tensor) -> Callable[..., bool]:
    """Return ``check(q, k, v)``: whether three tensors are alike in all that a choice rests on.

    torch's own compiled guard looks at type, dtype, device, shape, the last stride, gradients and
    the dispatch state (autocast, inference mode, function transforms) in 0.2 us.
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
    guards = tensor_guards()
    if guards is None:
        return None
    try:
        return guards(  # type: ignore[no-any-return]
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=list(map(_strides, tensors)),
        ).check
    except (TypeError, SystemError):
        return None


def _strides(x: Tensor) -> list[int | None]:
    """Return the strides that a choice rests on: that of the last dim; kernels read the others."""
    if x.dim() == 0 or x.shape[-1] <= 1:
        return [None] * x.dim()
    return [*[None] * (x.dim() - 1), x.stride(-1)]


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
        type(x), x.dtype, x.device, x.shape, *_strides(x), x.requires_grad, x.is_inference(),
        x.is_neg(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        transform_level(),
    )  # fmt: skip


def _slow_check(*tensors: Tensor) -> Callable[..., bool]:
    facts = tuple(map(_facts, tensors))

    def check(*others: Tensor) -> bool:
        return all(isinstance(x, Tensor) for x in others) and tuple(map(_facts, others)) == facts

    return check


class Table:
    """From keys to entries; emptied when a choice may change, and when it is full.

    `rows`: by key. `plain`: by layout, the newest entry of the plainest calls (see
    :attr:`Key.is_plainest`) and the older ones, with the switches that they were chosen under.
    """

    def __init__(self) -> None:
        self.rows: dict[Any, Row] = {}
        self.plain: dict[str, Plain] = {}
        self.changed: Callable[[], None] = lambda: None  # called when rows have changed
        self._count = 0
        scopes.listeners.append(self.forget)

    @property
    def count(self) -> int:
        """How many entries there are."""
        return self._count

    def forget(self) -> None:
        """Empty the table."""
        self.rows.clear()
        self.plain.clear()
        self._count = 0
        self.changed()

    def find(self, key: Key | None, q: Tensor, k: Tensor, v: Tensor) -> Entry | None:
        """Return the entry of this key and these tensors, if there is one."""
        row = None if key is None else self.rows.get(key)
        if row is None:
            return None
        try:
            shapes = q.shape, k.shape, v.shape
        except (AttributeError, RuntimeError):  # no tensors, or nested ones
            return None
        alike = row.by_shapes.get(shapes, ())
        return next((entry for entry in alike if entry.check(q, k, v)), None)

    def add(
        self, key: Key | None, entry: Entry, q: Tensor, k: Tensor, v: Tensor, epoch: str
    ) -> None:
        """Remember an entry as the newest of its key, unless its `epoch` has passed."""
        if key is None or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
            return
        with scopes.lock:
            if epoch != scopes.state.epoch:
                return
            if self._count >= _MOST_ENTRIES:
                self.forget()
            known = self.rows.get(key)
            by_shapes = {} if known is None else known.by_shapes
            shapes = q.shape, k.shape, v.shape
            alike = (entry, *by_shapes.get(shapes, ()))[:_MOST_ALIKE]
            by_shapes[shapes] = alike
            self._count += 1
            self.rows[key] = Row(entry.check, entry.run, entry.plan, by_shapes)
            if key.is_plainest:
                self._add_plain(key, entry)
            self.changed()

    def _add_plain(self, key: Key, entry: Entry) -> None:
        older: tuple[Bare, ...] = ()
        known = self.plain.get(key.layout)
        if known is not None and known[3:5] == (key.determined, key.environ):
            older = (known[:3], *known[5])[:_MOST_PLAIN]
        self.plain[key.layout] = (
            entry.check, entry.run, entry.operator, key.determined, key.environ, older,
        )  # fmt: skip


table = Table()
"""The table of this process."""

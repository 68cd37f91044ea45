"""Registering with transformers, and leaving it as it was."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from polyattn.errors import Unsupported
from polyattn.forks import kept_free
from polyattn.integrations.on_import import OnImport
from polyattn.integrations.transformers.library import (
    HOME,
    NAME,
    PAGED_NAME,
    implementation_of,
    library,
    note_support,
    require,
    supports_interface,
)

__all__ = ["is_registered", "register", "unregister"]

_ABSENT = object()


class _Held:
    """What stood where something of ours stands now, in the order in which it was put there."""

    def __init__(self) -> None:
        self.lock = kept_free(threading.RLock())
        self.entries: list[tuple[Any, str, Any, Any]] = []
        self.methods: list[tuple[type, str, Any, Any]] = []
        self.waiting: OnImport | None = None  # for transformers to be imported

    def put(self, mapping: Any, name: str, value: Any) -> None:
        self.entries.append((mapping, name, mapping.get(name, _ABSENT), value))
        mapping[name] = value

    def replace(self, owner: type, name: str, around: Callable[[Any], Any]) -> None:
        before = vars(owner)[name]
        value = around(before)
        self.methods.append((owner, name, before, value))
        setattr(owner, name, value)

    def restore(self) -> None:
        if self.waiting is not None:
            self.waiting.cancel()
            self.waiting = None
        while self.methods:
            owner, name, before, value = self.methods.pop()
            if vars(owner).get(name) is value:
                setattr(owner, name, before)
        while self.entries:
            mapping, name, before, value = self.entries.pop()
            if mapping.get(name) is not value:
                continue  # somebody else's by now
            if before is _ABSENT:
                del mapping[name]
            else:
                mapping[name] = before


_held = _Held()


def register(untested: bool = False) -> None:
    """Make ``attn_implementation="polyattn"`` known to transformers; twice is as once.

    transformers is not imported here: where it is not yet, this happens as soon as it is.
    `untested`: with a version of transformers that is newer than those this was tested with, too.

    Raises :class:`~polyattn.errors.MissingDependency` without transformers or torch, and
    :class:`~polyattn.errors.Unsupported` for a version outside the tested range. Nothing is
    changed then.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> register()
    >>> config = LlamaConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    >>> LlamaModel._from_config(config, attn_implementation="polyattn").config._attn_implementation
    'polyattn'
    """
    require(untested)
    with _held.lock:
        if is_registered():
            return
        if HOME in sys.modules:
            _put_in_place()
        else:
            _held.waiting = OnImport(HOME, _put_in_place)


def _put_in_place() -> None:
    from polyattn.integrations.transformers.attention_function import polyattn_attention
    from polyattn.integrations.transformers.mask_function import polyattn_mask

    with _held.lock:
        _held.waiting = None
        found = library()
        for name in (NAME, PAGED_NAME):
            _held.put(found.attention, name, polyattn_attention)
            _held.put(found.masks, name, polyattn_mask)
        _held.replace(found.pretrained, "get_correct_attn_implementation", _checking)
        if hasattr(found.batching, "switch_to_cb_friendly_attn"):
            _held.replace(found.batching, "switch_to_cb_friendly_attn", _keeping)


def unregister() -> None:
    """Leave transformers as it was before :func:`register`; without one nothing happens.

    What somebody else has put in our place since then stays. Models that are set to "polyattn"
    raise when they are called next.
    """
    with _held.lock:
        _held.restore()


def is_registered() -> bool:
    """Say whether :func:`register` is in force."""
    return bool(_held.entries) or _held.waiting is not None


def _checking(before: Any) -> Any:
    """Refuse models that do not hand their attention to the interface."""

    def get_correct_attn_implementation(self: Any, requested_attention: Any, *rest: Any,
                                        **named: Any) -> Any:  # fmt: skip
        if requested_attention in (NAME, PAGED_NAME) and not supports_interface(self):
            raise Unsupported(
                f"got attn_implementation={requested_attention!r} for {type(self).__name__}, which "
                "computes attention of its own, or picks its classes by the name; expected a model "
                "that hands it to transformers' AttentionInterface. Of a model with several parts, "
                'name the implementation of each: attn_implementation={"text_config": "polyattn"}.'
            )
        if requested_attention in (NAME, PAGED_NAME):
            note_support(self)
        return before(self, requested_attention, *rest, **named)

    return get_correct_attn_implementation


def _keeping(before: Any) -> Any:
    """Let continuous batching keep a model's implementation where that is ours.

    It knows its own implementations by their names and takes no other. To ours it hands no mask
    but the lengths of the sequences, as to flash attention.
    """

    def switch_to_cb_friendly_attn(self: Any, model: Any, *rest: Any, **named: Any) -> Any:
        if implementation_of(model.config) in (NAME, PAGED_NAME):
            return None
        return before(self, model, *rest, **named)

    return switch_to_cb_friendly_attn

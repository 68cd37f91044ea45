"""A backend as the classes that layers are written against: impl, metadata, builder."""

from __future__ import annotations

import operator
from typing import Any

from polyattn.errors import InvalidProblem, near_matches
from polyattn.integrations.fastvideo.metadata import (
    AttentionMetadata,
    AttentionMetadataBuilder,
    mask_and_bias,
    says_nothing,
)
from polyattn.masks import Causal
from polyattn.selection.platforms import platform_of
from polyattn.selection.registry import registry

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionMetadataBuilder",
    "backend_class",
    "checked_size",
]


def checked_size(name: str, value: Any) -> int:
    """Return `value`, any integer >= 1 (of NumPy, too), as an int."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise InvalidProblem(f"got {name}={value!r}, expected an integer >= 1.")
    return number


class AttentionImpl:
    """One layer's attention, bound to what was chosen for it: it runs there or raises.

    ``backend_name`` runs each call that it can, and the first able one of ``others`` the rest.

    `num_heads` N, `head_size` H, `softmax_scale`: None for 1/sqrt(H), `causal`: bottom-right,
    `num_kv_heads` K: None for N. `prefix` is the layer's name. Other arguments (`extra`) may be
    None, zero, False or empty; one that says something is an error. Layers can be pickled.
    """

    backend_name: str
    others: tuple[str, ...] = ()

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        dropout_p: float = 0.0,
        **extra: Any,
    ) -> None:
        for name, value in extra.items():
            if not says_nothing(value):
                raise InvalidProblem(
                    f"got the argument {name}={value!r}, which no backend here reads; expected "
                    f"{', '.join(_ARGUMENTS)}, and everything else None, zero or empty."
                    f"{near_matches(name, _ARGUMENTS)}"
                )
        self.num_heads, self.head_size = (
            checked_size("num_heads", num_heads),
            checked_size("head_size", head_size),
        )
        self.num_kv_heads = (
            self.num_heads if num_kv_heads is None else checked_size("num_kv_heads", num_kv_heads)
        )
        if self.num_heads % self.num_kv_heads:
            raise InvalidProblem(
                f"got num_heads={num_heads}, num_kv_heads={num_kv_heads}, expected heads a "
                "multiple of key/value heads."
            )
        self.softmax_scale, self.causal = softmax_scale, causal
        self.prefix, self.dropout_p = prefix, dropout_p
        self._attention = platform_of("torch").attention

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_attention"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._attention = platform_of("torch").attention

    def preprocess_qkv(self, qkv: Any, attn_metadata: AttentionMetadata | None = None) -> Any:
        """Return `qkv` as it is: no backend here wants another layout."""
        return qkv

    def postprocess_output(
        self, output: Any, attn_metadata: AttentionMetadata | None = None
    ) -> Any:
        """Return `output` as it is."""
        return output

    def forward(
        self, query: Any, key: Any, value: Any, attn_metadata: AttentionMetadata | None = None
    ) -> Any:
        """Compute attention of query (B, T, n, H) with key and value (B, S, k, H).

        `n` and `k` are all heads, or one rank's equal share of them (N / P and K / P on P ranks;
        as few as one k where there are more ranks than key/value heads). `attn_metadata`: an
        :class:`AttentionMetadata`, or another object with any of its attributes.
        """
        self._check(tuple(query.shape), tuple(key.shape))
        mask, bias = mask_and_bias(attn_metadata, query.shape[0], key.shape[1])
        if self.causal:
            mask = Causal() if mask is None else mask & Causal()
        return self._attention(
            query,
            key,
            value,
            mask=mask,
            bias=bias,
            scale=self.softmax_scale,
            dropout_p=self.dropout_p,
            backend=(self.backend_name, *self.others) if self.others else self.backend_name,
        )

    def _check(self, query: tuple[int, ...], key: tuple[int, ...]) -> None:
        def fits(shape: tuple[int, ...], heads: int) -> bool:
            good = len(shape) == 4 and shape[3] == self.head_size
            return good and 0 < shape[2] <= heads and heads % shape[2] == 0

        if not (fits(query, self.num_heads) and fits(key, self.num_kv_heads)):
            raise InvalidProblem(
                f"got query {query} and key {key}, expected (B, T, {self.num_heads}, "
                f"{self.head_size}) and (B, S, {self.num_kv_heads}, {self.head_size}), or one "
                "rank's equal share of the heads."
            )


_ARGUMENTS = (
    "num_heads", "head_size", "softmax_scale", "causal", "num_kv_heads", "prefix", "dropout_p",
)  # fmt: skip


class AttentionBackend:
    """A chosen backend; asked through its static methods, never instantiated."""

    @staticmethod
    def get_name() -> str:
        """Return the name in upper case, as in ``AttentionBackendEnum``."""
        raise NotImplementedError

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Return the class whose ``forward`` computes."""
        raise NotImplementedError

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        """Return the class of the metadata."""
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Return the class that builds the metadata."""
        return AttentionMetadataBuilder


_classes: dict[str, type] = {}


def backend_class(name: str, *others: str) -> type[AttentionBackend]:
    """Return the class of the backend called `name`, always the same one.

    `others`: backends for the calls that it cannot run, in order. The class and its impl class
    can be imported from here by their names, and so be pickled.

    >>> backend_class("flex", "sdpa_math").get_impl_cls()
    <class 'polyattn.integrations.fastvideo.layer.AttentionImpl[flex,sdpa_math]'>
    """
    names = [registry.known(n, asked_by="backend", framework="torch") for n in (name, *others)]
    return _class(f"AttentionBackend[{','.join(names)}]")


def _class(qualname: str) -> type[Any]:
    if qualname not in _classes:
        base, _, names = qualname.removesuffix("]").partition("[")
        name, *others = names.split(",")
        summary = registry.get(name, "torch").summary or name
        members: dict[str, Any] = {"__module__": __name__, "__qualname__": qualname}
        if base == "AttentionImpl":
            members |= {"backend_name": name, "others": tuple(others)}
            made: type = type(qualname, (AttentionImpl,), members)
        else:
            impl = _class(f"AttentionImpl[{names}]")
            members |= {
                "get_name": staticmethod(name.upper),
                "get_impl_cls": staticmethod(lambda: impl),
                "__doc__": f"{summary}, as the class that layers use.",
            }
            made = type(qualname, (AttentionBackend,), members)
        _classes.setdefault(qualname, made)
    return _classes[qualname]


def __getattr__(name: str) -> Any:
    if name.startswith(("AttentionBackend[", "AttentionImpl[")):
        return _class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""Attention operators by name."""

from __future__ import annotations

from typing import ClassVar, TypeVar

from polyattn.errors import InvalidProblem, PolyattnError, near_matches
from polyattn.jax.operator.impl import AttentionImpl
from polyattn.jax.operator.metadata import AttentionMetadata

__all__ = ["AttentionRegistry"]

Impl = TypeVar("Impl", bound=AttentionImpl)


class AttentionRegistry:
    """The implementations of attention by name; several names may stand for one.

    >>> from polyattn.jax import AttentionRegistry
    >>> "vanilla" in AttentionRegistry.list_implementations()
    True
    """

    _impls: ClassVar[dict[str, type[AttentionImpl]]] = {}

    @classmethod
    def register(cls, impl_cls: type[Impl]) -> type[Impl]:
        """Register a class under all names that its ``get_impl_name`` gives; a decorator.

        Raises :class:`~polyattn.errors.PolyattnError` for a name that another class has.
        """
        if not (isinstance(impl_cls, type) and issubclass(impl_cls, AttentionImpl)):
            raise PolyattnError(f"got {impl_cls!r}, expected a subclass of AttentionImpl.")
        given = impl_cls.get_impl_name()
        names = (given,) if isinstance(given, str) else tuple(given)
        for name in names:
            if not isinstance(name, str) or not name:
                raise PolyattnError(f"got the name {name!r}, expected a text that is not empty.")
            if cls._impls.get(name, impl_cls) is not impl_cls:
                raise PolyattnError(
                    f"got a second implementation called {name!r} ({impl_cls.__qualname__}), "
                    f"which {cls._impls[name].__qualname__} is already; choose another name."
                )
        cls._impls.update(dict.fromkeys(names, impl_cls))
        return impl_cls

    @classmethod
    def get(cls, impl_name: str) -> type[AttentionImpl]:
        """Return the class of a name; raise :class:`ValueError`, with all names, for others."""
        found = cls._impls.get(impl_name) if isinstance(impl_name, str) else None
        if found is None:
            names = cls.list_implementations()
            raise InvalidProblem(
                f"got the implementation {impl_name!r}, expected one of {', '.join(names)}."
                f"{near_matches(str(impl_name), names)}"
            )
        return found

    @classmethod
    def create(cls, impl_name: str, metadata: AttentionMetadata) -> AttentionImpl:
        """Return an instance of the class of a name, on the metadata as it is."""
        return cls.get(impl_name)(metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Return every name, aliases too, in order of registration."""
        return list(cls._impls)

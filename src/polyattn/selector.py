"""The backend selector of video model code bases, by their names, on polyattn's one mechanism.

``global_force_attn_backend`` is the strongest of the seven sources (see `polyattn.decide`); what
these functions set and show is the very state that ``attention(...)`` obeys.

Source: FastVideo's ``fastvideo.attention.selector`` (Apache-2.0), whose names these are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from polyattn import scopes, settings
from polyattn.choice import choose, current_wishes
from polyattn.errors import InvalidProblem
from polyattn.layer import AttentionBackend, backend_class
from polyattn.platforms import platform_of
from polyattn.problem import Problem
from polyattn.registry import registry
from polyattn.requests import Request

__all__ = [
    "AttentionBackendEnum",
    "backend_name_to_enum",
    "forced_attn_backend",
    "get_attn_backend",
    "get_env_variable_attn_backend",
    "get_global_forced_attn_backend",
    "global_force_attn_backend",
    "global_force_attn_backend_context_manager",
]


class AttentionBackendEnum(Enum):
    """The backends of this package; `TORCH_SDPA` stands for the sdpa kernels, in order."""

    SDPA_FLASH = "sdpa_flash"
    SDPA_EFFICIENT = "sdpa_efficient"
    SDPA_CUDNN = "sdpa_cudnn"
    SDPA_MATH = "sdpa_math"
    NATIVE_CPU = "native_cpu"
    FLEX = "flex"
    REFERENCE = "reference"
    TORCH_SDPA = "torch_sdpa"


forced_attn_backend: AttentionBackendEnum | str | None
"""What is forced now, or None: always the truth, since reading it asks."""


def __getattr__(name: str) -> Any:
    if name == "forced_attn_backend":
        return get_global_forced_attn_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def backend_name_to_enum(backend_name: str) -> AttentionBackendEnum | None:
    """Return the member called `backend_name`, or None for an unknown or out-of-tree name.

    >>> backend_name_to_enum("SDPA_FLASH"), backend_name_to_enum("NO_SUCH")
    (<AttentionBackendEnum.SDPA_FLASH: 'sdpa_flash'>, None)
    """
    if not isinstance(backend_name, str):
        raise InvalidProblem(
            f"got a backend name of type {type(backend_name).__name__}, expected a string such as "
            "'SDPA_FLASH'."
        )
    return AttentionBackendEnum.__members__.get(backend_name.strip().upper())


def get_env_variable_attn_backend() -> AttentionBackendEnum | None:
    """Return the member named by ``POLYATTN_BACKEND``, or None when it is unset.

    A value that names nothing registered raises :class:`~polyattn.errors.UnknownBackend` with
    near matches; the name of an out-of-tree backend has no member and gives None.
    """
    name = settings.current().backend
    if name is None:
        return None
    registry.expand(name, asked_by="POLYATTN_BACKEND")
    return backend_name_to_enum(name)


def get_global_forced_attn_backend() -> AttentionBackendEnum | str | None:
    """Return what is forced now (the name, for an out-of-tree backend), or None."""
    name = scopes.state.forced
    return None if name is None else backend_name_to_enum(name) or name


def global_force_attn_backend(attn_backend: AttentionBackendEnum | str | None) -> None:
    """Force a backend for the whole process, all threads; None returns to automatic.

    Raises :class:`~polyattn.errors.UnknownBackend` for a name that nothing registered.
    """
    if attn_backend is None:
        scopes.set_forced(None)
        return
    registry.expand(attn_backend, asked_by="global_force_attn_backend")
    scopes.set_forced(str(getattr(attn_backend, "value", attn_backend)).strip().lower())


@contextmanager
def global_force_attn_backend_context_manager(
    attn_backend: AttentionBackendEnum | str | None,
) -> Iterator[None]:
    """Force a backend for the whole process; every exit restores what was forced before.

    >>> with global_force_attn_backend_context_manager(AttentionBackendEnum.FLEX):
    ...     get_global_forced_attn_backend()
    <AttentionBackendEnum.FLEX: 'flex'>
    >>> get_global_forced_attn_backend()
    """
    before = scopes.state.forced
    global_force_attn_backend(attn_backend)
    try:
        yield
    finally:
        scopes.set_forced(before)


def get_attn_backend(
    head_size: int,
    dtype: Any,
    supported_attention_backends: Iterable[AttentionBackendEnum | str] | None = None,
) -> type[AttentionBackend]:
    """Return the backend for a layer as a class with its impl, metadata and builder classes.

    `head_size`: head dim; `dtype`: of query, key and value; `supported_attention_backends`: what
    the layer can use, any iterable. What is forced, scoped or named by ``POLYATTN_BACKEND`` is
    obeyed, within the layer's list, or :class:`~polyattn.errors.Unsupported` says why not.

    >>> import torch
    >>> backend = get_attn_backend(64, torch.float32, ["SDPA_MATH"])
    >>> backend.get_name()
    'SDPA_MATH'
    >>> q = torch.randn(1, 16, 4, 64)
    >>> impl = backend.get_impl_cls()(num_heads=4, head_size=64, softmax_scale=0.125)
    >>> impl.forward(q, q, q, backend.get_builder_cls()().build()).shape
    torch.Size([1, 16, 4, 64])
    """
    if isinstance(head_size, bool) or not isinstance(head_size, int) or head_size < 1:
        raise InvalidProblem(f"got head_size={head_size!r}, expected an integer >= 1.")
    layer = None
    if supported_attention_backends is not None:
        layer = frozenset(Request.make(supported_attention_backends).names)
    device, arch = platform_of("torch").present_device()
    problem = Problem(
        batch=1, q_len=1024, kv_len=1024, heads=8, kv_heads=8, head_dim=head_size,
        dtype=str(dtype).rpartition(".")[2], device=device, arch=arch,
    )  # fmt: skip
    return _class(choose(problem, current_wishes(None, layer)).backend)


@functools.lru_cache(maxsize=256)
def _class(name: str) -> type[AttentionBackend]:
    return backend_class(name)

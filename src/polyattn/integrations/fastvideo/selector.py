"""The backend selector of video model code bases, by their names, on polyattn's one mechanism.

``global_force_attn_backend`` is the strongest of the seven sources (see `polyattn.selection`);
what these functions set and show is the very state that ``attention(...)`` obeys.

Source: FastVideo's ``fastvideo.attention.selector`` (Apache-2.0), whose names these are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, EnumMeta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from polyattn import settings
from polyattn.errors import InvalidProblem, UnknownBackend
from polyattn.integrations.fastvideo.layer import AttentionBackend, backend_class, checked_size
from polyattn.problem import Problem
from polyattn.selection import Accepted, Decision, Rejected, Selection, Source, scopes
from polyattn.selection.capabilities import Reason
from polyattn.selection.platforms import platform_of
from polyattn.selection.prepare import select_here
from polyattn.selection.registry import registry
from polyattn.selection.requests import Request
from polyattn.selection.spelling import is_of_the_field, spelt
from polyattn.selection.wishes import current_wishes

__all__ = [
    "NO_REQUEST",
    "AttentionBackendEnum",
    "backend_name_to_enum",
    "explain_attn_backend",
    "forced_attn_backend",
    "get_attn_backend",
    "get_env_variable_attn_backend",
    "get_global_forced_attn_backend",
    "global_force_attn_backend",
    "global_force_attn_backend_context_manager",
]


class _Registered(EnumMeta):
    """Of an enumeration whose members are the registered backends, which no type checker reads."""

    if TYPE_CHECKING:

        def __getattr__(cls, name: str) -> AttentionBackendEnum: ...


class AttentionBackendEnum(Enum, metaclass=_Registered):
    """The backends of this package; `TORCH_SDPA` stands for the sdpa kernels, in order."""

    _ignore_ = "name"
    for name in registry.in_tree_names("torch"):
        vars()[name.upper()] = name


class _NoRequest(Enum):
    """The type of `NO_REQUEST`."""

    NO_REQUEST = "no request"


NO_REQUEST: Final = _NoRequest.NO_REQUEST
"""The caller of `get_attn_backend` has no opinion; what is asked for around it counts."""


forced_attn_backend: AttentionBackendEnum | str | None
"""What is forced now, or None. Reading asks, so it is always the truth; assigning forces."""


class _Selector(ModuleType):
    """This module's class: a plain attribute that anybody assigns to would lie from then on."""

    @property
    def forced_attn_backend(self) -> AttentionBackendEnum | str | None:
        return get_global_forced_attn_backend()

    @forced_attn_backend.setter
    def forced_attn_backend(self, attn_backend: AttentionBackendEnum | str | None) -> None:
        global_force_attn_backend(attn_backend)


sys.modules[__name__].__class__ = _Selector


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
    scopes.set_forced(spelt(attn_backend))


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
    supported_attention_backends: Iterable[Any] | None = None,
    default_backend: Any = None,
    requested: Any = NO_REQUEST,
) -> type[AttentionBackend]:
    """Return the backend for a layer as a class with its impl, metadata and builder classes.

    `head_size`: head dim; `dtype`: of query, key and value. `supported_attention_backends`: what
    the layer can use, any iterable; names of other code bases that no backend here answers to
    count for nothing. `requested`: the caller's own request, a name or several in order, stronger
    than scopes and ``POLYATTN_BACKEND``; None means automatic, whatever those say. What is forced,
    requested, scoped or named by ``POLYATTN_BACKEND`` is obeyed, within the layer's list, or
    :class:`~polyattn.errors.Unsupported` says why not. `default_backend`: what the layer prefers
    where nothing is asked for; passed over if it cannot run.

    The choice is made for a plain call. A call that the chosen one cannot run (with a mask, say)
    goes to the next that was asked for or, if nothing was, that the layer can use.

    >>> import torch
    >>> backend = get_attn_backend(64, torch.float32, ["SDPA_MATH"])
    >>> backend.get_name()
    'SDPA_MATH'
    >>> q = torch.randn(1, 16, 4, 64)
    >>> impl = backend.get_impl_cls()(num_heads=4, head_size=64, softmax_scale=0.125)
    >>> impl.forward(q, q, q, backend.get_builder_cls()().build()).shape
    torch.Size([1, 16, 4, 64])
    """
    selection, others = _selected(
        head_size, dtype, supported_attention_backends, default_backend, requested
    )
    return backend_class(selection.backend, *others)


def explain_attn_backend(
    head_size: int,
    dtype: Any,
    supported_attention_backends: Iterable[Any] | None = None,
    default_backend: Any = None,
    requested: Any = NO_REQUEST,
) -> Selection:
    """Say what `get_attn_backend` chooses, and what was decided of every other one and why.

    >>> import torch
    >>> choice = explain_attn_backend(64, torch.float32, default_backend="FLASH_ATTN")
    >>> print(choice.decisions["flash_attn"])
    backend: got flash_attn, takes a registered name
    """
    return _selected(head_size, dtype, supported_attention_backends, default_backend, requested)[0]


def _selected(
    head_size: int, dtype: Any, supported: Iterable[Any] | None, default: Any, requested: Any
) -> tuple[Selection, list[str]]:
    """Return the choice, and what runs the calls that it cannot."""
    layer = _layer(supported)
    preferred = _expand(default, "default_backend")
    device, arch = platform_of("torch").present_device()
    problem = Problem(
        batch=1,
        q_len=1024,
        kv_len=1024,
        heads=8,
        kv_heads=8,
        head_dim=checked_size("head_size", head_size),
        dtype=str(dtype).rpartition(".")[2],
        device=device,
        arch=arch,
    )
    call = None if requested is NO_REQUEST else requested
    wishes = current_wishes(call, layer)
    if requested is None:
        scope = replace(wishes.scope, names=())
        wishes = replace(wishes, scope=scope, module=Request(), env=Request())
    selection = select_here(problem, wishes)
    if not selection.source.is_request:
        selection = _preferring(selection, preferred)
    return selection, _others(problem, selection, wishes)


def _others(problem: Problem, selection: Selection, wishes: Any) -> list[str]:
    """Return what may run the calls that the chosen backend cannot, in order."""
    asked = selection.source.is_request
    allowed = wishes.ordered()[0][1].names if asked else registry.names(problem.framework)
    found = []
    for name in allowed:
        decision = selection.decisions.get(name)
        barred = decision is None or (
            isinstance(decision, Rejected)
            and any(reason.fact in ("layer", "scope") for reason in decision.reasons)
        )
        backend = registry.get(name, problem.framework)
        exact = backend.capabilities_for(problem.device).exactness == "exact"
        if name != selection.backend and not barred and (asked or exact):
            found.append(name)
    return found


def _layer(supported: Iterable[Any] | None) -> frozenset[str] | None:
    """Return what a layer can use; raise if that is nothing here, or for misspelt names."""
    if supported is None:
        return None
    listed = [supported] if isinstance(supported, (str, Enum)) else list(supported)
    here = registry.names()
    found = [n for name in listed for n in _expand(name, "supported_attention_backends")]
    names = frozenset(n for n in found if n in here)
    if listed and not names:
        registry.expand(listed[0], asked_by="supported_attention_backends")
    return names


def _expand(name: Any, asked_by: str) -> tuple[str, ...]:
    """Return what `name` stands for; a name that only other code bases know stands for itself."""
    if name is None:
        return ()
    try:
        return registry.expand(name, asked_by=asked_by)
    except UnknownBackend:
        if not is_of_the_field(name):
            raise
        return (spelt(name),)


def _preferring(selection: Selection, preferred: tuple[str, ...]) -> Selection:
    """Return the automatic choice, or the layer's default where it can run."""
    decisions: dict[str, Decision] = dict(selection.decisions)
    for name in preferred:
        decision = decisions.setdefault(
            name, Rejected((Reason("backend", name, "a registered name"),))
        )
        if isinstance(decision, Accepted):
            return replace(
                selection,
                backend=name,
                source=Source.HEURISTIC,
                config={},
                decisions=decisions,
                reason="the layer's default_backend",
                version=decision.detail,
            )
    return replace(selection, decisions=decisions)

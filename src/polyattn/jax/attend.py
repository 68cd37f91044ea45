"""``attention``, ``explain`` and ``plan`` for JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import jax

from polyattn.errors import InvalidProblem, near_matches
from polyattn.jax import platform
from polyattn.jax.admission import admit
from polyattn.jax.context import settled
from polyattn.jax.dispatch import admitted, plan_for, run
from polyattn.jax.kit.masking import bind_mask
from polyattn.jax.kit.pytrees import ensure_pytree
from polyattn.jax.sharding.explicit import ExplicitPlace
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection import Selection, platforms
from polyattn.selection.prepare import select_here
from polyattn.selection.requests import Request
from polyattn.selection.wishes import current_wishes

__all__ = ["attention", "attention_by_blocks", "explain", "plan"]

Backends = str | tuple[str, ...] | list[str]


class _Options(TypedDict, total=False):
    """What :func:`attention` takes beside `return_lse`, for type checkers."""

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sinks: jax.Array | None
    dropout_p: float
    dropout_key: jax.Array | None
    layout: str
    deterministic: bool | None
    backend: Backends | None


@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    return_lse: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_p: float = 0.0,
    dropout_key: jax.Array | None = None,
    layout: str = "BTNH",
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: Backends | None = None,
) -> Any:
    """Compute softmax(scale * query @ key.T + bias, masked) @ value on the best backend.

    `B` batch, `T` query length, `S` key length, `N` query heads, `K` key/value heads (N is a
    multiple of K), `H` head dim, `V` value dim:

    - `query` (B, T, N, H), `key` (B, S, K, H), `value` (B, S, K, V); with ``layout="BNTH"`` heads
      come second, with ``layout="packed"`` query (total, N, H) and so on, and `Packed` is in the
      mask.
    - `mask`: a :class:`polyattn.Mask`; `bias`: a :class:`polyattn.Bias`, added after the soft cap.
      Both are pytrees: their arrays may be traced.
    - `scale`: default 1/sqrt(H). `softcap`: s = softcap * tanh(s / softcap).
    - `sinks`: (N,) or (N, M) logits added to the denominator.
    - `dropout_p`: on the probabilities, drawn from `dropout_key`, a key of ``jax.random``.
    - `deterministic`: whether the same call must give the same bits; None: as it comes.
    - `backend`: a name, or several in order: runs there or raises.

    Returns out (B, T, N, V) in the layout and dtype of `query`; with `return_lse` also the
    natural log-sum-exp (B, N, T), float32 or float64, (N, total) when packed. A query that sees
    no key gives 0 and -inf.

    Under ``jit`` the backend is chosen while tracing; what is asked for (`use_backend`, a forced
    backend) is part of JAX's key, so that code which was traced under another request is traced
    again. ``POLYATTN_BACKEND`` is read while tracing.

    Raises :class:`~polyattn.errors.InvalidProblem` for a wrong call,
    :class:`~polyattn.errors.UnknownBackend`, and :class:`~polyattn.errors.Unsupported` when the
    request cannot be met; all of them while tracing.

    >>> import jax
    >>> from polyattn import Causal
    >>> q = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    >>> jax.jit(lambda q: attention(q, q, q, mask=Causal()))(q).shape
    (1, 4, 2, 8)
    """
    options = {
        "mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks,
        "dropout_p": dropout_p, "layout": layout, "return_lse": return_lse,
        "deterministic": deterministic,
    }  # fmt: skip
    call = admitted(query, key, value, dropout_key, options)
    given = {**options, "dropout_key": dropout_key, "backend": backend}
    found = _on_each_device(attention, (query, key, value), given)
    return run(call, query, key, value, dropout_key, backend) if found is None else found


def _on_each_device(
    attend: Callable[..., Any], arrays: tuple[Any, Any, Any], options: Mapping[str, Any]
) -> Any:
    """Call `attend` on each device's share of admitted arrays over an Explicit mesh, else None."""
    place = ExplicitPlace.of(arrays, options["layout"])
    if place is None:
        return None
    return place.run(attend, arrays, {**options, "mask": _bound(options["mask"])})


def _bound(mask: Any) -> Any:
    """Return a mask as a pytree of JAX's arrays; what is none is for admission to refuse."""
    if not isinstance(mask, Mask):
        return mask
    ensure_pytree(mask)
    return bind_mask(mask)


def attention_by_blocks(
    query: Any, key: Any, value: Any, blocks: Mapping[str, int], backend: Any, **options: Any
) -> Any:
    """Call :func:`attention` on a backend whose blocks have these sizes, as it calls them.

    Raises :class:`~polyattn.errors.InvalidProblem` for a size that the backend does not have.
    """
    options = {**_DEFAULTS, **options}
    given = {**options, "blocks": blocks, "backend": backend}
    dropout_key = options.pop("dropout_key")
    call = admitted(query, key, value, dropout_key, options)
    found = _on_each_device(attention_by_blocks, (query, key, value), given)
    if found is not None:
        return found
    sizes = tuple(sorted(blocks.items()))
    return run(call, query, key, value, dropout_key, backend, sizes=sizes)


def plan(
    query: Any, key: Any, value: Any, *, backend: Backends | None = None, **options: Any
) -> Callable[..., Any]:
    """Resolve a call once; the result ``step(q, k, v)`` is the kernel's call, compiled.

    Takes the options of :func:`attention`; arrays may be ``jax.ShapeDtypeStruct``. `step` is for
    arrays like the given ones in all but their values, and raises
    :class:`~polyattn.errors.InvalidProblem` for others. ``step.selection`` says what was chosen.

    >>> import jax
    >>> q = jax.random.normal(jax.random.key(0), (1, 4, 2, 8))
    >>> plan(q, q, q)(q, q, q).shape
    (1, 4, 2, 8)
    """
    options = {**_DEFAULTS, **_known_options(options)}
    dropout_key = options.pop("dropout_key")
    call = admitted(query, key, value, dropout_key, options)
    chosen = plan_for(call.problem, backend)
    name = chosen.selection.backend
    given = {**options, "dropout_key": dropout_key, "backend": name}

    @jax.jit
    def step(q: Any, k: Any, v: Any) -> Any:
        found = _on_each_device(attention, (q, k, v), given)
        return run(call, q, k, v, dropout_key, name) if found is None else found

    like = tuple((tuple(x.shape), x.dtype) for x in (query, key, value))

    def planned(q: Any, k: Any, v: Any) -> Any:
        given = tuple((getattr(x, "shape", ()), getattr(x, "dtype", None)) for x in (q, k, v))
        if given != like:
            raise InvalidProblem(
                f"got a step with {_told(given)}, expected {_told(like)}, which it was planned "
                "for; plan another one, or call attention."
            )
        return step(q, k, v)

    planned.selection = chosen.selection  # type: ignore[attr-defined]
    return planned


def _told(arrays: Any) -> str:
    return ", ".join(f"{dtype} {tuple(shape)}" for shape, dtype in arrays)


def explain(
    query: Any,
    key: Any = None,
    value: Any = None,
    *,
    facts: Facts | None = None,
    backend: Backends | None = None,
    supported_attention_backends: Any = None,
    **options: Any,
) -> Selection:
    """Say which backend a call would run on, and for every other one why not; it is not run.

    Takes a :class:`polyattn.Problem` with ``framework="jax"``, or the arguments of
    :func:`attention` (arrays may be ``jax.ShapeDtypeStruct``). With `facts` (see
    :meth:`polyattn.Facts.parse`) it answers for a machine that one does not have, as far as
    capabilities tell.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 64), jnp.bfloat16)
    >>> explain(x, x, x, softcap=30.0).problem.softcap
    30.0
    """
    if isinstance(query, Problem):
        problem = query
    else:
        options = {**_DEFAULTS, **_known_options(options)}
        options.pop("dropout_key")
        problem = admit(query, key, value, **options).problem
    if facts is not None:
        problem = problem.with_(device=facts.device, arch=facts.arch)
    layer = None
    if supported_attention_backends is not None:
        layer = frozenset(Request.make(supported_attention_backends).names)
    return settled(lambda _: select_here(problem, current_wishes(backend, layer), facts))


_DEFAULTS: dict[str, Any] = {
    "mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None, "dropout_p": 0.0,
    "dropout_key": None, "layout": "BTNH", "return_lse": False, "deterministic": None,
}  # fmt: skip


def _known_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _DEFAULTS:
            raise InvalidProblem(
                f"got the option {name!r}, expected one of {', '.join(_DEFAULTS)}."
                f"{near_matches(name, _DEFAULTS)}"
            )
    return options


platforms.register_platform(
    platforms.Platform(
        framework="jax",
        versions=platform.library_versions,
        attention=attention,
        device_description=platform.device_description,
        described=platform.described,
        present_device=platform.present_device,
    )
)

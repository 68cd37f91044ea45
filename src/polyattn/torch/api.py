"""``attention``: one call, every kernel.

The hot path is one small key of options and a compiled check of the three tensors (their
types, dtypes, devices, shapes, strides, gradients, dispatch state) before the prepared kernel
is called. Everything else happens once per class of calls, in :func:`_miss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_deterministic_algorithms, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from polyattn import scopes, settings
from polyattn.decide import Wishes
from polyattn.errors import InvalidProblem, near_matches
from polyattn.facts import Facts
from polyattn.masks import Mask
from polyattn.problem import Problem
from polyattn.requests import Request
from polyattn.selection import Selection
from polyattn.torch import recompute, traced
from polyattn.torch.door import Call, admit, rebind
from polyattn.torch.empty import answer_empty
from polyattn.torch.fastpath import Entry, FastTable, tensor_check
from polyattn.torch.masking import is_static
from polyattn.torch.resolve import Plan, choose, plan_for, wishes

__all__ = ["attention", "explain", "plan"]

_table = FastTable()
_entries = _table.entries
_state, _local = scopes.state, scopes.local
_scope, _recorders = scopes.scope.get, scopes.recording.get
_environ = settings.raw_backend


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    layout: str = "BTNH",
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: Any = None,
) -> Any:
    """Compute softmax(scale * query @ key.T + bias, masked) @ value on the best backend.

    `B` batch, `T` query length, `S` key length, `N` query heads, `K` key/value heads (N is a
    multiple of K), `H` head dim, `V` value dim:

    - `query` (B, T, N, H), `key` (B, S, K, H), `value` (B, S, K, V); with ``layout="BNTH"`` heads
      come second, with ``layout="packed"`` query (total, N, H) and so on, with `Packed` in the mask.
    - `mask`: a :class:`polyattn.Mask`; `bias`: a :class:`polyattn.Bias`, added after the soft cap.
    - `scale`: default 1/sqrt(H). `softcap`: s = softcap * tanh(s / softcap).
    - `sinks`: (N,) or (N, M) logits added to the denominator.
    - `dropout_p`: on the probabilities. `deterministic`: None follows torch's own setting.
    - `backend`: a name, or several in order: runs there or raises.

    Returns out (B, T, N, V) in the layout and dtype of `query`; with `return_lse` also the
    natural log-sum-exp (B, N, T), float32 or float64, (N, total) when packed. A query that sees
    no key gives 0 and -inf.

    Raises :class:`~polyattn.errors.InvalidProblem` for a wrong call,
    :class:`~polyattn.errors.UnknownBackend`, and :class:`~polyattn.errors.Unsupported` when the
    request cannot be met.

    >>> import torch
    >>> from polyattn import Causal
    >>> q = k = v = torch.randn(1, 4, 2, 8)
    >>> attention(q, k, v, mask=Causal()).shape
    torch.Size([1, 4, 2, 8])
    """
    if is_dynamo_compiling():
        return traced.attention(
            query, key, value, mask, bias, scale, softcap, sinks, dropout_p, layout, return_lse,
            deterministic, backend,
        )  # fmt: skip
    run = None
    if bias is None and sinks is None:
        try:
            ambient = _ambient() if _state.armed else None
            for check, ready, _ in _entries[
                None if mask is None else mask.signature, scale, softcap, dropout_p, layout,
                return_lse, deterministic, backend, is_grad_enabled(), ambient,
                _get_deterministic_algorithms(), _environ(), _state.epoch,
            ]:  # fmt: skip
                if check(query, key, value):
                    run = ready
                    break
        except (LookupError, TypeError, AttributeError):
            pass  # a new class of calls, or a wrong one: both are for the long way
    if run is not None:
        return run(query, key, value, mask)
    return _long_way(
        query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, sinks=sinks,
        dropout_p=dropout_p, layout=layout, return_lse=return_lse, deterministic=deterministic,
        backend=backend,
    )  # fmt: skip


def _ambient() -> tuple[str | None, str | None, str | None]:
    """Return the scopes that are part of the key; LookupError sends the call the long way."""
    if _recorders(None) or recompute.is_possible():
        raise LookupError
    return _scope(None), _local.traced, _local.module


def _long_way(q: Any, k: Any, v: Any, *, backend: Any, **options: Any) -> Any:
    """Resolve what the fast table does not hold, replay checkpointed regions, record."""
    key = _key(options, backend)
    regions = recompute.regions() if _state.armed and recompute.is_possible() else None
    entry: Entry | None = None
    if regions is not None:
        replayed, entry = regions.replay(_shape_key(q, k, v, options))
        if replayed and entry is None:  # the forward pass was under no request
            entry = _entry(None, q, k, v, backend, options, asked=False)
    if entry is None:
        entry = _entry(key, q, k, v, backend, options)
    if regions is not None:
        regions.note(_shape_key(q, k, v, options), entry)
    for ran in _recorders(()):
        ran.append(entry[2].selection)
    return entry[1](q, k, v, options["mask"], options["bias"], options["sinks"])


def _entry(
    key: Any, q: Any, k: Any, v: Any, backend: Any, options: Any, asked: bool = True
) -> Entry:
    """Return the cached entry of a call, or resolve one; not `asked`: as if under no request."""
    found = _table.find(key, q, k, v) if key is not None else None
    if found is not None:
        return found
    call = admit(q, k, v, **options)
    wanted = wishes(backend, None, scopes.current_scope(), _local.module)
    if not asked:
        wanted = Wishes(call=wanted.call, env=wanted.env, on_unsupported=wanted.on_unsupported)
    plan = plan_for(call.problem, wanted)
    entry = (tensor_check(q, k, v), _runner(plan, call), plan)
    if key is not None and type(q) in _PLAIN:
        # the epoch may have moved on: settings and plugins are read at first use
        _table.add(_key(options, backend), entry)
    return entry


_PLAIN = (Tensor, torch.nn.Parameter)


def _key(options: Any, backend: Any) -> Any:
    """Return the key of the fast table, or None for calls that it cannot hold."""
    mask, bias, sinks = options["mask"], options["bias"], options["sinks"]
    ambient = (_scope(None), _local.traced, _local.module) if _state.armed else None
    try:
        key: tuple[Any, ...] = (
            None if mask is None else mask.signature, options["scale"], options["softcap"],
            options["dropout_p"], options["layout"], options["return_lse"],
            options["deterministic"], backend, is_grad_enabled(), ambient,
            _get_deterministic_algorithms(), _environ(), _state.epoch,
        )  # fmt: skip
        if bias is not None or sinks is not None:
            arrays = [getattr(bias, "payload", bias), sinks]
            key += (getattr(bias, "signature", None), *map(_array_key, arrays))
        hash(key)
    except (TypeError, AttributeError):
        return None
    return key


def _array_key(x: Any) -> Any:
    return x if x is None else (x.shape, x.dtype, x.device, x.requires_grad)


def _shape_key(q: Any, k: Any, v: Any, options: Any) -> Any:
    mask = options["mask"]
    signature = None if mask is None else mask.signature
    return q.shape, k.shape, v.shape, q.dtype, signature, options["return_lse"]


def _runner(plan: Plan, call: Call) -> Callable[..., Any]:
    """Return ``run(q, k, v, mask, bias, sinks)`` around the kernel, as thin as the call allows."""
    kernel, problem, bound = plan.kernel, call.problem, call.mask
    if call.cast is not None:
        return _cast_runner(plan, call)
    if problem.empty:
        return lambda q, k, v, mask=None, bias=None, sinks=None: answer_empty(
            problem.layout, problem.lse, q, k, v, sinks
        )
    if bound is None:
        if problem.bias is None and not problem.sinks:
            return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v)
        return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v, None, bias, sinks)
    if is_static(bound):
        return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(q, k, v, bound, bias, sinks)
    return lambda q, k, v, mask=None, bias=None, sinks=None: kernel(
        q, k, v, rebind(mask, problem, q.device), bias, sinks
    )


def _cast_runner(plan: Plan, call: Call) -> Callable[..., Any]:
    run, dtype = _runner(plan, replace(call, cast=None)), call.cast

    def cast(
        q: Tensor, k: Tensor, v: Tensor, mask: Any = None, bias: Any = None, sinks: Any = None
    ) -> Any:
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        with torch.autocast(q.device.type, enabled=False):
            return run(q, k, v, mask, bias, sinks)

    return cast


def plan(query: Tensor, key: Tensor, value: Tensor, *, backend: Any = None, **options: Any) -> Any:
    """Resolve a call once; the result ``step(q, k, v)`` is the bare kernel call.

    Takes the options of :func:`attention`. `step` is for tensors like the given ones in all but
    their values (shapes, dtype, device, strides, gradients); it checks nothing. ``step.selection``
    says what was chosen.

    >>> import torch
    >>> q = torch.randn(1, 4, 2, 8)
    >>> step = plan(q, q, q)
    >>> step(q, q, q).shape, step.selection.backend
    (torch.Size([1, 4, 2, 8]), 'sdpa_flash')
    """
    options = {**_DEFAULTS, **_known_options(options)}
    call = admit(query, key, value, **options)
    chosen = plan_for(call.problem, wishes(backend, None, scopes.current_scope(), _local.module))
    run = _runner(chosen, call)
    mask, bias, sinks = options["mask"], options["bias"], options["sinks"]
    if (
        call.mask is None
        and bias is None
        and sinks is None
        and not call.problem.empty
        and call.cast is None
    ):
        step = chosen.kernel if isinstance(chosen.kernel, FunctionType) else run
    else:

        def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return run(q, k, v, mask, bias, sinks)

    step.selection = chosen.selection  # type: ignore[attr-defined]
    return step


def explain(
    query: Any, key: Any = None, value: Any = None, *, facts: Facts | None = None,
    backend: Any = None, supported_attention_backends: Any = None, **options: Any,
) -> Selection:  # fmt: skip
    """Say which backend a call would run on, and for every other one why not; nothing is run.

    Takes a :class:`polyattn.Problem`, or the arguments of :func:`attention` (tensors may be on
    the meta device). With `facts` (see :meth:`polyattn.Facts.parse`) it answers for a machine
    that one does not have, as far as capabilities tell.

    >>> from polyattn import Facts, Problem
    >>> p = Problem(batch=1, q_len=4096, kv_len=4096, heads=16, kv_heads=16, head_dim=128, dtype="bf16")
    >>> explain(p, facts=Facts.parse("h100")).backend
    'sdpa_cudnn'
    """
    if isinstance(query, Problem):
        problem = query
    else:
        problem = admit(query, key, value, **{**_DEFAULTS, **_known_options(options)}).problem
        problem = problem.with_(device="cpu") if problem.device == "meta" else problem
    if facts is not None:
        problem = problem.with_(device=facts.device, arch=facts.arch)
    layer = None
    if supported_attention_backends is not None:
        layer = frozenset(Request.make(supported_attention_backends).names)
    return choose(problem, wishes(backend, layer, scopes.current_scope(), _local.module), facts)


_DEFAULTS: dict[str, Any] = {
    "mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None, "dropout_p": 0.0,
    "layout": "BTNH", "return_lse": False, "deterministic": None,
}  # fmt: skip


def _known_options(options: dict[str, Any]) -> dict[str, Any]:
    for name in options:
        if name not in _DEFAULTS:
            raise InvalidProblem(
                f"got the option {name!r}, expected one of {', '.join(_DEFAULTS)}."
                f"{near_matches(name, _DEFAULTS)}"
            )
    return options

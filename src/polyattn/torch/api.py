"""``attention``: one call, every kernel.

A call that is like an earlier one goes the short way (`polyattn.torch.short_way`) to the kernel
that was prepared then. Everything else happens once for each class of calls, in
`polyattn.torch.long_way`.
"""

from __future__ import annotations

import warnings
from types import FunctionType
from typing import Any, Literal, Unpack, cast, overload

import torch
from torch import SymInt, Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy
from torch.overrides import handle_torch_function

from polyattn.errors import InvalidProblem, near_matches
from polyattn.masks import Mask
from polyattn.masks.biases import Bias
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection import Selection, platforms
from polyattn.selection.prepare import select_here
from polyattn.selection.requests import Request
from polyattn.torch import jagged, platform, short_way
from polyattn.torch.admission import admit
from polyattn.torch.call_types import Backends, Options, Step
from polyattn.torch.dtensors import is_sharded
from polyattn.torch.internals import is_exported
from polyattn.torch.keys import Key, key_for
from polyattn.torch.long_way import AttentionWay, dispatch, prepare_call, wishes_here
from polyattn.torch.refusals import refuse
from polyattn.torch.traced import attention as traced_attention
from polyattn.torch.traced import trace_call

__all__ = ["attention", "explain", "plan"]

_MISSED = short_way.MISSED


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    query: Tensor, key: Tensor, value: Tensor, *, return_lse: bool, **options: Unpack[Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
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
        return traced_attention(query, key, value, mask, bias, scale, softcap, sinks, dropout_p,
                                layout, return_lse, deterministic, backend)  # fmt: skip
    found = short_way.attention(query, key, value, mask, bias, scale, softcap, sinks, dropout_p,
                                layout, return_lse, deterministic, backend)  # fmt: skip
    if found is not _MISSED:
        return found
    options = {
        "mask": mask, "bias": bias, "scale": scale, "softcap": softcap, "sinks": sinks,
        "dropout_p": dropout_p, "layout": layout, "return_lse": return_lse,
        "deterministic": deterministic,
    }  # fmt: skip
    return _further_ways(query, key, value, options, backend)


def _further_ways(q: Any, k: Any, v: Any, options: dict[str, Any], backend: Any) -> Any:
    """Run a call that the short way has not taken: of tensors that are not plain, or a new one."""
    if jagged.is_any_nested(q, k, v):
        return jagged.attention(attention, q, k, v, {**options, "backend": backend})
    if is_sharded(q, k, v):
        from polyattn.torch import sharded  # loads what DTensors need

        return sharded.attention(attention, q, k, v, {**options, "backend": backend})
    if any(isinstance(x, Proxy) for x in (q, k, v)):  # torch.fx: a call that its graph holds
        itself: Any = attention  # of many forms, which no type of a callable is
        return handle_torch_function(itself, (q, k, v), q, k, v, **options, backend=backend)
    if is_exported():  # without Dynamo, or by torch.jit.trace
        with warnings.catch_warnings():  # what sizes decide in there holds for all of them
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            return trace_call(q, k, v, **options, backend=backend)
    if _are_symbolic(q, k):  # as make_fx traces
        return trace_call(q, k, v, **options, backend=backend)
    held = key_for(q, k, v, Key.of, *options.values(), backend)
    arguments = options["mask"], options["bias"], options["sinks"]
    return dispatch(AttentionWay(options), held, q, k, v, arguments, backend)


def _are_symbolic(*tensors: Any) -> bool:
    """Say whether sizes are symbols, which nothing can be remembered by."""
    return any(
        isinstance(size, SymInt)
        for x in tensors
        if isinstance(x, Tensor) and not x.is_nested
        for size in x.shape
    )


def plan(
    query: Tensor, key: Tensor, value: Tensor, *, backend: Backends | None = None, **options: Any
) -> Step:
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
    if is_sharded(query):
        refuse("got DTensors to plan for, expected plain tensors: plan for q.to_local().")
    way = AttentionWay(options)
    chosen, call = prepare_call(way, query, key, value, backend)
    run = way.runner(chosen, call)
    mask, bias, sinks = options["mask"], options["bias"], options["sinks"]
    step: Any = chosen.kernel
    plain = call.mask is None and bias is None and sinks is None and call.cast is None
    # those of the extension take no attribute
    if not (plain and isinstance(step, FunctionType)) or call.problem.empty:

        def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return run(q, k, v, mask, bias, sinks)

    step.selection = chosen.selection
    return cast(Step, step)


def explain(
    query: Tensor | Problem,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    facts: Facts | None = None,
    backend: Backends | None = None,
    supported_attention_backends: Any = None,
    **options: Any,
) -> Selection:
    """Say which backend a call would run on, and for every other one why not; it is not run.

    Where the call would calibrate the machine first, so does this.
    Takes a :class:`polyattn.Problem`, or the arguments of :func:`attention` (tensors may be on
    the meta device). With `facts` (see :meth:`polyattn.Facts.parse`) it answers for a machine
    that one does not have, as far as capabilities tell. For tensors on a CUDA device, refusals of
    torch's kernels also hold the reasons that torch's own dispatcher gives.

    >>> from polyattn import Facts, Problem
    >>> p = Problem(
    ...     batch=1, q_len=4096, kv_len=4096, heads=16, kv_heads=16, head_dim=128, dtype="bf16"
    ... )
    >>> explain(p, facts=Facts.parse("h100")).backend
    'sdpa_cudnn'
    """
    call = None
    if isinstance(query, Problem):
        problem = query
    else:
        options = {**_DEFAULTS, **_known_options(options)}
        if is_sharded(query, key, value):
            from polyattn.torch import sharded

            query, key, value, options = sharded.local_call(query, key, value, options)
        if jagged.is_any_nested(query, key, value):
            rows = jagged.packed_call(query, key, value, options["layout"], options["mask"])
            query, key, value = rows.query, rows.key, rows.value
            options |= {"mask": rows.mask, "layout": "packed"}
        call = admit(query, key, value, **options)
        problem = call.problem
        problem = problem.with_(device="cpu") if problem.device == "meta" else problem
    if facts is not None:
        problem = problem.with_(device=facts.device, arch=facts.arch)
    layer = None
    if supported_attention_backends is not None:
        layer = frozenset(Request.make(supported_attention_backends).names)
    selection = select_here(problem, wishes_here(backend, layer), facts)
    if call is None or facts is not None or not cast(Tensor, query).is_cuda:
        return selection
    from polyattn.torch.flags.torch_reasons import explained  # only here: calls do not need it

    return explained(selection, call, *cast(tuple[Tensor, ...], (query, key, value)))


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


platforms.register_platform(
    platforms.Platform(
        framework="torch",
        versions=platform.library_versions,
        attention=attention,
        device_description=platform.device_description,
        described=platform.described,
        present_device=platform.present_device,
        prober=platform.prober,
    )
)

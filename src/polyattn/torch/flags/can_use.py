"""``can_use_*``: whether torch's dispatcher could run a call on one of its kernels, and why not.

The questions of ``torch.backends.cuda.can_use_flash_attention`` and its siblings, answered with
every reason, on every build, for CPUs too, and for machines one does not have.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import InvalidProblem
from polyattn.problem import Problem
from polyattn.problem.machine import Facts
from polyattn.selection.capabilities import Reason, arch_number
from polyattn.selection.registry import Missing, registry
from polyattn.torch.flags.hushed import hushed
from polyattn.torch.flags.sdpa_checks import CHECKS, Array, SdpaCall, faults
from polyattn.torch.flags.torch_reasons import merged, torch_says
from polyattn.torch.internals import is_allowed, torch_sdpa

__all__ = [
    "CanUse",
    "can_use_cudnn_attention",
    "can_use_efficient_attention",
    "can_use_flash_attention",
    "can_use_math_attention",
]


@dataclass(frozen=True)
class CanUse:
    """An answer: true if the kernel can run the call, else false with every reason.

    >>> from polyattn import Problem
    >>> p = Problem(batch=1, q_len=8, kv_len=8, heads=4, kv_heads=4, head_dim=64)
    >>> print(can_use_flash_attention(p.with_(dropout_p=0.1), device="cpu"))
    sdpa_flash cannot run it: dropout: got dropout_p=0.1, takes 0 on a CPU
    """

    backend: str
    reasons: tuple[Reason, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        if not self.reasons:
            return f"{self.backend} can run it"
        return f"{self.backend} cannot run it: {'; '.join(map(str, self.reasons))}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data."""
        reasons = [dict(vars(reason)) for reason in self.reasons]
        return {"backend": self.backend, "can_use": bool(self), "reasons": reasons}


def can_use_flash_attention(
    params: Any, debug: bool = False, *, device: str | Facts | None = None
) -> CanUse:
    """Say whether torch's ``scaled_dot_product_attention`` could run a call on its flash kernel.

    `params`: a ``torch.backends.cuda.SDPAParams``, any object with its attributes (query, key,
    value of shape (B, N, T, H), attn_mask, dropout, is_causal, enable_gqa), or a
    :class:`polyattn.Problem`. `debug`: also warn with all reasons. `device`: ``"here"`` (the
    default: the tensors' own device, this machine), or a machine one does not have, ``"cpu"``,
    ``"cuda:sm_90"``, ``"h100"``, see :meth:`polyattn.Facts.parse`.

    The answer is about torch's own call: is there a result under
    ``torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)``? It differs

    - from torch's function of that name, which is False for every tensor on a CPU, does not know
      of autocast, tells only the first reason, and calls an empty problem refused that torch
      (2.13) answers with zeros before it looks for a kernel;
    - from ``explain(...)``, which is about this package's backend ``sdpa_flash``: it calls the
      kernel itself, turns masks into what the kernel takes, and obeys no switch of torch.

    torch's switch is a reason like any other (fact ``switch``). A problem with several masks or a
    bias is taken as the call that hands torch one attn_mask. Where the tensors are on a CUDA
    device that is here, torch's own checks run too, and have the last word.

    >>> import torch
    >>> from torch.backends.cuda import SDPAParams
    >>> q = torch.randn(1, 2, 4, 8)
    >>> bool(can_use_flash_attention(SDPAParams(q, q, q, None, 0.0, True, False)))
    True
    >>> mask = torch.ones(4, 4, dtype=torch.bool)
    >>> params = SDPAParams(q, q, q, mask, 0.0, False, False)
    >>> [r.fact for r in can_use_flash_attention(params, device="h100").reasons]
    ['dtype', 'mask']
    """
    return _answer("sdpa_flash", params, debug, device)


def can_use_efficient_attention(
    params: Any, debug: bool = False, *, device: str | Facts | None = None
) -> CanUse:
    """Say the same as :func:`can_use_flash_attention` of the memory-efficient kernel.

    That kernel takes masks, float32 and, on CUDA only, head dims without an upper bound. Up to
    torch 2.13 it does not take ``enable_gqa`` with fewer key/value heads (a newer one does); the
    backend ``sdpa_efficient`` repeats them itself.

    >>> from polyattn import Problem
    >>> p = Problem(batch=1, q_len=8, kv_len=8, heads=4, kv_heads=2, head_dim=64)
    >>> print(can_use_efficient_attention(p, device="a100").reasons[-1])
    GQA: got heads 4, 2, 2, takes as many key/value as query heads (repeat them)
    """
    return _answer("sdpa_efficient", params, debug, device)


def can_use_cudnn_attention(
    params: Any, debug: bool = False, *, device: str | Facts | None = None
) -> CanUse:
    """Say the same as :func:`can_use_flash_attention` of cuDNN's kernel.

    What cuDNN takes grows with its version (head dims up to 256 on some); for a machine that is
    not here the answer is the narrow one.

    >>> from polyattn import Problem
    >>> p = Problem(batch=1, q_len=8, kv_len=8, heads=4, kv_heads=2, head_dim=64, dtype="bf16")
    >>> bool(can_use_cudnn_attention(p, device="h100"))
    True
    """
    return _answer("sdpa_cudnn", params, debug, device)


def can_use_math_attention(
    params: Any, debug: bool = False, *, device: str | Facts | None = None
) -> CanUse:
    """Say the same as :func:`can_use_flash_attention` of torch's unfused path.

    >>> from polyattn import Problem
    >>> p = Problem(batch=1, q_len=8, kv_len=8, heads=4, kv_heads=2, head_dim=64)
    >>> print(can_use_math_attention(p))
    sdpa_math can run it
    """
    return _answer("sdpa_math", params, debug, device)


def _answer(backend: str, params: Any, debug: bool, device: str | Facts | None) -> CanUse:
    facts = Facts.parse(device) if isinstance(device, str) and device != "here" else None
    facts = device if isinstance(device, Facts) else facts
    if isinstance(params, Problem):
        call, wrong = _of_problem(params, facts), list(_without_counterpart(params))
    else:
        call, wrong = _of_tensors(params, facts), []
    wrong += faults(call)
    found = [*_presence(backend, call, facts), *_switch(backend), *wrong]
    if not call.empty:
        found += [*_declared(backend, call), *_checked(backend, call)]
    if facts is None and not call.empty and _is_here(params):
        # what was wrong with the call itself is for nobody to pardon: torch does not look at it
        found = _settled(found, wrong, torch_says(params, (backend,)).get(backend))
    answer = CanUse(backend, tuple(dict.fromkeys(found)))
    if debug and not answer:
        warnings.warn(str(answer), UserWarning, stacklevel=3)
    return answer


def _settled(ours: list[Reason], wrong: list[Reason], theirs: list[Reason] | None) -> list[Reason]:
    """Weigh our reasons against torch's own (None: it was not asked; none: it accepts)."""
    if theirs is None:
        return ours
    return merged(ours, theirs) if theirs else wrong


def _presence(backend: str, call: SdpaCall, facts: Facts | None) -> Iterator[Reason]:
    """Yield why the kernel is not to be had: this build, this machine, the device's type."""
    kind, declared = (
        call.query.device,
        registry.get(backend, "torch").capabilities_for(call.query.device),
    )
    if facts is None:
        probed = registry.probe(("torch", backend))
        if isinstance(probed, Missing):
            yield Reason("available", probed.reason, "an install", probed.how_to_get_it)
        elif kind in declared.devices and kind not in (probed.devices or {kind}):
            yield Reason(
                "machine", f"no {kind} device here", " or ".join(sorted(probed.devices or ()))
            )
    elif kind == "cuda" and (build := facts.lacks_build("torch")) is not None:
        yield Reason("build", f"a {build.upper()} build of torch", "a CUDA build")
    if kind not in _devices(backend):
        yield Reason("device", kind, " or ".join(_devices(backend)))


def _devices(backend: str) -> list[str]:
    return sorted(device for name, device in CHECKS if name == backend)


_SWITCHES = {
    "sdpa_flash": "flash_sdp",
    "sdpa_efficient": "mem_efficient_sdp",
    "sdpa_cudnn": "cudnn_sdp",
    "sdpa_math": "math_sdp",
}


def _switch(backend: str) -> Iterator[Reason]:
    name = _SWITCHES[backend]
    if not is_allowed[backend]():
        home = "torch.backends.cuda"
        yield Reason(
            "switch",
            f"{home}.{name}_enabled() is False",
            "True",
            f"{home}.enable_{name}(True), or leave the sdpa_kernel scope",
        )


def _declared(backend: str, call: SdpaCall) -> Iterator[Reason]:
    """Yield what the backend's declaration says: its bounds are those of torch's checks."""
    can = registry.get(backend, "torch").capabilities_for(call.query.device)
    if call.query.device not in can.devices:
        return
    if call.query.dtype not in can.dtypes:
        yield Reason("dtype", call.query.dtype, " or ".join(sorted(can.dtypes)), "cast the inputs")
    if isinstance(can.archs, tuple) and call.query.device == "cuda" and call.arch is not None:
        low, high = can.archs
        if not low <= arch_number(call.arch) <= high:
            yield Reason("compute capability", call.arch, f"sm_{low} to sm_{high}")


def _checked(backend: str, call: SdpaCall) -> Iterator[Reason]:
    check = CHECKS.get((backend, call.query.device))
    return iter(()) if check is None else check(call)


# --- reading what was handed over ---


def _of_tensors(params: Any, facts: Facts | None) -> SdpaCall:
    every = (getattr(params, name, None) for name in ("query", "key", "value"))
    tensors = [x for x in every if isinstance(x, Tensor)]
    if len(tensors) != 3:
        raise InvalidProblem(
            f"got params of type {type(params).__name__}, expected torch.backends.cuda.SDPAParams "
            "(or an object with its attributes query, key, value, attn_mask, dropout, is_causal, "
            "enable_gqa), or a polyattn.Problem."
        )
    mask = getattr(params, "attn_mask", None)
    where = facts.device if facts else None
    query, key, value = (_array(x, where) for x in tensors)
    trains = any(x.requires_grad for x in tensors)
    call = SdpaCall(
        query=query, key=key, value=value,
        mask=None if mask is None else _array(mask, where),
        mask_grad=mask is not None and mask.requires_grad,
        dropout=float(getattr(params, "dropout", 0.0)),
        is_causal=bool(getattr(params, "is_causal", False)),
        gqa=bool(getattr(params, "enable_gqa", False)),
        grad=trains and torch.is_grad_enabled(),
        arch=facts.arch if facts else _arch(tensors[0]),
        deterministic=_is_strict(),
    )  # fmt: skip
    return _marked_empty(call.as_dispatched())


def _array(x: Tensor, where: str | None) -> Array:
    device = where or ("cpu" if x.device.type == "meta" else x.device.type)
    if x.is_nested or x.layout != torch.strided:
        form = "nested" if x.is_nested else "sparse"
        return Array((0,) * x.dim(), str(x.dtype).removeprefix("torch."), device, form=form)
    dtype, stride = x.dtype, x.stride(-1) if x.dim() else 1
    offset = x.storage_offset() * x.element_size()
    cast = _autocast(x)
    if cast != dtype:  # the call sees a copy
        dtype, offset = cast, 0
        stride = torch.empty_like(x, dtype=cast, device="meta").stride(-1)
    name = str(dtype).removeprefix("torch.")
    return Array(tuple(x.shape), name, device, int(stride), int(offset))


def _autocast(x: Tensor) -> torch.dtype:
    kind = x.device.type
    if not x.is_floating_point() or x.dtype == torch.float64 or kind not in ("cpu", "cuda"):
        return x.dtype
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _arch(x: Tensor) -> str | None:
    if x.device.type != "cuda" or not torch.cuda.is_available():
        return None
    return "sm_{}{}".format(*torch.cuda.get_device_capability(x.device))


def _is_here(params: Any) -> bool:
    query = getattr(params, "query", None)
    return isinstance(query, Tensor) and query.is_cuda and torch.cuda.is_available()


def _is_strict() -> bool:
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return torch.are_deterministic_algorithms_enabled() and not warns_only


def _of_problem(p: Problem, facts: Facts | None) -> SdpaCall:
    device = facts.device if facts else p.device
    aligned = None if p.q_len == p.kv_len else "top_left"
    causal = p.mask is not None and p.mask.is_causal(aligned) and p.bias is None
    lead, stride = (p.batch,), 1 if p.contiguous else 2
    q = Array((*lead, p.heads, p.q_len, p.head_dim), p.dtype, device, stride)
    k = Array((*lead, p.kv_heads, p.kv_len, p.head_dim), p.dtype, device, stride)
    v = Array((*lead, p.kv_heads, p.kv_len, p.value_dim), p.dtype, device, stride)
    seen = p.mask is not None and p.mask.kinds != {"Full"}
    masked = (seen or p.bias is not None) and not causal
    mask = Array((1, 1, p.q_len, p.kv_len), p.dtype, device) if masked else None
    call = SdpaCall(
        query=q, key=k, value=v, mask=mask, mask_grad=p.bias_grad, dropout=p.dropout_p,
        is_causal=causal, gqa=p.gqa, grad=p.grad, arch=facts.arch if facts else p.arch,
        deterministic=p.deterministic or _is_strict(),
    )  # fmt: skip
    return _marked_empty(call)


def _without_counterpart(p: Problem) -> Iterator[Reason]:
    for fact, asked, got in (
        ("soft cap", p.softcap is not None, f"softcap={p.softcap}"),
        ("sinks", p.sinks > 0, f"{p.sinks} sinks a head"),
        ("lse", p.lse, "return_lse=True"),
        ("layout", p.layout == "packed", "packed rows"),
        ("paged keys", p.paged is not None, f"keys in pages of {p.paged}"),
        ("quantized keys", p.quantized is not None, f"{p.quantized} codes of keys and values"),
    ):
        if asked:
            yield Reason(fact, got, "none: torch's function has no such argument")


def _marked_empty(call: SdpaCall) -> SdpaCall:
    rule = _answers_empty()
    if rule == "no" or any(x.form != "dense" or x.rank < 2 for _, x in call.inputs):
        return call
    numels = [0 in x.shape for _, x in call.inputs]
    empty = any(numels) if rule == "any" else numels[2] or call.query.shape[-2] == 0
    return replace(call, empty=True) if empty else call


@functools.lru_cache(maxsize=1)
def _answers_empty() -> str:
    """Say which empty calls this torch answers itself: ``no``, ``any`` or ``output``.

    It is tried out with a dropout of 2, which every kernel refuses: what then gives a result was
    answered before. `output`: only where the output or the keys have no elements (2.13).
    """

    def answers(queries: int, head_dim: int) -> bool:
        q = torch.empty(1, 1, queries, head_dim, device="cpu")
        k, v = q.new_empty(1, 1, 1, head_dim), q.new_empty(1, 1, 1, 1)
        try:
            with torch.no_grad(), hushed():
                torch_sdpa(q, k, v, dropout_p=2.0)
        except RuntimeError:
            return False
        return True

    if not answers(0, 1):
        return "no"
    return "any" if answers(1, 0) else "output"

"""torch's own reasons for not using a kernel: asked for, heard without noise, and translated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from polyattn.selection import Rejected, Selection
from polyattn.selection.capabilities import Reason
from polyattn.torch.admission import Call
from polyattn.torch.flags.hushed import hushed
from polyattn.torch.flags.torch_messages import by_backend, translate
from polyattn.torch.internals import can_use
from polyattn.torch.kit.layouts import to_bnth

__all__ = [
    "Asked",
    "by_backend",
    "enriched",
    "explained",
    "hushed",
    "merged",
    "torch_says",
    "translate",
]


def merged(ours: Sequence[Reason], theirs: Iterable[Reason]) -> list[Reason]:
    """Return our reasons, and those of torch whose fact is not among ours."""
    facts = {reason.fact for reason in ours}
    found = list(ours)
    for reason in theirs:
        if reason.fact not in facts and not (ours and reason == _SILENT):
            facts.add(reason.fact)
            found.append(reason)
    return found


# --- hearing them ---

_SILENT = Reason("torch", "its own check refuses", "what torch does not say")


def torch_says(params: Any, backends: Iterable[str] = tuple(can_use)) -> dict[str, list[Reason]]:
    """Ask torch itself why it would not use each kernel; an empty list says that it would.

    `params`: a ``torch.backends.cuda.SDPAParams`` or an object with its attributes. Only a CUDA
    build knows anything: elsewhere the answer is empty. No switch is touched and no warning gets
    out. torch tells its first reason only; where its check ends in an error (there is no device),
    that is the reason.

    >>> q = torch.randn(1, 2, 4, 8)
    >>> said = torch_says(torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False))
    >>> said == {} or "sdpa_flash" in said
    True
    """
    if not torch.backends.cuda.is_built():
        return {}
    asked = _as_params(params)
    return {name: _asked(can_use[name], asked) for name in backends if name in can_use}


def _as_params(params: Any) -> Any:
    kind = torch.backends.cuda.SDPAParams
    if isinstance(params, kind):
        return params
    return kind(
        params.query,
        params.key,
        params.value,
        getattr(params, "attn_mask", None),
        float(getattr(params, "dropout", 0.0)),
        bool(getattr(params, "is_causal", False)),
        bool(getattr(params, "enable_gqa", False)),
    )


def _asked(query: Callable[[Any, bool], bool], params: Any) -> list[Reason]:
    answers: list[bool] = []
    errors: list[str] = []

    def ask(element: float) -> float:
        try:
            answers.append(query(params, True))
        except RuntimeError as error:  # no driver, no device
            errors.append(str(error).partition("\n")[0])
        return element

    with hushed() as texts:
        # These checks print to stderr, unless they run inside a binding that collects warnings
        # for Python. Tensor.apply_ is one, and calls back.
        torch.zeros(1, device="cpu").apply_(ask)  # type: ignore[no-untyped-call]
    if errors:
        return [Reason("machine", errors[0], "a cuda device that answers")]
    if answers == [True]:
        return []
    return [translate(text) for text in texts] or [_SILENT]


# --- for explain ---


def enriched(selection: Selection, says: dict[str, list[Reason]]) -> Selection:
    """Add torch's own reasons to the refusals of a selection, by facts that are not there yet.

    A backend that accepts stays accepted: it calls its kernel itself, and torch's dispatcher,
    which has narrower rules, has no say in it.
    """
    decisions = dict(selection.decisions)
    for name, reasons in says.items():
        decision = decisions.get(name)
        if isinstance(decision, Rejected):
            decisions[name] = Rejected(tuple(merged(decision.reasons, reasons)))
    return replace(selection, decisions=decisions)


@dataclass(frozen=True)
class Asked:
    """The attributes of ``SDPAParams``, for :func:`torch_says`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    dropout: float
    is_causal: bool
    enable_gqa: bool

    @classmethod
    def of(cls, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Asked | None:
        """Return what a checked call of :func:`polyattn.torch.attention` would ask of torch.

        None where torch has no such call: packed rows, and inputs that autocast would change,
        which its checks do not see. A mask that is neither causal nor dense is stood for by one
        of its shape.
        """
        p = call.problem
        if p.layout == "packed" or call.cast is not None or type(q) is not Tensor:
            return None
        aligned = None if p.q_len == p.kv_len else "top_left"
        causal = p.mask is not None and p.bias is None and p.mask.is_causal(aligned)
        mask = None
        if (p.mask is not None or p.bias is not None) and not causal:
            row = torch.empty((1, 1, 1, p.kv_len), dtype=q.dtype, device=q.device)
            row.requires_grad_(p.bias_grad)
            mask = row.expand(1, 1, p.q_len, p.kv_len)
        q, k, v = (to_bnth(x, p.layout) for x in (q, k, v))
        return cls(q, k, v, mask, p.dropout_p, causal, p.gqa)


def explained(selection: Selection, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Selection:
    """Add torch's own reasons to the selection for tensors on a CUDA device that is here."""
    asked = Asked.of(call, q, k, v) if torch.cuda.is_available() else None
    return selection if asked is None else enriched(selection, torch_says(asked))

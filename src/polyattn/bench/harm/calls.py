"""The ways to make a call: as a program has it, through the drop-in, and with the mask as a value.

None of them asks for a backend, and torch's own function takes whichever kernel it takes: what a
user has with polyattn is set beside what they had without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from polyattn.bench.cpu.case_arrays import Inputs
from polyattn.bench.cpu.ways import Unable, Way, ours, step
from polyattn.bench.harm.problems import UserCase
from polyattn.errors import Unsupported
from polyattn.selection import Selection
from polyattn.selection.requests import record_selections
from polyattn.torch import attention, scaled_dot_product_attention

__all__ = ["ATTENTION", "DROP_IN", "STOCK", "by_value", "drop_in", "forced", "ran", "stock"]

STOCK, DROP_IN, ATTENTION = "torch", "drop-in", "attention"


def stock(inputs: Inputs) -> Way:
    """Return torch's own function with the arguments that a program gives it."""
    return Way(STOCK, _as_written(inputs, F.scaled_dot_product_attention))


def drop_in(inputs: Inputs) -> Way:
    """Return polyattn's function of the same name with the very same arguments."""
    return Way(DROP_IN, _as_written(inputs, scaled_dot_product_attention))


def by_value(inputs: Inputs) -> Way:
    """Return ``attention`` with the mask as a value and the choice left to polyattn."""
    mask, layout = inputs.mask, inputs.case.layout
    return Way(ATTENTION, lambda q, k, v: attention(q, k, v, mask=mask, layout=layout))


def forced(inputs: Inputs, backend: str) -> Way | Unable:
    """Return ``attention`` on `backend`, or why that cannot run the problem."""
    try:
        return ours(inputs, backend)
    except Unsupported as error:
        return Unable(backend, str(error))


def ran(way: Way, inputs: Inputs) -> Selection:
    """Run a way once and return what was chosen for it."""
    with record_selections() as made:
        step(way, inputs).run()
    return made[0]


def _as_written(inputs: Inputs, function: Callable[..., Any]) -> Callable[..., Any]:
    case = inputs.case
    options: dict[str, Any] = {}
    if case.size.heads != case.size.kv_heads:
        options["enable_gqa"] = True
    if case.mask == "causal":
        options["is_causal"] = True
    elif (allowed := inputs.allowed) is not None:
        options["attn_mask"] = _numbers(inputs) if _has_numbers(case) else allowed
    if case.layout == "BNTH":
        return lambda q, k, v: function(q, k, v, **options)

    def call(q: Any, k: Any, v: Any) -> Any:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return function(q, k, v, **options).transpose(1, 2)

    return call


def _has_numbers(case: object) -> bool:
    return isinstance(case, UserCase) and case.numbers


def _numbers(inputs: Inputs) -> Any:
    zero = torch.zeros((), dtype=inputs.q.dtype, device=inputs.q.device)
    return torch.where(inputs.allowed, zero, -torch.inf).to(inputs.q.dtype)  # type: ignore[arg-type]

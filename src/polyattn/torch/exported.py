"""``attention`` in a program that is exported: torch's own operators, for all sizes left open.

torch.export, torch.jit.trace and the ONNX exporters write programs down that run elsewhere, without
polyattn. So while one is written the choice is the backend ``portable``, unless another was asked
for; the program holds nothing of ours, and no length that its writer left open is fixed by us.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from polyattn.errors import PolyattnError
from polyattn.selection import scopes
from polyattn.selection.prepare import prepare
from polyattn.torch.exported_model import exported_model
from polyattn.torch.internals import mark_constant
from polyattn.torch.kit.empty import answer_empty
from polyattn.torch.kit.masking import bind_mask
from polyattn.torch.refusals import through_compiler
from polyattn.torch.traced_problem import problem_of, wishes_of_traced, with_numbers_as_text

__all__ = ["attention", "is_portable"]

_state = scopes.state
_counter = itertools.count()


def is_portable(asked: Any) -> bool:
    """Say whether the program is to hold torch's own operators: unless others are asked for."""
    wanted = wishes_of_traced(asked)
    return all(request.names == ("portable",) for _, request in wanted.ordered())


mark_constant(is_portable)


def attention(q: Any, k: Any, v: Any, options: dict[str, Any], asked: Any) -> Any:
    """Write one call down; `asked`: as `polyattn.torch.traced` gathers it."""
    cast = None
    if isinstance(q, Tensor) and q.element_size() != 8 and torch.is_autocast_enabled(q.device.type):
        cast = torch.get_autocast_dtype(q.device.type)
    bias, sinks, layout = options["bias"], options["sinks"], options["layout"]
    model, empty, mask = exported_model(q, k, v, options["mask"], bias, sinks, layout)
    name = _prepared(model, (*asked, cast))
    if cast is not None:
        q, k, v = q.to(cast), k.to(cast), v.to(cast)
    if empty:
        return answer_empty(layout, options["return_lse"], q, k, v, sinks, bias)
    if mask is not None:
        mask = bind_mask(mask, q.device)
    return getattr(_state, name)(q, k, v, mask, bias, sinks)


def _prepared(model: Any, asked: Any) -> str:
    """Admit a call and prepare what stands for it; the name of that among the kernels."""
    asked = with_numbers_as_text(asked)
    try:
        plan = prepare(problem_of(model, asked), replace(wishes_of_traced(asked), exporting=True))
    except PolyattnError as error:
        raise through_compiler(error) from None
    for ran in scopes.recording.get(()):
        ran.append(plan.selection)
    name = f"exported_{next(_counter)}"
    setattr(_state, name, plan.kernel)
    return name


mark_constant(_prepared)

"""Every private name of torch that polyattn uses, and nothing else holds one.

Each name is a row (`ROWS`): where it is, in which versions of torch it was seen, and what is done
in a torch without it, a slower public way or a clear refusal. What is imported from here is torch's
own object wherever torch has it, so that calls cost nothing more. No compiler is imported with it.
The getters and setters behind knobs are in `polyattn.torch.internals.switches`.

>>> from polyattn.torch.internals import ROWS, current_graph_task
>>> current_graph_task()
-1
>>> ROWS["torch._C._current_graph_task_id"].seen
('2.9', '2.13', '2.15')
"""

from __future__ import annotations

from polyattn.torch.internals.checkpoints import (
    checkpointed_region,
)
from polyattn.torch.internals.compiling import (
    DYNAMO_CONFIG,
    INDUCTOR_CONFIG,
    READS_OF_MODULES,
    cache_entries,
    compiled_frames,
    compiles_calls,
    debug_mode,
    dynamo_config,
    eager_flex_attention,
    forget_frame,
    forget_jit_builtin,
    frame_conversion,
    inductor_config,
    inline_as,
    mark_any_length,
    mark_constant,
    order_effects,
    recompile_limit_hit,
    register_jit_builtin,
    require_cpp_compiler,
    run_uncompiled,
    tensor_guards,
)
from polyattn.torch.internals.modules import (
    call_code,
    children_of,
    hook_tables,
    is_replica,
    own_parameters,
    set_children,
    unwrapped,
)
from polyattn.torch.internals.operators import (
    OPERATORS_MODULE,
    can_use,
    cudnn_attention,
    efficient_attention,
    flash_attention,
    flash_attention_for_cpu,
    flash_operator_for_cpu,
    is_allowed,
    math_attention,
    replace_operator,
    torch_sdpa,
)
from polyattn.torch.internals.rows import (
    LOOKED_AT,
    ROWS,
    Private,
)
from polyattn.torch.internals.state import (
    are_transforms_active,
    below_autograd,
    current_graph_task,
    dispatch_modes,
    dual_level,
    is_deterministic,
    is_fake,
    is_forward_grad_enabled,
    is_grad_enabled,
    is_wrapped_by_transform,
    queue_callback,
    saved_tensor_hooks,
    tracing_state,
    transform_level,
    version_of,
)

__all__ = [
    "DYNAMO_CONFIG",
    "INDUCTOR_CONFIG",
    "LOOKED_AT",
    "OPERATORS_MODULE",
    "READS_OF_MODULES",
    "Private",
    "ROWS",
    "are_transforms_active",
    "below_autograd",
    "cache_entries",
    "call_code",
    "can_use",
    "checkpointed_region",
    "children_of",
    "compiled_frames",
    "compiles_calls",
    "cudnn_attention",
    "current_graph_task",
    "debug_mode",
    "dispatch_modes",
    "dual_level",
    "dynamo_config",
    "eager_flex_attention",
    "efficient_attention",
    "flash_attention",
    "flash_attention_for_cpu",
    "flash_operator_for_cpu",
    "forget_frame",
    "forget_jit_builtin",
    "frame_conversion",
    "hook_tables",
    "inductor_config",
    "inline_as",
    "is_allowed",
    "is_deterministic",
    "is_fake",
    "is_forward_grad_enabled",
    "is_grad_enabled",
    "is_replica",
    "is_wrapped_by_transform",
    "mark_any_length",
    "mark_constant",
    "math_attention",
    "order_effects",
    "own_parameters",
    "queue_callback",
    "recompile_limit_hit",
    "register_jit_builtin",
    "replace_operator",
    "require_cpp_compiler",
    "run_uncompiled",
    "saved_tensor_hooks",
    "set_children",
    "tensor_guards",
    "torch_sdpa",
    "tracing_state",
    "transform_level",
    "unwrapped",
    "version_of",
]

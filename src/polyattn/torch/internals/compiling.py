"""torch.compile and torch.jit: marks that they read, Dynamo's caches, FlexAttention's parts.

Nothing here imports ``torch._dynamo`` or ``torch._inductor`` before it is asked for something that
only they know.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from polyattn.torch.internals.private_names import deferred, noted
from polyattn.torch.internals.state import tracing_state

__all__ = [
    "break_graph",
    "is_compiler_loaded",
    "passed_on",
    "DYNAMO_CONFIG",
    "INDUCTOR_CONFIG",
    "READS_OF_MODULES",
    "cache_entries",
    "compiled_frames",
    "compiles_calls",
    "debug_mode",
    "dynamo_config",
    "eager_flex_attention",
    "forget_frame",
    "forget_jit_builtin",
    "frame_conversion",
    "inline_as",
    "inductor_config",
    "is_exported",
    "is_exported_to_onnx",
    "keep_from_tracing",
    "mark_any_length",
    "mark_constant",
    "order_effects",
    "recompile_limit_hit",
    "register_jit_builtin",
    "require_cpp_compiler",
    "run_uncompiled",
    "script_as",
    "tensor_guards",
]

F = TypeVar("F", bound=Callable[..., Any])

DYNAMO_CONFIG = "torch._dynamo.config"
INDUCTOR_CONFIG = "torch._inductor.config"
_CONVERSION = "torch._dynamo.convert_frame"
_EVAL_FRAME = "torch._C._dynamo.eval_frame"


# --- marks ---

noted(
    "torch.compiler.assume_constant_result._dynamo_marked_constant",
    "the function is traced into a graph instead of called at once, and compiling it may fail",
    sample=lambda: torch.compiler.assume_constant_result(lambda: None),
)
noted(
    "torch.compile._torchdynamo_inline",
    "torch's operator is not recognised in compiled code while it is routed",
    sample=lambda: torch.compile(lambda: None),
)


def mark_constant(function: F) -> F:
    """Have compilers call `function` while they trace, and take its result for a constant.

    What torch.compiler.assume_constant_result does, without importing the whole compiler for it.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def inline_as(function: Any, operator: Any) -> None:
    """Have compilers find `operator` where they look at `function`."""
    function._torchdynamo_inline = operator


# --- what is exported ---

_EXPORTING = noted(
    "torch.compiler._is_exporting_flag",
    "torch.export in its strict form takes what torch.compile would",
)


def is_exported() -> bool:
    """Say whether a program is written down for others: by torch.export, ONNX or torch.jit.trace.

    Not torch.compile, whose tracing is not for others; compilers call this while they trace.
    """
    # torch 2.9 answers torch.compiler.is_exporting() with True in all that it compiles
    return bool(getattr(torch.compiler, _EXPORTING.name, False)) or tracing_state() is not None


mark_constant(is_exported)


def is_exported_to_onnx() -> bool:
    """Say whether that program is for ONNX."""
    return bool(torch.onnx.is_in_onnx_export())


# --- what is compiled, and what shall not be ---

_set_strategy = deferred(
    f"{_EVAL_FRAME}.set_code_exec_strategy",
    "hooks may be compiled as frames of their own, and the end of a call be missed there",
    None,
)
_action = deferred(f"{_EVAL_FRAME}._FrameAction", "as without set_code_exec_strategy", None)
_strategy = deferred(f"{_EVAL_FRAME}._FrameExecStrategy", "as without set_code_exec_strategy", None)


def run_uncompiled(function: Any, *, and_what_it_calls: bool) -> None:
    """Have `function` inlined into a graph or run by Python, never compiled as its own frame."""
    put, actions, strategy = _set_strategy(), _action(), _strategy()
    if put is None or actions is None or strategy is None:
        return
    skip = actions.SKIP
    put(function.__code__, strategy(skip, skip if and_what_it_calls else actions.DEFAULT))


_DISABLED = noted(
    "torch._dynamo.disable._torchdynamo_disable",
    "what must not be traced is traced, and the compiler says what it cannot",
    sample=lambda: torch.compiler.disable(lambda: None),
)
_DISABLED_WHY = noted(
    "torch._dynamo.disable._torchdynamo_disable_msg",
    "as without the mark",
    sample=lambda: torch.compiler.disable(lambda: None),
)


def keep_from_tracing(function: Any) -> None:
    """Have compiled code end its graph at a call of `function`, which Python runs with all below.

    As ``torch.compiler.disable`` does, without importing the compiler.
    """
    setattr(function, _DISABLED.name, True)
    setattr(function, _DISABLED_WHY.name, None)
    run_uncompiled(function, and_what_it_calls=True)


_reset_code = deferred(
    f"{_EVAL_FRAME}.reset_code",
    "attaching a hook to a module that is part of a compiled graph refuses",
)
_entries_of = deferred(
    f"{_EVAL_FRAME}._debug_get_cache_entry_list",
    "all that was compiled is forgotten when a hook is attached",
    None,
)
_count_of = deferred(
    f"{_EVAL_FRAME}._get_total_cache_entry_count",
    "what is compiled apart (isolated regions, of torch 2.13) is not there",
    None,
    seen=("2.13", "2.15"),
)
_precompiled_of = deferred(
    f"{_EVAL_FRAME}._debug_get_precompile_entries", "what was compiled ahead is not there", None
)
_OF_MODULES = ("_modules", "_parameters", "_buffers")
_GUARD = "what was compiled with a module whose guards were left out is not forgotten"
noted("torch.nn.modules.module._global_forward_hooks", _GUARD)
noted("torch.nn.Module._buffers", _GUARD, sample=torch.nn.Module)
READS_OF_MODULES = "_global_forward_hooks", frozenset(_OF_MODULES)
"""What shows that a compiled frame calls modules: a name in its guards, and names in its code."""

noted(_CONVERSION, "frames that were compiled are not counted, and not forgotten")
noted(f"{_CONVERSION}.input_codes", "as without the module")
noted(f"{_CONVERSION}.compile_lock", "as without the module")
noted(f"{_CONVERSION}.FRAME_COUNTER", "no frame counts as compiled")


def frame_conversion() -> ModuleType | None:
    """Return the part of Dynamo that has compiled something, None where nothing has."""
    module = sys.modules.get(_CONVERSION)
    codes = getattr(module, "input_codes", None)
    return module if codes is not None and codes.seen else None


def compiled_frames() -> int:
    """Count the frames that Dynamo has compiled in this process."""
    return int(getattr(sys.modules.get(_CONVERSION), "FRAME_COUNTER", 0))


def cache_entries(code: CodeType) -> Iterator[Any]:
    """Yield the compiled versions of `code`; None stands for those that cannot be looked into."""
    entries_of, count_of, precompiled_of = _entries_of(), _count_of(), _precompiled_of()
    if entries_of is None:
        yield None
        return
    entries = entries_of(code)
    yield from entries
    if count_of is not None and count_of(code) > len(entries):
        yield None
    if precompiled_of is not None and precompiled_of(code):
        yield None


def forget_frame(code: CodeType) -> None:
    """Forget every compiled version of `code`."""
    _reset_code()(code)


# --- configuration ---

_dynamo_config = deferred(DYNAMO_CONFIG, "torch.compile counts as switched on")
noted(INDUCTOR_CONFIG, "Inductor's own switch of determinism cannot be set; the knob refuses")


def dynamo_config() -> Any:
    """Return Dynamo's configuration, importing Dynamo."""
    return _dynamo_config()


def inductor_config(*, load: bool = True) -> Any:
    """Return Inductor's configuration; without `load` None unless Inductor is in use."""
    return importlib.import_module(INDUCTOR_CONFIG) if load else sys.modules.get(INDUCTOR_CONFIG)


def compiles_calls() -> bool:
    """Say whether torch.compile is switched on."""
    return not _dynamo_config().disable


# --- parts of the compiler that are called ---

_guards = deferred(
    "torch._C._dynamo.guards.TensorGuards",
    "the fast tables compare what they need of tensors in Python, 20 times slower",
    None,
)


def tensor_guards() -> Any:
    """Return the class of Dynamo's compiled guards of tensors, or None."""
    return _guards()


_effect = deferred("torch._higher_order_ops.effects._EffectType", "as without the next", None)
_register_effect = deferred(
    "torch._higher_order_ops.effects._register_effectful_op", "recorders see eager calls only", None
)


_sink = deferred(
    "torch.ops.prims._sink_tokens.default",
    "nothing is done: it is what keeps effects alive in Inductor's graphs, torch 2.13 says so too",
    None,
)


def order_effects(operator: Any) -> None:
    """Have compilers neither drop nor reorder calls of an operator."""
    kinds, register, sink = _effect(), _register_effect(), _sink()
    if kinds is not None and register is not None:
        register(operator, kinds.ORDERED)
    if sink is not None:
        torch.fx.node.has_side_effect(sink)  # torch 2.9 forgot, so that its Inductor drops effects


_passed_on = deferred(
    "torch._dynamo.exc.ShortenTraceback",
    "errors that are raised while tracing reach the caller wrapped in the compiler's own",
    type("Wrapped", (Exception,), {}),
)


def passed_on() -> type[Exception]:
    """Return the class of errors that the compiler hands on as they are; see `traced`."""
    return _passed_on()  # type: ignore[no-any-return]


_break = deferred("torch._dynamo.graph_break", "the graph goes on: torch says what it cannot trace")


def break_graph(why: str = "") -> None:
    """End the graph here, which ``fullgraph=True`` refuses, and says why."""
    _break()(msg=why)


def is_compiler_loaded() -> bool:
    """Say whether anything may have been compiled in this process."""
    return "torch._dynamo" in sys.modules


_limit_hit = deferred(
    "torch._dynamo.exc.FailOnRecompileLimitHit",
    "the function is compiled anew only before torch's limit, and fails there",
    type("NeverRaised", (Exception,), {}),
)
_maybe_dynamic = deferred(
    "torch._dynamo.maybe_mark_dynamic", "each length is compiled for itself", lambda x, dim: None
)


def recompile_limit_hit() -> type[Exception]:
    """Return the error that torch.compile(fullgraph=True) raises after too many compilations."""
    return _limit_hit()


def mark_any_length(x: Tensor, dim: int) -> None:
    """Let compilers take a size of `x` for a symbol."""
    _maybe_dynamic()(x, dim)


_math_attention = deferred(
    "torch._higher_order_ops.flex_attention.math_attention",
    "FlexAttention without a compiler refuses",
)
_compiler = deferred(
    "torch._inductor.cpp_builder.get_cpp_compiler", "no compiler for CPUs is taken to be there"
)


def eager_flex_attention() -> Any:
    """Return FlexAttention's definition in plain operators."""
    return _math_attention()


def require_cpp_compiler() -> None:
    """Raise where Inductor finds no C++ compiler; the error is torch's own."""
    _compiler()()


# --- torch's own tracing, which `bench trace` is compared with ---

debug_mode: Callable[[], Any] = deferred(
    "torch.utils._debug_mode.DebugMode", "that comparison refuses", seen=("2.13", "2.15")
)
"""Return the class of torch's own mode for debugging."""


# --- torch.jit ---

_register = deferred(
    "torch.jit._builtins._register_builtin", "scripting fails where attention is routed", None
)
_table = deferred(
    "torch.jit._builtins._get_builtin_table",
    "scripting knows a function that was routed once",
    dict,
)


def register_jit_builtin(function: Any, operator: str) -> None:
    """Have torch.jit script calls of `function` as an operator."""
    register = _register()
    if register is not None:
        register(function, operator)


def script_as(function: Any, original: Any) -> None:
    """Have torch.jit script calls of `function` as it scripts another Python function."""
    function.__prepare_scriptable__ = lambda: original


def forget_jit_builtin(function: Any) -> None:
    """Undo :func:`register_jit_builtin`."""
    _table()().pop(id(function), None)

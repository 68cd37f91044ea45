"""What only a fresh process shows: importing changes nothing, frozen flags, torch's first state."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]


def in_new_process(code: str, *options: str) -> Any:
    """What the code prints, as JSON; it may print nothing else, nor write to stderr."""
    done = subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


BY_HAND = """
import enum, json, os, sys, threading, types, warnings
import torch, torch.utils.deterministic
import torch.backends.xnnpack, torch.backends.opt_einsum, torch.backends.miopen

def plain(value):
    return value if isinstance(value, (bool, int, float, str, type(None))) else repr(value)

def say(getter):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return plain(getter())
    except Exception as error:
        return f"{type(error).__name__}: {error}"

NOT_ASKED = ("_cuda_", "_xpu_", "_mps_", "_mtia_", "_acc", "_get_accelerator", "_get_cudnn_version")

def by_hand():
    '''Every getter of torch._C without arguments, and every attribute of torch.backends.'''
    found = {}
    for name in sorted(dir(torch._C)):
        asks = name.startswith(("_get_", "_is_", "is_", "get_")) and not name.startswith(NOT_ASKED)
        if asks and isinstance(getattr(torch._C, name), types.BuiltinFunctionType):
            value = say(getattr(torch._C, name))
            if " at 0x" not in str(value):  # a new object every time
                found[name] = value
    for backend in ("generic", "cuda", "mkldnn"):
        for kind in ("all",) if backend == "generic" else ("all", "conv", "rnn", "matmul"):
            found[f"fp32 {backend} {kind}"] = torch._C._get_fp32_precision_getter(backend, kind)
    for path in ("cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "cuda.matmul",
                 "opt_einsum", "miopen", "quantized", "xnnpack"):
        thing = torch.backends
        for part in path.split("."):
            thing = getattr(thing, part)
        inside = getattr(thing, "m", thing)
        for name in sorted({*vars(type(thing)), *vars(thing), *vars(inside)}):
            if not name.startswith("_"):
                value = say(lambda: getattr(thing, name))
                if " at 0x" not in str(value):
                    found[f"{path}.{name}"] = value
    found |= {
        "dtype": str(torch.get_default_dtype()), "device": str(torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "denormal": (torch.tensor([1e-310], dtype=torch.float64) * 1).item() == 0,
        "debug": torch.get_deterministic_debug_mode(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "sparse": torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        "always": torch.is_warn_always_enabled(), "frozen": torch.backends.flags_frozen(),
        "seed": torch.initial_seed(), "random": torch.get_rng_state().sum().item(),
        "cuda": torch.cuda.is_initialized(), "filters": repr(warnings.filters),
        "environment": repr(sorted(os.environ.items())), "running": threading.active_count(),
        "recursion": sys.getrecursionlimit(), "modules": [
            name for name in ("torch._inductor.config", "torch._dynamo") if name in sys.modules
        ],
    }
    return found

def changed(before, after):
    return {key: [before.get(key), after.get(key)] for key in {**before, **after}
            if before.get(key) != after.get(key)}

by_hand()  # some of torch's own are loaded when first asked
before = by_hand()
assert len(before) > 150, len(before)
"""


@pytest.mark.parametrize("module", ["polyattn.torch.flags", "polyattn.torch"])
def test_importing_changes_nothing(module: str) -> None:
    code = f"import {module}\nprint(json.dumps(changed(before, by_hand())))"
    assert in_new_process(BY_HAND + code, "-W", "error::UserWarning") == {}


def test_reading_everything_changes_nothing() -> None:
    code = """
from polyattn.torch.flags import diff, snapshot, table, deterministic, fastest, full_precision
table(), snapshot(), diff(snapshot(), snapshot())
for preset in (deterministic, fastest, full_precision):
    str(preset())
print(json.dumps(changed(before, by_hand())))
"""
    assert in_new_process(BY_HAND + code) == {}


def test_scopes_leave_what_torch_s_getters_say() -> None:
    """Over all settable knobs, seen without the code that is tested."""
    code = """
sys.path.insert(0, ".")
from polyattn.torch.flags import flags
from tests.torch.flags.flag_programs import settable
wrong = {}
for name, values in settable().items():
    for value in values:
        if name.endswith("_split_k"):
            continue
        before = by_hand()
        with flags({name: value}):
            pass
        if left := changed(before, by_hand()):
            left.pop("modules", None)  # deterministic algorithms load Inductor's settings
            wrong |= {f"{name}={value}": left} if left else {}
print(json.dumps(wrong))
"""
    assert in_new_process(BY_HAND + code) == {}


FROZEN = """
import json, sys, warnings
import torch
import torch.backends.opt_einsum, torch.backends.miopen
from polyattn.errors import FlagsError
from polyattn.torch.flags import apply, diff, flags, snapshot, table
free = {row.name: row for row in table()}
start = snapshot()
everything = {name: row.value for name, row in free.items() if row.knob.freezes and row.settable}
other = {"cudnn.benchmark": True, "opt_einsum.strategy": "greedy", "fp32_precision": "tf32",
         "mkldnn.deterministic": True, "cudnn.conv.fp32_precision": "ieee",
         "cudnn.allow_tf32": False,
         "cudnn.rnn.fp32_precision": "ieee", "opt_einsum.enabled": False, "miopen.immediate": True,
         "mkldnn.fp32_precision": "bf16", "float32_matmul_precision": "high"}
if "python_native.triton.enabled" in everything:
    other["python_native.triton.enabled"] = not everything["python_native.triton.enabled"]
scope = flags(other)
scope.__enter__()
inside = snapshot()
torch.backends.disable_global_flags()
"""


def test_scope_entered_before_freezing_still_ends_exactly() -> None:
    code = """
scope.__exit__(None, None, None)
print(json.dumps([diff(start, snapshot()), len(diff(start, inside))]))
"""
    left, changed = in_new_process(FROZEN + code)
    assert left == {}
    assert changed > 10


def test_frozen_knob_is_refused_and_nothing_is_set() -> None:
    code = """
scope.__exit__(None, None, None)
before, said = snapshot(), {}
for name, value in everything.items():
    try:
        flags({"cuda.flash_sdp_enabled": False, name: value}).__enter__()
    except FlagsError as error:
        said[name] = str(error)
    assert diff(before, snapshot()) == {}, name
unsettable = {row.name: row.unsettable for row in table() if row.name in everything}
print(json.dumps([list(everything), said, unsettable]))
"""
    names, said, unsettable = in_new_process(FROZEN + code)
    assert set(names) == set(said) == set(unsettable)
    assert len(names) > 12
    for name in names:
        assert "disable_global_flags() froze it" in said[name], name
        assert "disable_global_flags() froze it" in unsettable[name], name


def test_unfrozen_knobs_can_still_be_set_and_a_scope_made_before_cannot_be_entered_again() -> None:
    code = """
scope.__exit__(None, None, None)
with flags({"cuda.flash_sdp_enabled": False, "float32_matmul_precision": "high"}):
    inside = [torch.backends.cuda.flash_sdp_enabled(), torch.get_float32_matmul_precision()]
before = snapshot()
try:
    scope.__enter__()
except FlagsError as error:
    inside.append(str(error))
print(json.dumps([inside, diff(start, snapshot()), diff(before, snapshot())]))
"""
    (flash, precision, error), left, half = in_new_process(FROZEN + code)
    assert (flash, precision) == (False, "high")
    assert "froze it" in error
    assert left == half == {}


@pytest.mark.parametrize("precision", ["as it is", "inherited"])
def test_apply_to_frozen_knobs(precision: str) -> None:
    code = FROZEN
    if precision != "inherited":
        for level in ('"fp32_precision": "tf32",', '"mkldnn.fp32_precision": "bf16",'):
            code = code.replace(level, "")
    code += """
said = []
try:
    apply(start)
except FlagsError as error:
    said.append(str(error))
assert diff(inside, snapshot()) == {}
done = apply(start, strict=False)
print(json.dumps([said, list(done), list(diff(start, snapshot()))]))
"""
    said, done, left = in_new_process(code)
    assert len(said) == 1 and "froze it" in said[0] and "strict=False" in said[0]
    assert "float32_matmul_precision" in done
    assert {"cudnn.benchmark", "opt_einsum.strategy"} <= set(left)
    if precision != "inherited":  # what inherits from a frozen level cannot come all the way
        assert not set(done) & set(left) - {"cudnn.allow_tf32"}  # unreadable before and after


INITIAL = """
import json, torch
from polyattn.torch.flags import diff, flags, snapshot
start = snapshot()
"""
NESTS: list[list[tuple[str, Any]]] = [
    [("cudnn.conv.fp32_precision", "tf32")],
    [("cudnn.allow_tf32", True)],
    [("cudnn.allow_tf32", False)],
    [("fp32_precision", "ieee")],
    [("cudnn.fp32_precision", "ieee"), ("cudnn.fp32_precision", "tf32")],
    [("fp32_precision", "ieee"), ("cudnn.conv.fp32_precision", "tf32")],
    [("fp32_precision", "ieee"), ("cudnn.allow_tf32", False)],
    [("cudnn.fp32_precision", "ieee"), ("cudnn.rnn.fp32_precision", "none")],
]


@pytest.mark.parametrize("nest", NESTS, ids=str)
def test_first_state_of_torch_reads_the_same_after_scopes(nest: list[tuple[str, Any]]) -> None:
    lines = [INITIAL]
    for depth, (name, value) in enumerate(nest):
        lines.append("    " * depth + f"with flags({{{name!r}: {value!r}}}):")
    lines.append("    " * len(nest) + "pass")
    lines.append("print(json.dumps(diff(start, snapshot())))")
    assert in_new_process("\n".join(lines)) == {}


@pytest.mark.parametrize("preset", ["deterministic", "fastest", "full_precision"])
def test_first_state_of_torch_reads_the_same_after_presets(preset: str) -> None:
    code = f"""
from polyattn.torch.flags import {preset}
with {preset}(), {preset}():
    pass
print(json.dumps(diff(start, snapshot())))
"""
    assert in_new_process(INITIAL + code) == {}

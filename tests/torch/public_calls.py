"""Every public callable of polyattn, and for each a call that does something.

Public is what packages list in ``__all__`` (but for `INNER`), and other modules that the
documentation or an example imports from. Where a docstring has an example that runs, that is the
call; the rest is here.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from polyattn import (
    Alibi,
    Causal,
    Dense,
    DenseBias,
    Mask,
    MissingDependency,
    Problem,
    Window,
    record_selections,
    set_backend,
    use_backend,
)
from tests.public_modules import public_module_names

ROOT = Path(__file__).parents[2]
Call = Callable[[Path], object]


def documented_modules() -> set[str]:
    """The modules that the documentation and the examples import from."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return set(re.findall(r"^\s*from (polyattn[\w.]*) import", text, re.MULTILINE))


INNER = ("polyattn.torch.internals", "polyattn.backends.sdpa.torch")
"""Packages whose lists are for polyattn itself: torch's private names, and four loaders."""


def public_callables() -> dict[str, Any]:
    """Every public function and class by one of its names; not exceptions, nor protocols."""
    found: dict[str, Any] = {}
    known: set[int] = set()
    documented = documented_modules()
    for name in public_module_names():
        if name.startswith(INNER):
            continue
        with contextlib.suppress(MissingDependency, ModuleNotFoundError):
            module = importlib.import_module(name)
            if hasattr(module, "__path__") or name in documented:
                for leaf in getattr(module, "__all__", ()):
                    value = getattr(module, leaf)
                    if _counts(value) and id(value) not in known:
                        known.add(id(value))
                        found[f"{name}.{leaf}"] = value
    return found


def _counts(value: Any) -> bool:
    ours = str(getattr(value, "__module__", "")).startswith("polyattn")
    if inspect.isclass(value):
        return (
            ours
            and not issubclass(value, BaseException)
            and not getattr(value, "_is_protocol", False)
        )
    return ours and callable(value)


def example_of(name: str, value: Any) -> Call | None:
    """The examples in the docstring of a callable and its methods, as one call."""
    module = sys.modules[name.rpartition(".")[0]]
    finder = doctest.DocTestFinder(exclude_empty=True)
    tests = [t for t in finder.find(value, name, globs=dict(vars(module))) if t.examples]
    if not tests:
        return None

    def call(folder: Path) -> None:
        runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
        for test in tests:
            runner.run(test, out=lambda text: None)

    return call


# --- the calls ---

P = Problem(batch=2, q_len=8, kv_len=8, heads=4, kv_heads=4, head_dim=8, layout="BNTH")


def qkv(*, grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, 8, 4, 8, requires_grad=grad) for _ in range(3)]


def attend(**options: Any) -> torch.Tensor:
    from polyattn.torch import attention

    return attention(*qkv(), **options)


def cli(*arguments: str) -> int:
    from polyattn.cli import main

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(list(arguments))


def program(folder: Path) -> str:
    """A program for ``polyattn run`` and ``tune``."""
    path = folder / "program.py"
    path.write_text(
        "import torch\nq = torch.randn(1, 2, 8, 8)\n"
        "torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)\n",
        encoding="utf-8",
    )
    return str(path)


def command_line(folder: Path) -> None:
    """Every command once, on the smallest there is."""
    from polyattn.torch.flags import snapshot

    for name, value in (("a.json", snapshot()), ("b.json", snapshot())):
        (folder / name).write_text(__import__("json").dumps(value), encoding="utf-8")
    for arguments in (
        ["doctor"],
        ["doctor", "--json"],
        ["doctor", "--flags"],
        ["flags", "show"],
        ["flags", "diff", str(folder / "a.json"), str(folder / "b.json")],
        ["explain", "--batch", "1"],
        ["fuzz", "--problems", "2"],
        ["run", program(folder)],
        ["tune", "--list"],
        ["--version"],
        ["nonsense"],
    ):
        with contextlib.suppress(SystemExit):
            cli(*arguments)


def benchmark(folder: Path) -> None:
    """The measurement of overhead, in the fewest rounds, and a comparison of it with itself."""
    from polyattn.bench import main

    path = str(folder / "overhead.json")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        measure = ["overhead", "--rounds", "3", "--block-ms", "0.1", "--no-peers", "--out", path]
        assert main(measure) in (0, 1)  # 1: a goal is missed, of which three rounds say nothing
        assert main(["compare", path, path]) in (0, 1)
    assert Path(path).stat().st_size > 1000


def fuzzed(folder: Path) -> Any:
    from polyattn.conformance import run

    return run(3, seed=1)


def examined(folder: Path) -> None:
    from polyattn.conformance import Case, examine, random_case
    from polyattn.conformance.check import subject
    from polyattn.selection.registry import registry

    case = random_case(random.Random(0))
    assert isinstance(case, Case)
    seen = subject(case)
    for backend in registry:
        if backend.framework == "torch":
            examine(seen, backend)


def recorded(folder: Path) -> Any:
    """Torch's own function, routed, listened to, written and read."""
    from polyattn.integrations.recording import Recorder, read_record, write_record
    from polyattn.integrations.sdpa_patch import route_sdpa, routed

    recorder = Recorder()
    q = torch.randn(1, 2, 8, 8)
    with route_sdpa(recorder):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        routed(q, q, q)
    write_record(recorder.record(["x"]), folder / "record.jsonl")
    return read_record(folder / "record.jsonl")


def tuned(folder: Path) -> None:
    from polyattn.integrations.recording import Case
    from polyattn.measure.tune import Bounds, tune
    from polyattn.tuning import lookup

    try:
        tune([Case(P, None, (False,) * 3, None, calls=1)], bounds=Bounds(1, 2.0, 0.0, again=0))
        attend()
    finally:
        lookup.table().forget()


def registered(folder: Path) -> None:
    from polyattn.selection.capabilities import ALL_MASKS, Capabilities, arch_number
    from polyattn.selection.registry import Available, Backend, register, registry

    can = Capabilities(
        devices={"cpu"}, dtypes={"float32"}, head_dims=(1, 64, 1), masks=ALL_MASKS, strided=True
    )
    assert arch_number("sm_90") == 90
    made = register(
        Backend(
            "example_of_unchanged",
            "torch",
            can,
            lambda: Available("1"),
            lambda: lambda p, c: lambda q, k, v, *rest: torch.zeros_like(q),
            None,
        )
    )
    try:
        attend(backend=made.name)
    finally:
        registry.unregister(made.name)


def selected(folder: Path) -> None:
    from polyattn.integrations.fastvideo import selector

    selector.get_env_variable_attn_backend()
    before = selector.get_global_forced_attn_backend()
    selector.global_force_attn_backend("sdpa_math")
    try:
        attend()
    finally:
        selector.global_force_attn_backend(before)


def scopes(folder: Path) -> None:
    block = torch.nn.Linear(2, 2)
    with record_selections() as seen, use_backend("sdpa_math"), set_backend(block, "reference"):
        attend(mask=Causal() & Window(left=2))
    assert seen


def masks_and_biases(folder: Path) -> None:
    allowed = torch.ones(8, 8, dtype=torch.bool)
    joined: Mask = (Causal() | Window(left=2)) & Dense(allowed)
    attend(mask=joined)
    attend(bias=Alibi(torch.ones(4)))
    attend(bias=DenseBias(torch.zeros(8, 8)))


def programs(folder: Path) -> None:
    from polyattn import native

    native.encode(Causal() & Window(left=2))
    native.dense_program(torch.ones(1, 1, 8, 8, dtype=torch.bool))
    with contextlib.suppress(Exception):  # where the extension is not built
        attend(mask=Causal(), backend="native_cpu")


def hooked(folder: Path) -> None:
    from polyattn.hooks import ForwardHook, HookHandle, ModuleHookManager

    model = torch.nn.Linear(2, 2)
    with ModuleHookManager.of(model) as manager:
        handle = manager.attach("example", ForwardHook())
        assert isinstance(handle, HookHandle)
        model(torch.zeros(1, 2)).sum().backward()


def snapshots(folder: Path) -> None:
    import json

    from polyattn import flags as knobs
    from polyattn.torch.flags import FlagScope, Preset, deterministic, snapshot, table

    path = folder / "snapshot.json"
    path.write_text(json.dumps(snapshot()), encoding="utf-8")
    assert knobs.check(knobs.read(path)) == snapshot()
    knobs.make("torch", {}, {})
    assert "torch" in knobs.read_all(path)
    assert isinstance(table()[0], knobs.Row) and isinstance(table()[0].knob, knobs.Knob)
    with FlagScope({"cudnn.benchmark": True}), deterministic() as preset:
        assert isinstance(preset, Preset)


def printed(folder: Path) -> None:
    from polyattn.cli import printing

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        printing.console().print(printing.table(["a"], [["b"]]))
        printing.note("a")
        printing.emit_json({"a": 1})


def traced(folder: Path) -> None:
    from polyattn import trace

    assert trace.Header and trace.TraceWriter  # which have an example
    try:
        trace.read(folder / "nothing.jsonl")
    except Exception as error:
        assert "nothing.jsonl" in str(error)


def activations(folder: Path) -> None:
    """Two models traced and compared, one with another weight; the floor of a rerun."""
    from polyattn.hooks import trace as record
    from polyattn.hooks.activation_trace import ActivationTrace, current_step
    from polyattn.trace import compare as comparing
    from polyattn.trace.compare import calibration

    model, inputs = torch.nn.Linear(4, 4), torch.ones(2, 4)
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 1 + 2**-20), ("d", 2.0)):
        with torch.no_grad():
            model.weight.mul_(factor)
        with record(model, folder / f"{name}.jsonl") as run:
            assert isinstance(run, ActivationTrace) and current_step() is None
            model(inputs)
    same = comparing.compare(folder / "a.jsonl", folder / "b.jsonl")
    assert isinstance(same, comparing.Verdict) and same.equal
    assert isinstance(same.rows[0], comparing.Row)
    assert isinstance(same.coverage, comparing.Coverage)
    assert all(isinstance(guard, comparing.Guard) for guard in same.guards.values())
    other = comparing.compare(folder / "a.jsonl", folder / "d.jsonl")
    assert isinstance(other.culprit, comparing.Culprit)
    floor = calibration.build(folder / "a.jsonl", [folder / "c.jsonl"])
    assert isinstance(floor, comparing.Floor)


def prints_of_weights(folder: Path) -> None:
    from polyattn.trace import fingerprints, sketch

    weight = torch.ones(2, 3).numpy()
    whole = fingerprints.fingerprint(weight)
    assert fingerprints.matches(fingerprints.moments(whole), fingerprints.moments(whole))
    assert fingerprints.same_layout(whole, whole)
    text = sketch.encode(sketch.sketch(weight))
    fingerprints.assemble(weight.shape, "float32", fingerprints.marginals(weight), text)


def tapped(folder: Path) -> None:
    import jax.numpy as jnp

    from polyattn.jax.trace import JaxTrace, tap, trace

    with trace(folder / "port.jsonl") as run:
        assert isinstance(run, JaxTrace)
        tap(jnp.ones(4), "block")


def flexible(folder: Path) -> None:
    attend(backend="flex")


def whole_programs(folder: Path) -> None:
    """Of a program that needs no library beside torch, small."""
    from polyattn.bench.programs.program_rows import ProgramRow
    from polyattn.bench.programs.program_run import Turns, figures, run_row
    from polyattn.bench.programs.training_programs import Text

    row = ProgramRow("nanogpt training step", "float32", "torch")
    sizes = Text(width=16, heads=2, layers=1, length=8, batch=1, vocabulary=16)
    assert run_row(row, 2, sizes=sizes)["ratio"] is not None
    assert figures(row, Turns({}))["ratio"] is None


def integrated(folder: Path) -> None:
    """With each library that is here; without one, it says so."""
    for name in ("transformers", "diffusers", "fastvideo.slot_in"):
        library = importlib.import_module(f"polyattn.integrations.{name}")
        before = library.is_registered()
        with contextlib.suppress(MissingDependency):
            library.register()
            library.unregister()
            assert not library.is_registered()
            if before:
                library.register()


CALLS: dict[str, Call] = {
    **dict.fromkeys((
        "polyattn.bench.programs.program_rows.ProgramRow",
        "polyattn.bench.programs.program_run.Turns",
        "polyattn.bench.programs.program_run.figures",
        "polyattn.bench.programs.program_run.run_row",
    ), whole_programs),
    **dict.fromkeys((f"polyattn.integrations.{library}.{name}"
                     for library in ("diffusers", "fastvideo.slot_in", "transformers")
                     for name in ("is_registered", "register", "unregister")
                     if (library, name) not in (("diffusers", "register"),
                                                ("transformers", "register"))), integrated),
    **dict.fromkeys(("polyattn.Alibi", "polyattn.DenseBias", "polyattn.Mask", "polyattn.masks.And",
                     "polyattn.masks.Or", "polyattn.masks.Index"), masks_and_biases),
    **dict.fromkeys(("polyattn.record_selections", "polyattn.set_backend", "polyattn.use_backend"),
                    scopes),
    "polyattn.bench.main": benchmark,
    **dict.fromkeys(("polyattn.cli.main", "polyattn.cli.tune.main",
                     "polyattn.cli.tune.print_result",
                     "polyattn.cli.tune.progress_bar"), command_line),
    **dict.fromkeys((f"polyattn.cli.printing.{name}" for name in
                     ("console", "table", "note", "emit_json")), printed),
    **dict.fromkeys(("polyattn.conformance.Case", "polyattn.conformance.Verdict",
                     "polyattn.conformance.examine", "polyattn.conformance.random_case"), examined),
    **dict.fromkeys(("polyattn.conformance.run", "polyattn.conformance.Report"), fuzzed),
    "polyattn.hooks.HookHandle": hooked,
    **dict.fromkeys((f"polyattn.integrations.recording.{name}" for name in
                     ("Case", "Passed", "Ran", "Record", "Recorder", "read_record",
                      "write_record")),
                    recorded),
    **dict.fromkeys(("polyattn.integrations.sdpa_patch.SdpaCall",
                     "polyattn.integrations.sdpa_patch.routed"), recorded),
    **dict.fromkeys((f"polyattn.flags.{name}" for name in
                     ("Knob", "Row", "check", "make", "read", "read_all")),
                    snapshots),
    **dict.fromkeys(("polyattn.torch.flags.FlagScope", "polyattn.torch.flags.Preset"), snapshots),
    **dict.fromkeys(("polyattn.measure.tune.Bounds", "polyattn.measure.tune.tune"), tuned),
    **dict.fromkeys((f"polyattn.native.{name}" for name in
                     ("Payload", "Program", "arrays_of", "dense_program", "terms")), programs),
    **dict.fromkeys((f"polyattn.registry.{name}" for name in
                     ("Available", "Backend", "Missing", "Registry", "register")), registered),
    "polyattn.capabilities.arch_number": registered,
    **dict.fromkeys((f"polyattn.selector.{name}" for name in
                     ("AttentionBackendEnum", "get_env_variable_attn_backend",
                      "get_global_forced_attn_backend", "global_force_attn_backend")), selected),
    "polyattn.backends.flex.torch.load": flexible,
    **dict.fromkeys((f"polyattn.trace.recorders.torch.{name}" for name in
                     ("ActivationTrace", "current_step")), activations),
    **dict.fromkeys((f"polyattn.trace.compare.{name}" for name in
                     ("Coverage", "Culprit", "Floor", "Guard", "Row", "Verdict")), activations),
    **dict.fromkeys((f"polyattn.trace.fingerprints.{name}" for name in
                     ("assemble", "marginals", "matches", "moments", "same_layout")),
                    prints_of_weights),
    **dict.fromkeys((f"polyattn.jax.trace.{name}" for name in ("JaxTrace", "tap", "trace")),
                    tapped),
    **dict.fromkeys((f"polyattn.trace.{name}" for name in ("Record", "Trace", "line_of", "read")),
                    traced),
}  # fmt: skip
"""What no docstring shows."""


def calls() -> Iterator[tuple[str, Call | None]]:
    """Each public callable with its call; None where there is none yet."""
    for name, value in public_callables().items():
        yield name, CALLS.get(name) or example_of(name, value)

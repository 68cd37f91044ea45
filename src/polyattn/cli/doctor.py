"""``polyattn doctor``: what is here, what is not and how to get it, and what is amiss."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import platform
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polyattn
from polyattn import settings
from polyattn.cli.arguments import parser
from polyattn.cli.doctor_evidence import evidence_report, evidence_rows
from polyattn.cli.doctor_native import native_report, native_rows
from polyattn.cli.flags_table import FRAMEWORKS, flags_of, installed, knob_table
from polyattn.cli.printing import console, emit_json, table
from polyattn.errors import PolyattnError, SettingsError, near_matches
from polyattn.flags import Row
from polyattn.problem.processor import identity, processor
from polyattn.selection.registry import Available, Backend, registry
from polyattn.tuning import lookup

__all__ = ["main"]

SUMMARY = """Every backend: available or why not, its version, how to get it; torch, the device, the
instruction sets, the native kernels and what their choice rests on, the tuning table, the settings;
with --flags every global switch of torch and JAX too, as a new process has them. Exit code 1 if
something that was asked for is amiss: a backend named here or in POLYATTN_BACKEND, a setting, a
plugin, the cache directory."""

_ISA = (
    "avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx512vbmi", "avx512_fp16",
    "amx_tile", "amx_bf16", "neon", "asimd", "bf16", "sve", "sve2",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Examine; returns 0 when all that was asked for is fine, 1 when not."""
    options = _parser().parse_args(argv)
    amiss: list[str] = []
    report: dict[str, Any] = {"polyattn": polyattn.__version__, "python": platform.python_version()}
    report["settings"] = _settings(amiss)
    report["torch"] = _guarded(_torch, amiss)
    report["cpu"] = _cpu()
    report["native"] = _guarded(lambda: native_report(amiss), amiss)
    report["backends"] = _backends()
    _check_asked(options.backends, report["backends"], amiss)
    report["evidence"] = _guarded(evidence_report, amiss) if report["torch"] else None
    report["tuning"] = _guarded(lambda: _tuning(amiss), amiss)
    report["plugin_faults"] = dict(registry.faults)
    amiss += [f"plugin {name}: {fault}" for name, fault in registry.faults.items()]
    rows = _flags(amiss) if options.flags else {}
    if options.flags:
        report["flags"] = {
            name: None if found is None else [row.to_dict() for row in found]
            for name, found in rows.items()
        }
    report["amiss"] = list(dict.fromkeys(amiss))
    if options.json:
        emit_json(report, options.json)
    else:
        _print(report, rows)
    return 1 if amiss else 0


def _parser() -> argparse.ArgumentParser:
    made = parser("doctor", SUMMARY)
    made.add_argument(
        "backends", nargs="*", metavar="BACKEND", help="backends that must be available"
    )
    made.add_argument(
        "--flags", action="store_true", help="every knob of torch.backends and of JAX as well"
    )
    return made


def _flags(amiss: list[str]) -> dict[str, list[Row] | None]:
    """Return every framework's table; None for one that is not installed or cannot be asked."""
    found: dict[str, list[Row] | None] = dict.fromkeys(FRAMEWORKS)
    for name in installed():
        rows = _guarded(functools.partial(_table_of, name), amiss)
        found[name] = rows if isinstance(rows, list) else None
    return found


def _table_of(framework: str) -> list[Row]:
    return list(flags_of(framework).table())


def _guarded(examine: Callable[[], Any], amiss: list[str]) -> Any:
    """A part that cannot be examined is a finding, never the end of the examination."""
    try:
        return examine()
    except SettingsError as error:  # which the table of settings reports
        return {"error": str(error)}
    except Exception as error:
        amiss.append(f"{type(error).__name__}: {error}")
        return {"error": str(error)}


def _settings(amiss: list[str]) -> dict[str, Any]:
    amiss += settings.misspelt_here()
    try:
        now = settings.current()
    except SettingsError as error:
        amiss.append(str(error))
        return {"error": str(error)}
    _check_tracing(now, amiss)
    return now.shown()


def _check_tracing(now: settings.Settings, amiss: list[str]) -> None:
    """Add the settings of the activation trace that no trace would take."""
    from polyattn.trace.format.record import STATISTICS

    try:
        re.compile(now.trace_layers or "")
    except re.error as error:
        amiss.append(
            f"got POLYATTN_TRACE_LAYERS={now.trace_layers!r}, expected a regular expression "
            f"({error})."
        )
    amiss += [
        f"got POLYATTN_TRACE_STATS with {one!r}, expected some of {', '.join(STATISTICS)}."
        f"{near_matches(one, STATISTICS)}"
        for one in now.trace_stats or ()
        if one not in STATISTICS
    ]


def _torch() -> dict[str, Any] | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    cuda = torch.cuda.is_available()
    return {
        "version": torch.__version__,
        "build": f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu",
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "devices": [
            "cpu",
            *(
                [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
                if cuda
                else []
            ),
        ],
    }


def _cpu() -> dict[str, Any]:
    model, flags = processor()
    return {
        "model": model,
        "identity": str(identity()),
        "cores": os.cpu_count(),
        "instruction_sets": [flag for flag in _ISA if flag in flags],
    }


def _backends() -> list[dict[str, Any]]:
    try:
        found = registry.backends()
    except PolyattnError:  # a bad setting keeps plugins away; what is in the tree is known
        found = registry.in_tree()
    return [_backend(backend) for backend in found]


def _backend(backend: Backend) -> dict[str, Any]:
    probe = registry.probe(backend)
    row: dict[str, Any] = {
        "name": backend.name,
        "framework": backend.framework,
        "available": isinstance(probe, Available),
        "summary": backend.summary,
    }
    if isinstance(probe, Available):
        devices = sorted(probe.devices or ())
        return row | {"version": probe.version, "detail": probe.detail, "devices": devices}
    return row | {"reason": probe.reason, "how_to_get_it": probe.how_to_get_it}


def _check_asked(named: Sequence[str], rows: list[dict[str, Any]], amiss: list[str]) -> None:
    """Add what was asked for, here or in the environment, and is not there."""
    wanted = [(name, "asked for") for name in named]
    try:
        env = settings.current().backend
        wanted += [(env, "POLYATTN_BACKEND asks for")] if env else []
    except SettingsError:
        env = None  # which the table of settings reports
    for name, asked in wanted:  # of every framework that has it: one that is here will do
        here = asked == "asked for"
        try:
            expanded = registry.expand(name, asked_by="backend" if here else "POLYATTN_BACKEND")
        except PolyattnError as error:
            if here:
                raise  # used wrongly
            amiss.append(str(error))
            continue
        meant = [row for row in rows if row["name"] in expanded]
        if meant and not any(row["available"] for row in meant):
            row = meant[0]
            amiss.append(f"{asked} {name}: {row['reason']}; {row['how_to_get_it']}")


def _tuning(amiss: list[str]) -> dict[str, Any]:
    known = lookup.table()
    rows = known.rows()
    cache = settings.current().cache_dir
    persistent, notices = known.persistent, list(known.notices)
    amiss += [f"tuning table: {line}" for line in notices]
    writable = _writable(cache)
    if not writable and not notices:
        amiss.append(f"the cache directory {cache} cannot be written; measured times will not last")
    here = None
    if importlib.util.find_spec("torch") is not None:
        from polyattn.torch.platform import device_description, library_versions

        mine = device_description("cpu"), library_versions()
        here = sum((key.device, key.versions) == mine for key, _ in rows)
    return {
        "path": str(known.path),
        "exists": known.path.exists(),
        "writable": writable,
        "persistent": persistent,
        "rows": len(rows),
        "rows_of_this_cpu_and_torch": here,
        "notices": notices,
    }


def _writable(directory: Path) -> bool:
    """Whether the directory, or the first of its parents that is there, can be written."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    return directory.is_dir() and os.access(directory, os.W_OK)


def _print(report: dict[str, Any], flags: dict[str, list[Row] | None]) -> None:
    out = console()
    torch, cpu, tuning = report["torch"], report["cpu"], report["tuning"]
    rows = [("polyattn", f"{report['polyattn']}, Python {report['python']}")]
    if torch is None:
        rows.append(("torch", "not installed: pip install 'polyattn[torch]'"))
    elif "error" in torch:
        rows.append(("torch", f"installed, but it cannot be imported: {torch['error']}"))
    else:
        speed = f"{torch['threads']} threads, {torch['instruction_set']}"
        devices = ", ".join(torch["devices"])
        rows.append(
            ("torch", f"{torch['version']} ({torch['build']}), {speed}; devices: {devices}")
        )
    sets = ", ".join(cpu["instruction_sets"]) or "unknown"
    rows.append(("cpu", f"{cpu['model']} ({cpu['identity']}), {cpu['cores']} cores: {sets}"))
    rows += native_rows(report["native"])
    rows += evidence_rows(report["evidence"])
    if "error" not in tuning:
        lasting = "" if tuning["persistent"] and tuning["writable"] else ", not lasting"
        here = tuning["rows_of_this_cpu_and_torch"]
        mine = f" ({here} of this cpu and torch)" if here is not None else ""
        rows.append(("tuning table", f"{tuning['path']}: {tuning['rows']} rows{mine}{lasting}"))
    for name, value in report["settings"].items():
        rows.append((name, "not set" if value is None else str(value)))
    out.print(table(("", "*"), rows))
    out.print()
    out.print(
        table(
            ("backend", "here", "version", "what it is, or how to get it*"),
            map(_row, report["backends"]),
        )
    )
    _print_flags(out, flags)
    if report["amiss"]:
        out.print("\namiss:")
        for line in report["amiss"]:
            out.print(f"- {line}", markup=False)


def _print_flags(out: Any, flags: dict[str, list[Row] | None]) -> None:
    for name, found in flags.items():
        out.print()
        if found is None:
            why = "cannot be asked" if name in installed() else "is not installed"
            out.print(f"{name}'s flags: {name} {why}", markup=False)
        else:
            out.print(knob_table(found, name))


def _row(row: dict[str, Any]) -> tuple[str, str, str, str]:
    if row["available"]:
        detail = f" ({row['detail']})" if row["detail"] else ""
        return (
            _name(row),
            "yes",
            f"{row['version']} [{', '.join(row['devices'])}]",
            row["summary"] + detail,
        )
    return _name(row), "no", "", f"{row['summary']}. {row['reason']}; {row['how_to_get_it']}"


def _name(row: dict[str, Any]) -> str:
    return str(row["name"] if row["framework"] == "torch" else f"{row['framework']} {row['name']}")

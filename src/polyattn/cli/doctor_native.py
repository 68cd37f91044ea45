"""The part of ``polyattn doctor`` on the native CPU kernels: built, how, and what runs here.

Where they are not built, the compiler that a build would take is tried, so that the reason is
today's and not that of the day of installation.
"""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from polyattn import settings
from polyattn.errors import SettingsError
from polyattn.native import forms, module
from polyattn.selection.registry import Missing

__all__ = ["native_report", "native_rows"]

_COMPILERS = ("c++", "g++", "clang++")
_PROGRAM = """
#include <concepts>
#include <span>
template <std::integral T> T twice(T x) { return x << 1; }
int main() { int one[1] = {1}; return twice(int(std::span<int>(one).size())); }
"""


def native_report(amiss: list[str]) -> dict[str, Any]:
    """Examine the extension; add to `amiss` an instruction set that was asked for in vain."""
    found = module.status()
    if isinstance(found, Missing):
        return {
            "built": False,
            "reason": found.reason,
            "compiler_here": _compiler_here(),
            "how_to_get_it": found.how_to_get_it,
        }
    info, here = module.build_info(), module.isas()
    report: dict[str, Any] = {
        "built": True, "version": info.version, "compiler": info.compiler,
        "compiled": list(info.compiled), "available": list(here), "thread_pool": module.pool(),
    }  # fmt: skip
    try:
        used = here[module.isa_index()]
        forced = settings.current().native_isa != "best"
        return report | {"used": used, "forced": forced, "bfloat16": forms.described()}
    except SettingsError as error:
        amiss.append(str(error))
        return report | {"used": None, "forced": True, "bfloat16": None}


def native_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the report as lines of doctor's first table."""
    if "error" in report:
        return [("native kernels", f"they cannot be examined: {report['error']}")]
    if not report["built"]:
        return [
            ("native kernels", f"not built: {report['reason']}"),
            ("", f"{report['compiler_here']}; {report['how_to_get_it']}"),
        ]
    used = report["used"] or "none: see below"
    why = "POLYATTN_NATIVE_ISA" if report["forced"] else "the best here"
    compiled = ", ".join(
        name if name in report["available"] else f"{name} (not on this processor)"
        for name in report["compiled"]
    )
    return [
        ("native kernels", f"{used} ({why}); built with {report['compiler']}: {compiled}"),
        *_of_bfloat16(report["bfloat16"], report["forced"]),
        ("", f"threads: {report['thread_pool']}"),
    ]


def _of_bfloat16(found: dict[str, Any] | None, forced: bool) -> list[tuple[str, str]]:
    """Say which form runs bfloat16, and why; nothing where one form was asked for."""
    if found is None or forced:
        return []
    return [("", f"bfloat16: {found['form']} ({found['why']})")]


def _compiler_here() -> str:
    """Say in words whether the compiler that a build would take now compiles C++20."""
    named = settings.compiler()
    path = shutil.which(named) if named else next(filter(None, map(shutil.which, _COMPILERS)), None)
    if path is None:
        looked_for = f"CXX={named}" if named else f"{', '.join(_COMPILERS)} on the PATH"
        return f"no C++ compiler is here now (looked for {looked_for})"
    command = [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    try:
        done = subprocess.run(
            command, input=_PROGRAM, capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler here now, {path}, cannot be run: {error}"
    if done.returncode == 0:
        return f"the compiler here now, {path}, knows C++20: building again should work"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return f"the compiler here now, {path}, does not compile C++20: {lines[0]}"

"""Who is named: the verdict on a model with a bug, or on a clean port, beside what is true."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyattn.errors import TraceError
from polyattn.hooks import trace
from polyattn.trace import read
from polyattn.trace.compare import Verdict, compare
from polyattn_faults.effect import Seen, apart, seen
from polyattn_faults.rebuilt import renamed
from polyattn_faults.seeding import Fault

__all__ = ["OUTCOMES", "Reference", "answer", "outcome"]

OUTCOMES = ("exact", "other", "missed", "cannot say")

_EFFECT = {torch.float32: 4 * 2.0**-23, torch.bfloat16: 0.5 * 2.0**-7}
"""What is larger than rounding of one result: 4 spacings, and half of one where it is coarse."""


class Reference:
    """A model that is right, with its trace and what its modules give; `folder` is for traces."""

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype, folder: Path
    ) -> None:
        self.model, self.inputs, self.dtype, self.folder = model, inputs, dtype, folder
        self.path = folder / "reference.jsonl"
        with torch.no_grad():
            with seen(model) as self.seen:
                model(**inputs)
            whole = None if dtype is torch.float32 else ".*"
            with trace(model, self.path, overwrite=True, tensors=whole):
                model(**inputs)
        self.trace = read(self.path)  # once, not for each port

    def verdict(self, port: nn.Module, inputs: Mapping[str, Any] | None = None) -> Verdict:
        """Compare a port: run freely in float32, module by module in a coarser dtype."""
        given = self.inputs if inputs is None else inputs
        with torch.no_grad():
            if self.dtype is torch.float32:
                path = self.folder / "port.jsonl"
                with trace(port, path, overwrite=True):
                    port(**given)
                return compare(self.trace, path)
            from polyattn.hooks import isolate

            return isolate(port, self.trace, dict(given))

    def effect(self, port: nn.Module, culprits: tuple[str, ...]) -> tuple[float, float]:
        """Return how far a port's culprits are off, and its output."""
        found: Seen
        with torch.no_grad(), seen(port, [*culprits, ""]) as found:
            port(**self.inputs)
        out = {">": self.seen[">"]}
        return apart(self.seen, found, culprits), apart(out, {">": found[">"]}, [""])


def answer(
    reference: Reference, port: nn.Module, fault: Fault, *, other_names: bool = False
) -> dict[str, Any]:
    """Return what is said of one bug, and whether that is true.

    `other_names`: the port's modules and classes have other names than the reference's.
    """
    row: dict[str, Any] = {"kind": fault.kind, "at": fault.at, "renamed": other_names}
    culprits = fault.culprits
    try:
        with fault.seeded(copy.deepcopy(port) if other_names else port) as wrong:
            own, output = reference.effect(wrong, culprits)
            if other_names:
                culprits = _renamed(wrong, culprits)
            row["culprits"] = list(culprits)
            verdict = reference.verdict(wrong)
    except TraceError as error:  # it is refused before it runs, and should say where to look
        named = any(repr(one) in str(error) for one in culprits)
        return row | {
            "effect": own,
            "output": output,
            "counted": True,
            "outcome": "exact" if named else "cannot say",
            "said": f"refused: {error}"[:300],
        }
    except (RuntimeError, TypeError, ValueError, IndexError) as error:  # the bug is a crash
        return row | {"outcome": "crashed", "said": f"{type(error).__name__}: {error}"[:200]}
    least = _EFFECT[reference.dtype]
    counted = own > least and output > least
    return row | {
        "effect": own,
        "output": output,
        "counted": counted,
        "outcome": outcome(verdict, culprits),
        "said": said(verdict),
    }


def _renamed(model: nn.Module, culprits: tuple[str, ...]) -> tuple[str, ...]:
    """Give the model other names, and return the culprits under these."""
    modules = [model.get_submodule(name) for name in culprits]
    renamed(model)
    now = {module: name for name, module in model.named_modules()}
    return tuple(now[module] for module in modules)


def outcome(verdict: Verdict, culprits: tuple[str, ...]) -> str:
    """One of OUTCOMES."""
    if verdict.culprit is None:
        return "missed" if verdict.equal else "cannot say"
    return "exact" if verdict.culprit.module in culprits else "other"


def said(verdict: Verdict) -> str:
    """The verdict in one line."""
    found = verdict.culprit
    if found is None:
        return "same" if verdict.equal else f"cannot say: {'; '.join(verdict.reasons)}"[:300]
    return (
        f"{found.module!r} ({found.kind}), at {found.at!r} {found.tensor}, error "
        f"{found.error:.1e}, threshold {found.threshold:.1e}"
    )

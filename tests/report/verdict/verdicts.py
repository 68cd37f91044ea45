"""Verdicts to make pages of: a small model over steps, and whatever names a file may hold."""

from __future__ import annotations

import math
from collections.abc import Iterator

from polyattn.trace.compare import Coverage, Culprit, Guard, Row, Verdict

__all__ = ["HOSTILE", "different", "endless", "hostile", "long", "same", "unknown"]

PARTS = (("", "Block"), (".up", "Linear"), (".act", "SiLU"), (".down", "Linear"))

HOSTILE = (
    "</script><img src=x onerror=window.hit=1>",
    "<script>window.hit=1</script>",
    "<!--<script>",
    "]]><svg onload=window.hit=1>",
    "' onmouseover='window.hit=1",
    '"><iframe src=javascript:window.hit=1>',
    "javascript:window.hit=1",
    "${window.hit=1}`",
    "a\nb\r\tc\u2028d\u2029e\x00f\x1b[2J",
    "\u202egnp.exe\u2066 \u200b\ufeff",
    "\ud800 half of a character",
    "__proto__.constructor.toString",
    "layers." * 1500 + "end",
    "x" * 10_000,
    "x" * 5_000 + "y" + "x" * 4_999,
    "&lt;b&gt; &amp; \\n",
    "مرحبا.עברית",
    "...",
    " ",
)


def rows(steps: int | None, layers: int, wrong: tuple[int, int] | None) -> Iterator[Row]:
    """Calls of a model of `layers` blocks; `wrong`: from which step on, and which block."""
    for at in range(steps or 1):
        step = None if steps is None else at
        after = False
        bad = wrong is not None and at >= wrong[0]
        yield Row(module="", reference_module="", cls="Net", step=step, call=at, error_in=0.0,
                  error_out=0.02 if bad else 1e-7, inherited=0.0,
                  contributed=0.02 if bad else 1e-7, threshold=1e-5,
                  verdict="inherited" if bad else "same", how="name")  # fmt: skip
        for layer in range(layers):
            mine = bad and wrong is not None and layer == wrong[1]
            for part, cls in PARTS:
                above = after or (mine and part in ("", ".act", ".down"))
                error_in = 0.01 if after or (mine and part in (".act", ".down")) else 1e-7 * layer
                error_out = 0.03 if above else 2e-7 * (layer + 1)
                first = mine and wrong is not None and at == wrong[0] and part == ""
                verdict = "culprit" if first else "inherited" if above else "same"
                yield Row(
                    module=f"layers.{layer}{part}", reference_module=f"layers.{layer}{part}",
                    cls=cls, step=step, call=at, depth=1 + bool(part), error_in=error_in,
                    error_out=error_out, inherited=error_in, how="name", verdict=verdict,
                    contributed=max(0.0, error_out - error_in), threshold=1e-5,
                )  # fmt: skip
            after = after or mine


def _guards() -> dict[str, Guard]:
    found = (
        Guard("inputs", True),
        Guard("weights", True),
        Guard("determinism", None, "no rerun was given"),
        Guard("flags", False, "cudnn.benchmark: False, True"),
    )
    return {one.name: one for one in found}


def different(steps: int | None = 4, layers: int = 3) -> Verdict:
    """Block 1's own code is wrong, from the third of the steps on."""
    at = 0 if steps is None else steps // 2
    culprit = Culprit(
        module="layers.1", reference_module="layers.1", kind="input", phase="in",
        step=None if steps is None else at, call=at, at="layers.1.act", tensor="args[0]",
        after="layers.1.up", error=0.01, threshold=1e-5,
    )  # fmt: skip
    return Verdict(
        equal=False,
        culprit=culprit,
        rows=tuple(rows(steps, layers, (at, 1))),
        guards=_guards(),
        coverage=Coverage(13, 13, 14, (), ("extra",), 9),
        notes=("one note",),
        reference="a.jsonl",
        port="b.jsonl",
    )


def same() -> Verdict:
    """No error above its threshold, two calls without steps."""
    found = [*rows(None, 2, None), *rows(None, 2, None)]
    return Verdict(equal=True, rows=tuple(found), guards=_guards())


def unknown(count: int = 0) -> Verdict:
    """Nothing can be said, and perhaps nothing was compared."""
    row = Row(
        module="up",
        reference_module="up",
        error_in=0.0,
        error_out=0.01,
        threshold=0.004,
        verdict="cannot say",
    )
    return Verdict(equal=None, reasons=("the first reason", "the second"), rows=(row,) * count)


def endless() -> Verdict:
    """Errors that no axis has a place for, of the kinds that rows may hold."""
    values = (0.0, math.inf, math.nan, None, 5e-324, 1.7e308, 1e-7)
    found = tuple(
        Row(
            module=None if at == 5 else f"m.{at}",
            reference_module=None if at == 4 else f"m.{at}",
            error_in=one,
            error_out=other,
            inherited=one,
            contributed=other,
            threshold=limit,
            verdict=("same", "inherited", "culprit", "differs", "missing", "not compared")[at % 6],
            depth=at % 4,
            phase="backward" if at % 5 == 0 else "forward",
            call=10**at,
        )
        for at, (one, other, limit) in enumerate(
            (one, other, limit)
            for one in values
            for other in values
            for limit in (1e-5, 0.0, math.inf, None)
        )
    )
    culprit = Culprit(module="m.2", reference_module=None, kind="output", error=math.inf)
    return Verdict(equal=False, culprit=culprit, rows=found)


def hostile() -> Verdict:
    """Every text of a verdict is one that somebody made up to do harm."""
    found = tuple(
        Row(
            module=name,
            reference_module=name[::-1],
            cls=name,
            error_in=0.0,
            error_out=0.5,
            inherited=0.0,
            contributed=0.5,
            threshold=1e-5,
            depth=1,
            note=name,
            how=name,
            verdict="culprit" if at == 0 else "inherited",
        )
        for at, name in enumerate(HOSTILE)
    )
    culprit = Culprit(
        module=HOSTILE[0], reference_module=HOSTILE[1], kind="input", at=HOSTILE[4],
        tensor=HOSTILE[0], after=HOSTILE[5], between=HOSTILE, lacking=HOSTILE, others=HOSTILE,
        error=0.5, threshold=1e-5, evidence=HOSTILE[8],
    )  # fmt: skip
    return Verdict(
        equal=False,
        culprit=culprit,
        rows=found,
        notes=HOSTILE,
        reasons=HOSTILE,
        guards={name: Guard(name, False, name) for name in HOSTILE},
        coverage=Coverage(1, 1, 1, HOSTILE, HOSTILE),
        reference=HOSTILE[0],
        port=HOSTILE[9],
    )


def long(count: int) -> Verdict:
    """As many rows as that or a few more, the culprit among them."""
    return different(steps=max(2, count // 241 + 1), layers=60)

"""Document: the whole page, with the one style and the one script that it allows itself."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from polyattn.errors import TraceError
from polyattn.trace.page.escaping import element
from polyattn.trace.page.payload import payload
from polyattn.trace.page.report import headline, summary, table

if TYPE_CHECKING:
    from polyattn.trace.compare.verdict import Verdict

__all__ = ["BEGINNING", "page"]

BEGINNING = "<!doctype html>\n<!-- polyattn trace diff -->\n"
_SCRIPTS = (
    "model", "events", "state", "scroll", "paint", "tree", "curve", "pointer", "steps", "table",
    "details", "main",
)  # fmt: skip


def page(verdict: Verdict, *, rows: int = 20_000) -> str:
    """Return the HTML page of a comparison's verdict: one text that needs nothing else.

    Of more than `rows` rows, those around the culprit are in it, and it says what was left out.
    Raises TraceError if `rows` is below 1.

    >>> from polyattn.trace.compare import Culprit, Row, Verdict
    >>> culprit = Culprit(module="up", reference_module="up", kind="output", tensor="out")
    >>> row = Row(module="up", reference_module="up", error_out=0.5, verdict="culprit")
    >>> text = page(Verdict(equal=False, culprit=culprit, rows=(row,)))
    >>> text.startswith("<!doctype html>"), "the output of " in text, "src=" in text
    (True, True, False)
    """
    if rows < 1:
        raise TraceError(f"got rows={rows}, expected how many rows the page may hold, from 1.")
    style, script = _style(), _script()
    data, kept = payload(verdict, rows)
    left = element("p", f"Of the calls, {kept.said}.", cls="left-out") if kept.said else ""
    parts = [
        f'{BEGINNING}<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        element("title", f"{headline(verdict)} - polyattn trace diff"),
        f"<style>{style}</style></head><body>",
        '<header>polyattn <span class="command">trace diff</span></header><main>',
        summary(verdict),
        f"{left}{_asset('explorer.html') if verdict.rows else ''}",
        table(verdict),
        "</main>",
        f'<script type="application/json" id="data">{data}</script><script>{script}</script>'
        if verdict.rows
        else "",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded, sent, framed or run but the style and the script of the page."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def _asset(name: str) -> str:
    return files("polyattn.trace.page").joinpath("assets", name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    return _asset("page.css") + _asset("explorer.css")


@cache
def _script() -> str:
    parts = "\n".join(_asset(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\ntry {{ (() => {{\n{parts}\n}})(); }}\n{_asset("failed.js")}'

"""The document that every page is: one file with one style and one script, and nothing loaded."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib.resources import files

from polyattn.report.kit.escaping import element

__all__ = ["asset", "beginning", "document"]


def beginning(command: str) -> str:
    r"""Return how the page of a command begins; by it a file is known as such a page.

    >>> beginning("trace diff")
    '<!doctype html>\n<!-- polyattn trace diff -->\n'
    """
    return f"<!doctype html>\n<!-- polyattn {command} -->\n"


def document(
    command: str, title: str, body: Iterable[str], *, style: str, script: str = "", data: str = ""
) -> str:
    """Return a page: a heading that names the command, and `body`, which is HTML.

    `title`: plain text. `style`: CSS beside the kit's own. `script` runs if it is given, and finds
    `data`, JSON from `escaping.json_text`, in the element `data`. The page's policy lets it load,
    send and frame nothing, and run nothing but that script.

    >>> text = document("doctor", "all is <well>", ["<p>yes</p>"], style="")
    >>> "<title>all is &lt;well&gt; - polyattn doctor</title>" in text, "<script" in text
    (True, False)
    """
    style = asset("polyattn.report.kit", "page.css") + style
    parts = [
        f'{beginning(command)}<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(style, script)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        element("title", f"{title} - polyattn {command}"),
        f"<style>{style}</style></head><body>",
        f'<header>polyattn <span class="command">{command}</span></header><main>',
        *body,
        "</main>",
        f'<script type="application/json" id="data">{data}</script><script>{script}</script>'
        if script
        else "",
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _policy(style: str, script: str) -> str:
    """Nothing may be loaded, sent, framed or run but the style and the script of the page."""
    scripts = f"'{_hash(script)}'" if script else "'none'"
    return (
        f"default-src 'none'; script-src {scripts}; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def asset(package: str, *path: str) -> str:
    """Return the text of a file that lies in a package."""
    return files(package).joinpath(*path).read_text(encoding="utf-8")

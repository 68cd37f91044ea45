"""Escaping: text of trace files is hostile, and a page shows it as what it is."""

from __future__ import annotations

import html
import json
from typing import Any

__all__ = ["cut", "element", "json_text", "visible"]

_UNSAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def visible(text: str) -> str:
    r"""Return text without characters that cannot be seen or that turn others around.

    Control characters, line ends, direction marks and halves of characters become their escapes,
    and a backslash two, so that different texts stay different.

    >>> visible("blocks.0\n\u202etxt")
    'blocks.0\\n\\u202etxt'
    """
    if text.isprintable() and "\\" not in text:
        return text
    return "".join(
        c if c.isprintable() and c != "\\" else c.encode("unicode_escape").decode() for c in text
    )


def cut(text: str, length: int) -> str:
    """Return text of at most about `length` characters, and how many it had.

    >>> cut("x" * 100, 10)
    'xxxxxxx...xxx (100 characters)'
    """
    if len(text) <= length:
        return text
    tail = length // 3
    return f"{text[: length - tail]}...{text[len(text) - tail :]} ({len(text)} characters)"


def element(tag: str, text: str, *, cls: str = "") -> str:
    """Return an HTML element with text in it.

    >>> element("code", "<img src=x>", cls="name")
    '<code class="name">&lt;img src=x&gt;</code>'
    """
    kind = f' class="{html.escape(cls)}"' if cls else ""
    return f"<{tag}{kind}>{html.escape(visible(text))}</{tag}>"


def json_text(value: Any) -> str:
    r"""Return JSON in ASCII that no HTML parser takes for markup.

    >>> json_text("</script><!-- \u2028")
    '"\\u003c/script\\u003e\\u003c!-- \\u2028"'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)

"""Bars of the page of a program, as SVG: shares of calls, and times with their range."""

from __future__ import annotations

import html
import statistics
from collections.abc import Mapping, Sequence

from polyattn.integrations.program.asked import Gain
from polyattn.report.kit.escaping import visible
from polyattn.report.kit.quantities import percent

__all__ = ["Colours", "shares", "swatch", "times"]

_KINDS = 6


class Colours:
    """A class of colour for each backend, by its place; "" is what no backend ran."""

    def __init__(self, backends: Sequence[str]) -> None:
        named = [name for name in backends if name]
        self._of = {name: f"k{min(at, _KINDS - 1)}" for at, name in enumerate(named)}

    def of(self, backend: str) -> str:
        """Return the class for a backend."""
        return self._of.get(backend, "none") if backend else "none"


def swatch(colour: str) -> str:
    """Return a small square."""
    square = f'<rect class="{colour}" width="10" height="10" rx="2"/>'
    return f'<svg viewBox="0 0 10 10" aria-hidden="true">{square}</svg>'


def shares(calls: Mapping[str, int], whole: int, colours: Colours) -> str:
    """Return a bar of the calls by backend; it is as long as their share of `whole`."""
    left, drawn, said = 0.0, [], []
    for name, count in calls.items():
        size = 100 * count / whole if whole else 0.0
        title = f"{name or 'not routed'}: {count:,} calls, {percent(count, whole)}"
        said.append(title)
        drawn.append(
            f'<rect class="{colours.of(name)}" x="{left:.3f}" width="{size:.3f}" height="10">'
            f"<title>{_text(title)}</title></rect>"
        )
        left += size
    return (
        f'<svg class="shares" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" '
        f'aria-label="{_text("; ".join(said))}">{"".join(drawn)}</svg>'
    )


def times(gain: Gain, longest: float) -> str:
    """Return two bars, as it ran above stock's, each with a line from fastest to slowest."""
    parts = [
        _timed("ours", gain.seconds, longest, 2.0),
        _timed("stock", gain.stock_seconds, longest, 15.0),
    ]
    return (
        '<svg class="times" viewBox="0 0 100 26" preserveAspectRatio="none" role="img" '
        f'aria-label="time as it ran, and with stock torch">{"".join(parts)}</svg>'
    )


def _timed(kind: str, seconds: Sequence[float], longest: float, top: float) -> str:
    def at(value: float) -> str:
        return f"{100 * value / longest:.3f}"

    middle, width = top + 4.5, at(statistics.median(seconds))
    return (
        f'<rect class="{kind}" y="{top}" width="{width}" height="9" rx="1"/>'
        f'<line x1="{at(min(seconds))}" x2="{at(max(seconds))}" y1="{middle}" y2="{middle}"/>'
    )


def _text(text: str) -> str:
    return html.escape(visible(text))

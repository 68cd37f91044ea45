"""Whether a trace was recorded with perturbed weights, as its headers say it."""

from __future__ import annotations

from polyattn.trace.format.contents import Trace

__all__ = ["seeds_of"]


def seeds_of(trace: Trace) -> str:
    """Return the seed as text, several where ranks have others; empty if nothing was perturbed.

    >>> from polyattn.trace import Header
    >>> seeds_of(Trace(Header(selection={"perturb": 0}), (), True))
    '0'
    """
    headers = trace.headers or (trace.header,)
    seeds = [one.selection.get("perturb") for one in headers]
    return ", ".join(dict.fromkeys(f"{seed!r:.40}" for seed in seeds if seed is not None))

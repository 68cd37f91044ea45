"""Rules: how the user says which module of one trace is which of the other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polyattn.errors import TraceError

__all__ = ["Given", "Rule", "apply", "parse"]

Given = str | Path | Mapping[str, str] | Iterable[Sequence[str]] | None


@dataclass(frozen=True)
class Rule:
    """A pattern that is searched for in names, and what takes its place."""

    pattern: re.Pattern[str]
    replacement: str

    def __str__(self) -> str:
        return f"{self.pattern.pattern} -> {self.replacement}"


def parse(given: Given) -> tuple[Rule, ...]:
    r"""Return rules from a mapping, pairs, or a JSON file of either; TraceError for anything else.

    >>> [str(rule) for rule in parse({r"^transformer\.h\.(\d+)": r"blocks.\1"})]
    ['^transformer\\.h\\.(\\d+) -> blocks.\\1']
    """
    if given is None:
        return ()
    if isinstance(given, str | Path):
        given = _load(Path(given))
    pairs = list(given.items() if isinstance(given, Mapping) else given)
    return tuple(_rule(pair) for pair in pairs)


def _load(path: Path) -> Mapping[str, str] | list[Sequence[str]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TraceError(f"got the rules {path}, which cannot be read ({error}).") from error
    if not isinstance(found, dict | list):
        raise TraceError(f"got the rules {path}, expected a JSON object of pattern: replacement.")
    return found


def _rule(pair: object) -> Rule:
    texts = list(pair) if isinstance(pair, list | tuple) else []
    if len(texts) != 2 or not all(isinstance(text, str) for text in texts):
        raise TraceError(f"got the rule {pair!r:.120}, expected a pattern and its replacement.")
    try:
        pattern = re.compile(texts[0])
        re.compile(f"(?:{texts[0]})|").sub(texts[1], "")  # names groups that are not there
    except (re.error, IndexError) as error:
        raise TraceError(
            f"got the rule {texts[0]!r} -> {texts[1]!r}, which is no regular expression and "
            f"replacement: {error}."
        ) from error
    return Rule(pattern, texts[1])


def apply(
    rules: Sequence[Rule], a: Iterable[str], b: Iterable[str]
) -> tuple[dict[str, str], list[str]]:
    r"""Return a's names with b's by the rules, and what is to be said of rules without effect.

    A rule is tried on a's names first, then on b's, so it may be written in either direction; of
    several that fit a name the first wins.

    >>> apply(parse([[r"^h\.", "blocks."], ["x", "y"]]), ["h.0", "ln"], ["blocks.0", "ln"])
    ({'h.0': 'blocks.0'}, ["the rule x -> y matches no module's name on either side"])
    """
    ours, theirs = list(a), list(b)
    known_a, known_b = set(ours), set(theirs)
    pairs: dict[str, str] = {}
    notes = []
    for rule in rules:
        tried = [name for name in (*ours, *theirs) if rule.pattern.search(name)]
        hits = 0
        for name in ours:
            target = _target(rule, name)
            if target in known_b and target is not None:
                hits += 1
                if target not in pairs.values():
                    pairs.setdefault(name, target)
        for name in theirs:
            target = _target(rule, name)
            if target in known_a and target is not None and target != name:
                hits += 1
                if name not in pairs.values():
                    pairs.setdefault(target, name)
        if not tried:
            notes.append(f"the rule {rule} matches no module's name on either side")
        elif not hits:
            notes.append(
                f"the rule {rule} matches {len(tried)} names ({tried[0]!r} first), but what it "
                f"makes of them ({_target(rule, tried[0])!r}) is no module of the other side"
            )
    return pairs, notes


def _target(rule: Rule, name: str) -> str | None:
    if not rule.pattern.search(name):
        return None
    return rule.pattern.sub(rule.replacement, name)

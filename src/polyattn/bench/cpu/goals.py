"""What is wanted of each row of ``bench cpu``, and whether it is met.

How much faster than torch a row has to be was stated for two kinds of processors, and counts on
those alone: what is within reach depends on what torch's own kernels make of a processor. The rest
is measured against the machine itself or the other engines of the same run, and counts everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polyattn.problem.processor import level_of

__all__ = [
    "AMX", "CODES_LEAST", "OTHERS", "OWN", "PAGED_MOST", "READ_LEAST", "ZEN4", "Processors",
    "processors_like", "said", "verdicts",
]  # fmt: skip

READ_LEAST = 0.85
"""The share of the read rate of the run that decoding reaches."""
PAGED_MOST = 1.15
"""Time of decoding on pages over that on keys that lie together."""
CODES_LEAST = 1.7
"""Time of decoding in bfloat16 over that on codes of 8 bits."""
OWN = ("paged", "int8", "fp8")
"""The ways of a row that are calls of ours on other forms of its keys and values."""

_NOTHING: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Processors:
    """A kind of processor. `over_torch`: by case, torch's time over ours in float32, bfloat16.

    `over_peers`: the time of the best of all engines of the run over ours.
    """

    name: str
    over_torch: Mapping[str, tuple[float | None, float | None]]
    over_peers: float

    def goal(self, case: str, dtype: str) -> float | None:
        """Return what is wanted over torch of a case, "GROUP SIZE"; None: nothing was stated."""
        return self.over_torch.get(case, _NOTHING)[dtype != "float32"]


ZEN4 = Processors(
    "AMD Zen 4",
    {
        "dense (1,8,4096,64)": (1.4, 2.6),
        "dense (1,16,2048,128)": (1.3, 2.5),
        "ViT (8,12,197,64)": (1.3, 2.4),
        "short (2,12,512,64)": (1.2, 2.0),
        "causal (1,8,4096,64)": (1.6, 2.8),
        "window 256 (1,8,4096,64)": (18.0, 30.0),
        "90% block-sparse (1,8,4096,64)": (15.0, 28.0),
        "half padding (4,8,2048,64)": (2.6, 5.2),
        "GQA prefill (1,32/8,2048,64)": (1.3, 2.4),
        "fwd+bwd dense (1,8,4096,64)": (1.4, 2.0),
        "fwd+bwd window 256 (1,8,4096,64)": (17.0, 22.0),
    },
    1.1,
)
AMX = Processors(
    "Intel with AMX",
    {
        "dense (1,8,4096,64)": (1.3, 2.0),
        "dense (1,16,2048,128)": (1.2, 1.8),
        "ViT (8,12,197,64)": (1.3, 2.0),
        "causal (1,8,4096,64)": (1.5, 2.2),
        "window 256 (1,8,4096,64)": (18.0, 20.0),
        "90% block-sparse (1,8,4096,64)": (15.0, 20.0),
        "fwd+bwd dense (1,8,4096,64)": (1.3, 1.8),
        "fwd+bwd window 256 (1,8,4096,64)": (15.0, 18.0),
    },
    1.3,
)
OTHERS = Processors("other processors", {}, 1.1)


def processors_like(machine: Mapping[str, Any]) -> Processors:
    """Return the kind that a record's `machine` is of.

    >>> zen3 = {"vendor": "AuthenticAMD", "family": 25, "flags": ["avx2"]}
    >>> processors_like(zen3).name, processors_like({**zen3, "flags": ["avx512_bf16"]}).name
    ('other processors', 'AMD Zen 4')
    """
    level = level_of(frozenset(machine["flags"]))
    match machine.get("vendor"), machine.get("family"), level:
        case "AuthenticAMD", 25, "avx512bf16":  # Zen 3 is of family 25 too; Zen 5 of 26
            return ZEN4
        case "GenuineIntel", _, "amx":
            return AMX
    return OTHERS


def verdicts(
    row: Mapping[str, Any], processors: Processors, *, peers: bool
) -> Iterator[dict[str, Any]]:
    """Yield each goal of a measured row with what was reached; `peers`: engines took part.

    `least` or `most`: the goal; `got`: the median of the run; `over`: what it is measured against.
    """
    if row["goal"] is not None:
        yield _least("torch", row["goal"], row["ratio"]["median"])
    if row["q_len"] == 1:
        yield _least("read rate", READ_LEAST, row["ours_share"])
        yield from _of_caches(row)
    if peers:
        name, ratio = _best(row)
        yield _least(f"best peer, {name}", processors.over_peers, ratio)


def _of_caches(row: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    found = {name: row["peers"][name] for name in OWN if name in row["peers"]}
    for name, way in found.items():
        over_ours = way["ratio"]["median"]
        if name == "paged":
            got = {"over": "contiguous", "most": PAGED_MOST, "got": over_ours}
            yield {**got, "met": over_ours <= PAGED_MOST and not way["wrong"]}
        elif row["dtype"] == "bfloat16":
            one = _least(f"bfloat16 ({name})", CODES_LEAST, round(1 / over_ours, 3))
            yield {**one, "met": one["met"] and not way["wrong"]}


def _best(row: Mapping[str, Any]) -> tuple[str, float]:
    """Return the fastest of torch and those engines that were right, and its time over ours."""
    found = {
        name: peer["ratio"]["median"]
        for name, peer in row["peers"].items()
        if name not in OWN and "ratio" in peer and not peer["wrong"]
    }
    found["torch"] = row["ratio"]["median"]
    name = min(found, key=found.__getitem__)
    return name, found[name]


def _least(over: str, goal: float, got: float) -> dict[str, Any]:
    return {"over": over, "least": goal, "got": got, "met": got >= goal}


def said(verdict: Mapping[str, Any]) -> str:
    """Return a goal and what was reached, in words.

    >>> said({"over": "torch", "least": 1.4, "got": 1.3, "met": False})
    '1.3 x torch (goal: at least 1.4)'
    """
    how = "at least" if "least" in verdict else "at most"
    goal = verdict["least"] if "least" in verdict else verdict["most"]
    return f"{verdict['got']:.3g} x {verdict['over']} (goal: {how} {goal:g})"

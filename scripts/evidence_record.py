"""Make a record of evidence, as polyattn ships them, from the record of a bench of CPU kernels.

``python scripts/evidence_record.py BENCH.json --name N --hardware TEXT`` prints it, ``--write``
puts it where the package reads it. BENCH.json is what `polyattn bench cpu --record` or
`polyattn bench harm --record` wrote. Older ones do not name vendor and family of the processor:
then `--vendor` and `--family` must, and `--note` says how they are known.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyattn.problem import MaskFacts, Problem
from polyattn.problem.processor import level_of
from polyattn.selection.evidence.problem_kinds import KINDS, is_small, is_tiny_training, kind_of
from polyattn.selection.evidence.shipped import SCHEMA, parse
from polyattn.selection.processor_kind import release_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src" / "polyattn" / "selection" / "evidence" / "records"
MASKS = {"none": None, "causal": MaskFacts.parse("Causal('top_left')", None)}
"""The masks of a bench that are a kind of their own; the others follow from these."""
TIMED = ("native_cpu", "automatic")
"""What a bench timed: the kernels alone or, as `bench harm`, what was chosen and the kernels."""


def main(argv: Sequence[str]) -> int:
    """Print or write the record."""
    options = _parser().parse_args(argv)
    bench = json.loads(options.bench.read_text(encoding="utf-8"))
    machine = bench["machine"]
    who = {
        "vendor": options.vendor or machine.get("vendor"),
        "families": options.family or [machine.get("family")],
    }
    if who["vendor"] is None or None in who["families"]:
        print("the bench names no vendor and family: pass --vendor and --family", file=sys.stderr)
        return 2
    made = converted(bench, options.name, options.hardware, who, options.threads, options.note)
    text = json.dumps(made, indent=1) + "\n"
    parse(text, f"{options.name}.json")
    if not options.write:
        print(text, end="")
        return 0
    (FOLDER / f"{options.name}.json").write_text(text, encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("bench", type=Path, metavar="BENCH.json")
    made.add_argument("--name", required=True, help="of the record and its file")
    made.add_argument("--hardware", required=True, help="as a reason names it")
    made.add_argument("--vendor", help="as the processor tells it, e.g. AuthenticAMD")
    made.add_argument("--family", type=int, action="append", help="again for each one")
    counts = "that the record counts for; default 1 to twice those of the bench"
    made.add_argument("--threads", type=int, nargs=2, metavar=("FROM", "TO"), help=counts)
    made.add_argument("--note", default="", help="what else there is to know")
    made.add_argument("--write", action="store_true", help=f"into {FOLDER.relative_to(ROOT)}")
    return made


def converted(
    bench: Mapping[str, Any],
    name: str,
    hardware: str,
    who: Mapping[str, Any],
    threads: Sequence[int] | None = None,
    note: str = "",
) -> dict[str, Any]:
    """Return the record that the record of a bench makes."""
    if bench["quick"] or bench["backend"] not in TIMED or not bench["native"]:
        raise SystemExit("got a --quick bench, or one of another backend: neither is evidence")
    ratios: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for dtype, kind, ratio in _measured(bench["rows"]):
        ratios.setdefault(dtype, {}).setdefault(kind, []).append(ratio)
    return {
        "schema": SCHEMA,
        "name": name,
        "hardware": hardware,
        "matches": {
            **who,
            "level": level_of(frozenset(bench["machine"]["flags"]) | _neon(bench)),
            "isa": bench["native"]["isa"],
            "bfloat16": _form(bench["native"]),
            "torch": [release_of(bench["versions"]["torch"])],
            "threads": list(threads or (1, 2 * bench["threads"])),
        },
        "made": {
            "command": f"`{bench['command']}`",
            "date": bench["date"],
            "torch": bench["versions"]["torch"],
            "polyattn": bench["versions"]["polyattn"],
            "threads": bench["threads"],
            "note": note,
        },
        "figures": {
            dtype: {kind: _figure(kinds[kind]) for kind in KINDS if kind in kinds}
            for dtype, kinds in ratios.items()
        },
    }


def _form(native: Mapping[str, Any]) -> str:
    """Return the form that ran bfloat16: the best one, in records of before there was a choice."""
    return str(native.get("bfloat16", {}).get("form", native["isa"]))


def _neon(bench: Mapping[str, Any]) -> frozenset[str]:
    return frozenset({"neon"} if "asimd" in bench["machine"]["flags"] else ())


def _measured(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, Mapping[str, float]]]:
    """Yield dtype, kind and ratio of each row that is of a kind, right and large enough."""
    for row in rows:
        if row.get("wrong") or row["mask"] not in MASKS:
            continue
        problem = Problem(
            batch=row["batch"],
            q_len=row["q_len"],
            kv_len=row["kv_len"],
            heads=row["heads"],
            kv_heads=row["kv_heads"],
            head_dim=row["head_dim"],
            dtype=row["dtype"],
            grad=bool(row["train"]),
            mask=MASKS[row["mask"]],
        )
        if is_small(problem) and not problem.grad and (problem.gqa or problem.mask):
            continue
        if is_tiny_training(problem):
            continue
        # what would run in the kernel's stead: of grouped decoding, sdpa_flash folds the heads
        folded = row.get("peers", {}).get("folded", {}).get("ratio")
        ratio = row["native_ratio"] if "native_ratio" in row else folded or row["ratio"]
        if ratio is not None:  # which the kernels cannot run
            yield row["dtype"], kind_of(problem), ratio


def _figure(ratios: Sequence[Mapping[str, float]]) -> dict[str, float | int]:
    """Return the spread over the problems; of few of them, that over the repeats of each."""
    low, high = ("q1", "q3") if len(ratios) < _FEW else ("median", "median")
    return {
        "problems": len(ratios),
        "low": min(one[low] for one in ratios),
        "median": round(statistics.median(one["median"] for one in ratios), 3),
        "high": max(one[high] for one in ratios),
    }


_FEW = 4


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""The tables in README.md, docs/cpu.md, docs/command-line.md and docs/offload.md: from what the
code declares and from the records.

``python scripts/readme_tables.py`` says whether they are up to date, ``--write`` makes them so.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polyattn import settings
from polyattn.bench.cpu.cases import CASES
from polyattn.selection.capabilities import ALL_MASKS, Capabilities
from polyattn.selection.registry import Backend, Registry, registry

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- {}: made by scripts/readme_tables.py --write -->"
END = "<!-- end of {} -->"

FEATURES = {
    "softcap": "soft cap", "sinks": "sinks", "dropout": "dropout", "gqa": "GQA",
    "value_dim": "value dim other than head dim", "lse": "lse", "backward": "backward",
    "bias_grad": "bias gradient", "sinks_grad": "sinks gradient", "compiled": "`torch.compile`",
}  # fmt: skip
LIMITS = {case.name: case.limit for case in CASES}
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def table(backends: Registry) -> str:
    """Return the table in Markdown, one row for each backend and device it declares."""
    lines = [
        "| backend | of | device | dtypes | refuses | what it is |",
        "|---|---|---|---|---|---|",
    ]
    for framework in ("torch", "jax"):
        for backend in backends.in_tree(framework):
            lines += [f"| {' | '.join(row)} |" for row in rows(backend)]
    return "\n".join(lines)


def rows(backend: Backend) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a backend's rows."""
    declared = backend.capabilities
    for can in declared if isinstance(declared, tuple) else (declared,):
        yield (
            f"`{backend.name}`",
            backend.framework,
            ", ".join(sorted(can.devices)),
            dtypes(can),
            refusals(can, backend.framework),
            backend.summary,
        )


def dtypes(can: Capabilities) -> str:
    """Return the dtypes, short."""
    return ", ".join(short for name, short in SHORT.items() if name in can.dtypes)


def refusals(can: Capabilities, framework: str) -> str:
    """Return what the declaration does not allow; only torch's can be asked to be compiled."""
    beside = {"sinks_grad": not can.sinks, "compiled": framework != "torch"}
    found = [
        text
        for name, text in FEATURES.items()
        if not getattr(can, name) and not beside.get(name, False)
    ]
    if lacking := ALL_MASKS - set(can.masks) - {"Full"}:
        known = ", ".join(f"`{name}`" for name in sorted(can.masks))
        found.insert(0, f"masks but {known}" if len(lacking) > 3 else ", ".join(sorted(lacking)))
    if not can.biases:
        found.insert(1, "biases")
    return ", ".join(found) or "nothing but empty head or value dims, as all do"


def costs() -> str:
    """Return the table of overheads of the record in benchmarks/results, the first by name."""
    path = min((ROOT / "benchmarks" / "results").glob("*/overhead.json"))
    record = json.loads(path.read_text(encoding="utf-8"))
    machine, found = record["machine"], {row["name"]: row for row in record["rows"]}
    busy = record["foreign_load"]["median"]
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, torch {record['versions']['torch']}, "
        f"{record['date'][:10]}, others busy {busy:.0%}: "
        f"[the record]({path.relative_to(ROOT).as_posix()})."
    )
    lines = [where, "", "| call | over the kernel, us | goal |", "|---|---:|---|"]
    for name in SHOWN:
        row = found[name]
        goal = "" if row["goal_us"] is None else f"{row['goal_us']}: {_met(row['met'])}"
        lines.append(f"| {name} | {row['extra_us']['median']:.1f} | {goal} |")
    return "\n".join(lines)


def _met(met: bool) -> str:
    return "met" if met else "not met"


SHOWN = (
    "attention, BNTH", "attention, BTNH", "plan step, BNTH", "attention, compiled",
    "in use_backend(...)", "mask=causal", "polyattn's drop-in F.sdpa", "torch F.sdpa",
    "with sdpa_kernel(FLASH): F.sdpa", "diffusers dispatch_attention_fn",
    "transformers sdpa_attention_forward",
)  # fmt: skip


def cpu() -> str:
    """Return the table of the CPU kernel's record in benchmarks/results, the first by name."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*/cpu.json"))
    if not paths:
        return "There is no record yet: `polyattn bench cpu --peers --record` makes it."
    record = json.loads(paths[0].read_text(encoding="utf-8"))
    machine, rows = record["machine"], record["rows"]
    busy = max(row["foreign"]["max"] for row in rows)
    sticks = ", ".join(
        f"{name} {stick['max']:.0f} {stick['unit']}"
        for name, stick in sorted(record["yardsticks"].items())
    )
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, {record['threads']} threads, torch "
        f"{record['versions']['torch']}, {record['date'][:10]}, others busy at most {busy:.0%}; "
        f"yardsticks of the run: {sticks}. The record: "
        f"`{paths[0].relative_to(ROOT).as_posix()}`."
    )
    peers = sorted({name for row in rows for name in row["peers"]})
    names = ("case", "ours, ms", "x torch", "goal", *(f"x {name}" for name in peers), "of peak")
    align = ("---", *("---:" for _ in names[1:-1]), "---:", "---")
    lines = [where, "", f"| {' | '.join((*names, 'limited by'))} |", f"|{'|'.join(align)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(_cpu_cells(row, peers))} |" for row in rows)])


def _cpu_cells(row: dict[str, Any], peers: list[str]) -> Iterator[str]:
    yield row["name"]
    yield f"{row['ours_ms']['median']:.3g}"
    yield f"{row['ratio']['median']:.3g}"
    yield "" if row["goal"] is None else f"{row['goal']:g}: {_met(row['met'])}"
    for name in peers:
        ratio = row["peers"].get(name, {}).get("ratio")
        yield f"{ratio['median']:.3g}" if ratio else ""
    rate = f"{row['ours_gbs']:.0f} GB/s, " if "ours_gbs" in row else ""
    yield f"{rate}{row['ours_share']:.0%}"
    yield LIMITS.get(row["name"], row["limit"])


def offload() -> str:
    """Return the table of offload's record in benchmarks/results, the first by name."""
    paths = sorted((ROOT / "benchmarks" / "results").glob("*/offload.json"))
    if not paths:
        return "There is no record yet: `polyattn bench offload --record` makes it."
    record = json.loads(paths[0].read_text(encoding="utf-8"))
    machine, versions = record["machine"], record["versions"]
    where = (
        f"{machine['cpu']}, {machine['cores']} cores, torch {versions['torch']}, "
        f"{record.get('date', 'no date')[:10]}. The record: "
        f"`{paths[0].relative_to(ROOT).as_posix()}`."
    )
    lines = [where, "", "| part | found | goals |", "|---|---|---|"]
    rows = record["rows"]
    return "\n".join([*lines, *(f"| {r['name']} | {r['text']} | {_met(r['met'])} |" for r in rows)])


def variables() -> str:
    """Return the table of the settings."""
    lines = ["| variable | values | meaning |", "|---|---|---|"]
    found = settings.rows()
    return "\n".join([*lines, *(f"| `{name}` | {said} | {about} |" for name, said, about in found)])


PAGES = {
    "README.md": {"backends": lambda: table(registry), "costs": costs},
    "docs/cpu.md": {"cpu": cpu},
    "docs/command-line.md": {"settings": variables},
    "docs/offload.md": {"offload": offload},
}


def filled(page: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Return the page with each made part between its marks."""
    for name, make in parts.items():
        made = make()
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = page.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"got a page without the marks {begin} and {end}")
        page = f"{before}{begin}\n{made}\n{end}{after}"
    return page


def main() -> int:
    """Write the pages, or say whether they are as they would be written."""
    stale = []
    for name, parts in PAGES.items():
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        made = filled(text, parts)
        if "--write" in sys.argv[1:]:
            page.write_text(made, encoding="utf-8")
        elif made != text:
            stale.append(name)
    if stale:
        print(f"{' and '.join(stale)}: run python scripts/readme_tables.py --write")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())

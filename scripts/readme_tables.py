"""The tables in README.md and in docs/: from what the code declares and from the records.

``python scripts/readme_tables.py`` says whether they are up to date, ``--write`` makes them so.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from models_tables import models_of

from polyattn import settings
from polyattn.bench.cpu.goals import OWN, Processors, processors_like, verdicts
from polyattn.bench.machine import processor_name
from polyattn.problem.processor import level_of
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
RESULTS = ROOT / "benchmarks" / "results"
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
    """Return the tables of overheads of the newest record in benchmarks/results."""
    paths = (ROOT / "benchmarks" / "results").glob("*/overhead.json")
    records = {path: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    path, record = max(records.items(), key=lambda entry: entry[1]["date"])
    machine, found = record["machine"], {row["name"]: row for row in record["rows"]}
    busy = record["foreign_load"]["median"]
    where = (
        f"{processor_name(machine)}, {machine['cores']} cores, "
        f"torch {record['versions']['torch']}, "
        f"{record['date'][:10]}, others busy {busy:.0%}: "
        f"[the record]({path.relative_to(ROOT).as_posix()})."
    )
    lines = [where, "", "| call | over the kernel, us | goal |", "|---|---:|---|"]
    for name in SHOWN:
        row = found[name]
        goal = "" if row["goal_us"] is None else f"{row['goal_us']}: {_met(row['met'])}"
        lines.append(f"| {name} | {row['extra_us']['median']:.1f} | {goal} |")
    lines += ["", "| between layers | torch, us | drop-in, us | torch / drop-in | ran |"]
    lines.append("|---|---:|---:|---:|---|")
    for row in record.get("in_programs", ()):
        ratio = row["ratio"]["median"]
        lines.append(
            f"| {row['name']} | {row['torch_us']:.0f} | {row['ours_us']:.0f} | {ratio:.2f} | "
            f"`{row['ran']}` |"
        )
    return "\n".join(lines)


def _met(met: bool) -> str:
    return "met" if met else "not met"


SHOWN = (
    "attention, BNTH", "attention, BTNH", "plan step, BNTH", "attention, compiled",
    "in use_backend(...)", "mask=causal", "polyattn's drop-in F.sdpa", "torch F.sdpa",
    "with sdpa_kernel(FLASH): F.sdpa", "diffusers dispatch_attention_fn",
    "transformers sdpa_attention_forward",
)  # fmt: skip


def programs() -> str:
    """Return what whole programs gained, one table for each record of ``bench programs``."""
    found = sorted(RESULTS.glob("*/programs.json"))
    return "\n\n".join(map(_programs, found)) or "No record of `polyattn bench programs` is here."


def _programs(path: Path) -> str:
    record = json.loads(path.read_text(encoding="utf-8"))
    machine, versions = record["machine"], record["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "diffusers"))
    level = level_of(frozenset(machine["flags"]))
    where = (
        f"{processor_name(machine)} with {level}, {machine['cores']} cores, {names}, "
        f"{record['date'][:10]}, "
        f"by `{record['command']}`: [the record]({path.relative_to(ROOT).as_posix()}). Time of the "
        "library's own default over that with polyattn:"
    )
    heads = ["| program | its default | float32 | bfloat16 |", "|---|---|---:|---:|"]
    lines = [where, "", *heads]
    rows: dict[str, dict[str, Any]] = {}
    for row in record["rows"]:
        program, _, dtype = row["name"].rpartition(" ")
        rows.setdefault(program, {})[dtype] = row
    for program, of in rows.items():
        stock = next(iter(of.values()))["stock"]
        cells = (_gain(of.get(dtype)) for dtype in ("fp32", "bf16"))
        lines.append(f"| {program} | {stock} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _gain(row: Mapping[str, Any] | None) -> str:
    if row is None or row["ratio"] is None or row["wrong"]:
        return "-"
    missed = "" if row["met"] else f" (goal {row['goal']:g})" if row["met"] is False else " (noisy)"
    return f"{row['ratio']['median']:.2f}{missed}"


def cpu() -> str:
    """Return what was measured of the CPU kernel, one part for each folder of records."""
    folders = {
        path.parent for name in ("cpu.json", "peers.md") for path in RESULTS.glob(f"*/{name}")
    }
    return "\n\n".join(map(_processor, sorted(folders)))


def _processor(folder: Path) -> str:
    """Return the tables of one record; what was copied by hand stands in for engines it lacks."""
    path, by_hand = folder / "cpu.json", folder / "peers.md"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    records = [json.loads(one.read_text(encoding="utf-8")) for one in folder.glob("*.json")]
    # older records do not name the processor's family
    machine = (record or next(one for one in records if "machine" in one))["machine"]
    level = level_of(frozenset(machine["flags"]))
    parts = [f"### {processor_name(machine)} with {level}, {machine['cores']} cores"]
    if record:
        parts += [_conditions(record, path), _goals(record, _limits(folder)), _peers(record)]
    if by_hand.exists() and not _answered(record):
        parts.append(by_hand.read_text(encoding="utf-8").strip())
    return "\n\n".join(parts)


def _answered(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what the engines of others said of themselves, without those that did not run."""
    found = record.get("engines", {})
    return {name: about for name, about in found.items() if "versions" in about}


def _conditions(record: Mapping[str, Any], path: Path) -> str:
    rows = record["rows"]
    busy = max(row["foreign"]["max"] for row in rows)
    sticks = ", ".join(
        f"{name} {stick['median' if name == 'read' else 'max']:.0f} {stick['unit']}"
        for name, stick in sorted(record["yardsticks"].items())
    )
    return (
        f"{record['threads']} threads, torch "
        f"{record['versions']['torch']}, {record['date'][:10]}, others busy at most {busy:.0%}; "
        f"yardsticks of the run: {sticks}. The record: `{path.relative_to(ROOT).as_posix()}`, by "
        f"`{record['command']}`; its figures are judged by the goals of today."
    )


def _limits(folder: Path) -> dict[str, list[str]]:
    """Return what profiles on such a machine found, by group of cases: float32, bfloat16."""
    path = folder / "limits.json"
    found = json.loads(path.read_text(encoding="utf-8"))["limits"] if path.exists() else {}
    return dict(found)


def _goals(record: Mapping[str, Any], limits: Mapping[str, list[str]]) -> str:
    kind, rows = processors_like(record["machine"]), record["rows"]
    own = [name for name in OWN if any(name in row["peers"] for row in rows)]
    names = ["case", "ours, ms", "x torch", *(f"x {name}" for name in own), "of peak"]
    lines = [
        f"| {' | '.join((*names, 'goals', 'limited by'))} |",
        f"|---|{'---:|' * (len(names) - 1)}---|---|",
    ]
    for row in rows:
        cells = [
            row["name"], f"{row['ours_ms']['median']:.3g}", f"{row['ratio']['median']:.3g}",
            *_ratios(row, own), *_judged(row, record, kind),
            limits.get(row["group"], [row["limit"]] * 2)[row["dtype"] != "float32"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _judged(row: Mapping[str, Any], record: Mapping[str, Any], kind: Processors) -> Iterator[str]:
    """Yield the share of peak or read rate, and the goals; the yardsticks are those of the run."""
    share, rate = row["ours_share"], ""
    if "ours_gbs" in row:
        share = row["ours_gbs"] / record["yardsticks"]["read"]["median"]
        rate = f"{row['ours_gbs']:.0f} GB/s, "
    yield f"{rate}{share:.0%}"
    wanted = kind.goal(case_and_size(row), row["dtype"])
    now = {**row, "goal": wanted, "ours_share": share}
    yield "; ".join(map(_verdict, verdicts(now, kind, peers=bool(_answered(record)))))


def _verdict(one: Mapping[str, Any]) -> str:
    goal = f">= {one['least']:g}" if "least" in one else f"<= {one['most']:g}"
    return f"{one['over']} {goal}: {_met(one['met'])}"


def case_and_size(row: Mapping[str, Any]) -> str:
    """Return the name of a row without its dtype and layout."""
    return f"{row['name'].rpartition(')')[0]})"


def _peers(record: Mapping[str, Any]) -> str:
    """Return the times of others over ours, and why an engine has none."""
    rows = [row for row in record["rows"] if any("ratio" in one for one in row["peers"].values())]
    names = sorted({name for row in rows for name in row["peers"]} - set(OWN))
    said = [
        f"{name} {' '.join(about['versions'].values())}"
        for name, about in _answered(record).items()
    ]
    lines = [
        f"Times of others over ours, in the same rounds{''.join(f'; {one}' for one in said)}:",
        "",
        f"| {' | '.join(('case', 'torch', *names))} |",
        f"|---|{'---:|' * (len(names) + 1)}",
    ]
    for row in rows:
        cells = (row["name"], f"{row['ratio']['median']:.3g}", *_ratios(row, names))
        lines.append(f"| {' | '.join(cells)} |")
    missing = [
        f"{name}: {about['unable']}."
        for name, about in record["engines"].items()
        if "unable" in about
    ]
    return "\n".join([*lines, *(["", *missing] if missing else [])])


def _ratios(row: Mapping[str, Any], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        peer = row["peers"].get(name, {})
        right = "ratio" in peer and not peer["wrong"]
        yield f"{peer['ratio']['median']:.3g}" if right else "wrong" if "ratio" in peer else ""


def offload() -> str:
    """Return the tables of offload's records in benchmarks/results."""
    found = sorted((ROOT / "benchmarks" / "results").glob("*/offload.json"))
    made = "There is no record yet: `polyattn bench offload --record` makes it."
    return "\n\n".join(map(_offload, found)) or made


def _offload(path: Path) -> str:
    record = json.loads(path.read_text(encoding="utf-8"))
    machine, versions = record["machine"], record["versions"]
    where = (
        f"{machine.get('accelerator', machine['cpu'])}, {machine['cores']} cores, torch "
        f"{versions['torch']}, {record.get('date', 'no date')[:10]}. The record: "
        f"`{path.relative_to(ROOT).as_posix()}`."
    )
    lines = [where, "", "| part | found | goals |", "|---|---|---|"]
    rows = record["rows"]
    return "\n".join([*lines, *(f"| {r['name']} | {r['text']} | {_met(r['met'])} |" for r in rows)])


def gpu() -> str:
    """Return what was measured on GPUs, one table for each record of ``bench gpu``."""
    return "\n\n".join(map(_gpu, sorted(RESULTS.glob("*/gpu.json"))))


def _gpu(path: Path) -> str:
    record = json.loads(path.read_text(encoding="utf-8"))
    machine = record["machine"]
    forced = list(dict.fromkeys(n for r in record["rows"] for n in r["ratios"] if "_" in n))
    names = ["drop-in", "attention", *forced, "flex"]
    where = (
        f"{machine['accelerator']}, torch {record['versions']['torch']}, CUDA {machine['cuda']}, "
        f"cuDNN {machine['cudnn']}, {record['date'][:10]}: torch's own time over ours, by "
        f"`{record['command']}` ([the record]({'../' + path.relative_to(ROOT).as_posix()}))."
    )
    heads = ["case", "torch, ms", *(f"`{n}`" if n in (*forced, "flex") else n for n in names)]
    lines = [
        where, "", f"| {' | '.join([*heads, 'TFLOP/s', 'chosen'])} |",
        f"|---|{'---:|' * (len(heads))}---|",
    ]  # fmt: skip
    for row in record["rows"]:
        of = row["ratios"]
        cells = [f"{of[name]['median']:.2f}" if name in of else "-" for name in names]
        chosen = row["choices"]["attention"]["chosen"]
        ends = [f"{row['tflops']:g}", f"`{chosen}`"]
        cells = [row["name"], f"{row['torch_ms']['median']:.3g}", *cells, *ends]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def variables() -> str:
    """Return the table of the settings."""
    lines = ["| variable | values | meaning |", "|---|---|---|"]
    found = settings.rows()
    return "\n".join([*lines, *(f"| `{name}` | {said} | {about} |" for name, said, about in found)])


PAGES = {
    "README.md": {"programs": programs, "backends": lambda: table(registry), "costs": costs},
    "docs/cpu.md": {"cpu": cpu},
    "docs/command-line.md": {"settings": variables},
    "docs/gpu.md": {"gpu": gpu},
    "docs/offload.md": {"offload": offload},
    "docs/transformers.md": {"models": models_of("transformers")},
    "docs/diffusers.md": {"models": models_of("diffusers")},
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
